"""The twin: the engine's own scheduler, KV manager and router on a virtual clock."""
