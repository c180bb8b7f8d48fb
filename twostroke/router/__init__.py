"""Which engine gets a request: decisions only, shared by the server and its models."""
