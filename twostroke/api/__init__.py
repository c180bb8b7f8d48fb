"""HTTP: OpenAI's API over `client`. One asyncio thread, never blocked."""
