"""From request fields to `SamplingParams`, and the count of what a request used."""

from twostroke.api.protocol import GenerationRequest, PromptTokensDetails, Usage
from twostroke.client.engine import RequestOutput
from twostroke.errors import RequestError
from twostroke.messages import SamplingParams


def sampling_params(
    request: GenerationRequest,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    """What both endpoints mean by the same fields; `client.sampling.validate` checks ranges."""
    if request.stream_options is not None and not request.stream:
        raise RequestError(
            "stream_options is given but stream is false",
            param="stream_options",
            hint="set stream to true or leave stream_options out",
        )
    if request.prompt_logprobs is not None and request.stream:
        raise RequestError(
            "prompt_logprobs cannot be streamed",
            param="prompt_logprobs",
            hint="set stream to false",
        )
    return SamplingParams(
        n=request.n,
        temperature=request.temperature,
        top_k=0 if request.top_k == -1 else request.top_k,  # vLLM's two ways to say off
        top_p=request.top_p,
        min_p=request.min_p,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        repetition_penalty=request.repetition_penalty,
        logit_bias={int(key): bias for key, bias in request.logit_bias.items()} or None,
        seed=request.seed,
        max_tokens=max_tokens,
        min_tokens=request.min_tokens,
        stop=(request.stop,) if isinstance(request.stop, str) else tuple(request.stop),
        stop_token_ids=tuple(request.stop_token_ids),
        include_stop_str_in_output=request.include_stop_str_in_output,
        ignore_eos=request.ignore_eos,
        skip_special_tokens=request.skip_special_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


class UsageCounter:
    """Counts a request's tokens as its outputs pass, and says which chunks carry the count.

    A prompt is counted once however many samples it has; what of it was cached is what its first
    sample found, because the others find what the first has just computed.
    """

    def __init__(self, request: GenerationRequest, prompt_tokens: int) -> None:
        options = request.stream_options
        self.is_wanted = not request.stream or bool(options and options.include_usage)
        self.is_continuous = self.is_wanted and bool(options and options.continuous_usage_stats)
        self._prompt_tokens = prompt_tokens
        self._completion_tokens = 0
        self._cached: dict[int, int] = {}

    def count(self, output: RequestOutput, prompt: int = 0) -> None:
        """Take note of an output of the `prompt`-th prompt."""
        self._completion_tokens += len(output.token_ids)
        if output.index == 0:
            self._cached[prompt] = max(output.cached_tokens, self._cached.get(prompt, 0))

    def total(self) -> Usage:
        """The count so far."""
        return Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._completion_tokens,
            total_tokens=self._prompt_tokens + self._completion_tokens,
            prompt_tokens_details=PromptTokensDetails(sum(self._cached.values())),
        )
