"""Prometheus metrics with vLLM's names, under the prefix `twostroke:` or `vllm:`."""

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """All metrics of one engine, in a registry of their own."""

    def __init__(self, *, model_name: str, prefix: str = "twostroke", engine: int = 0) -> None:
        raise NotImplementedError

    def render(self) -> bytes:
        """The text that `/metrics` answers, of type CONTENT_TYPE."""
        raise NotImplementedError
