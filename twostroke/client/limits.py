"""What a request may ask for: refusals that no waiting would change, each with its numbers."""

from collections.abc import Sequence

from twostroke.client.sampling import validate
from twostroke.errors import ContextLengthError, RequestError
from twostroke.messages import SamplingParams


def check_request(
    prompt_token_ids: Sequence[int],
    params: SamplingParams,
    cache_salt: str,
    *,
    vocab_size: int,
    max_logprobs: int,
    max_num_queued_reqs: int,
) -> None:
    """Raise RequestError for what no engine state can make right."""
    validate(params, vocab_size=vocab_size, max_logprobs=max_logprobs)
    if params.n > max_num_queued_reqs:
        raise RequestError(
            f"n is {params.n}; this server runs at most {max_num_queued_reqs} at once", param="n"
        )
    if len(prompt_token_ids) == 0:
        raise RequestError("the prompt is empty; it needs at least one token", param="prompt")
    for token_id in (min(prompt_token_ids), max(prompt_token_ids)):
        if not 0 <= token_id < vocab_size:
            raise RequestError(
                f"the prompt holds token {token_id}; the vocabulary has ids 0 to {vocab_size - 1}",
                param="prompt",
            )
    if not cache_salt.isascii():
        raise RequestError("cache_salt must be ASCII text", param="cache_salt")


def resolve_max_tokens(
    num_prompt: int,
    params: SamplingParams,
    *,
    max_model_len: int,
    model_max_len: int,
    kv_tokens: int,
) -> int:
    """Output tokens at most; None fills what is left. Raises ContextLengthError.

    A request is bounded by `max_model_len`, the length that is served (`model_max_len` is the
    model's own), and by what the KV pool holds.
    """
    limit = min(max_model_len, kv_tokens)
    if limit == max_model_len:
        what = f"the maximum context length is {limit:,} tokens"
        needed = num_prompt + (params.max_tokens or 1)
        longer = needed <= model_max_len
        cure = f"restart with --max-model-len {needed}" if longer else "take another model"
    else:
        what = f"the KV pool holds {limit:,} tokens"
        cure = "give the KV pool more memory"
    if num_prompt >= limit:
        raise ContextLengthError(
            f"the prompt has {num_prompt:,} tokens, which leaves no room for output; {what}",
            hint=f"shorten the prompt or {cure}",
        )
    if params.max_tokens is None:
        room = limit - num_prompt
        if params.min_tokens > room:
            raise ContextLengthError(
                f"the prompt has {num_prompt:,} tokens and min_tokens is "
                f"{params.min_tokens:,}; {what}",
                param="min_tokens",
            )
        return room
    if num_prompt + params.max_tokens > limit:
        raise ContextLengthError(
            f"the prompt has {num_prompt:,} tokens and max_tokens is {params.max_tokens:,}, "
            f"{num_prompt + params.max_tokens:,} in all; {what}",
            param="max_tokens",
            hint=f"ask for at most {limit - num_prompt:,} tokens, shorten the prompt or {cure}",
        )
    return params.max_tokens
