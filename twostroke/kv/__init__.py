"""KV cache bookkeeping: blocks, prefix cache, the manager. No torch, no time, no I/O."""
