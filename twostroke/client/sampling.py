"""Checks of sampling parameters, before a request leaves the API process.

Ranges are those of vLLM 0.22.1 and of OpenAI's API. A worker trusts what passed here: an id outside
the vocabulary would read or write outside its arrays.
"""

import math
from collections.abc import Iterable

from twostroke.errors import RequestError
from twostroke.messages import SamplingParams

MAX_N = 128
MAX_STOPS = 64
MAX_STOP_CHARS = 4096
MAX_BIASES = 4096
_INT64 = 1 << 63


def validate(params: SamplingParams, *, vocab_size: int, max_logprobs: int = 20) -> None:
    """Raise RequestError, naming the field, for a value that a worker must not see.

    `vocab_size` counts the token ids that the model knows.
    """
    _integer("n", params.n, 1, MAX_N)
    _number("temperature", params.temperature, 0, math.inf)
    _integer("top_k", params.top_k, -1, None)
    _number("top_p", params.top_p, 0, 1, above=True)
    _number("min_p", params.min_p, 0, 1)
    _number("presence_penalty", params.presence_penalty, -2, 2)
    _number("frequency_penalty", params.frequency_penalty, -2, 2)
    # vLLM has no bound above; beyond these float32 logits overflow, and no token could be drawn.
    _number("repetition_penalty", params.repetition_penalty, 1e-3, 1e3)
    if params.seed is not None:
        _integer("seed", params.seed, -_INT64, _INT64 - 1)
    if params.max_tokens is not None:
        _integer("max_tokens", params.max_tokens, 1, None)
    _integer("min_tokens", params.min_tokens, 0, None)
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise RequestError(
            f"min_tokens is {params.min_tokens}; it must be at most max_tokens {params.max_tokens}",
            param="min_tokens",
        )
    for name, value in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if value is not None:
            _integer(name, value, 0, max_logprobs)
    _check_stops(params.stop)
    _check_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    if params.logit_bias:
        if len(params.logit_bias) > MAX_BIASES:
            raise RequestError(
                f"logit_bias has {len(params.logit_bias)} entries; at most {MAX_BIASES}",
                param="logit_bias",
            )
        _check_ids("logit_bias", params.logit_bias, vocab_size)
        for token_id, bias in params.logit_bias.items():
            _number("logit_bias", bias, -100, 100, shown=f"logit_bias of token {token_id}")


def _number(
    name: str, value: float, low: float, high: float, *, above: bool = False, shown: str = ""
) -> None:
    """Finite, at least `low` (`above`: more than it), at most `high`."""
    sound = math.isfinite(value) and low <= value <= high and not (above and value == low)
    if not sound:
        least = f"more than {low:g}" if above else f"at least {low:g}"
        most = f" and at most {high:g}" if math.isfinite(high) else ""
        raise RequestError(f"{shown or name} is {value}; it must be {least}{most}", param=name)


def _integer(name: str, value: int, low: int, high: int | None) -> None:
    if value < low or (high is not None and value > high):
        most = "" if high is None else f" and at most {high}"
        raise RequestError(f"{name} is {value}; it must be at least {low}{most}", param=name)


def _check_stops(stops: tuple[str, ...]) -> None:
    if len(stops) > MAX_STOPS:
        raise RequestError(f"stop has {len(stops)} strings; at most {MAX_STOPS}", param="stop")
    if not all(stops):
        raise RequestError("stop holds an empty string; it would end every answer", param="stop")
    if (total := sum(map(len, stops))) > MAX_STOP_CHARS:
        raise RequestError(
            f"stop strings have {total} characters in all; at most {MAX_STOP_CHARS}", param="stop"
        )


def _check_ids(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise RequestError(
                f"{name} names token {token_id}; the vocabulary has ids 0 to {vocab_size - 1}",
                param=name,
            )
