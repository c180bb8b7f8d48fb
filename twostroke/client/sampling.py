"""Checks of sampling parameters, before a request leaves the API process."""

from twostroke.messages import SamplingParams


def validate(params: SamplingParams, *, vocab_size: int, max_logprobs: int = 20) -> None:
    """Raise RequestError, naming the field, for a value that a worker must not see."""
    raise NotImplementedError
