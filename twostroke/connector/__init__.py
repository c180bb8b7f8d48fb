"""KV transfer between engines: protocols and transports."""
