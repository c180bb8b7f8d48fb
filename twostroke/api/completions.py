"""POST /v1/completions: one prompt or several, n samples of each, echo and log-probabilities.

Choices are numbered prompt by prompt: sample i of prompt p is choice p * n + i.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from twostroke.api.errors import GenerationError
from twostroke.api.logprobs import CompletionColumns, prompt_logprobs
from twostroke.api.parse import parse
from twostroke.api.protocol import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
)
from twostroke.api.sampling import UsageCounter, sampling_params
from twostroke.api.state import ServerState, check_finish, request_ids
from twostroke.api.streaming import GenerationResponse, merge, read_body
from twostroke.client.engine import RequestOutput
from twostroke.errors import RequestError
from twostroke.messages import SamplingParams, TokenLogprobs

DEFAULT_MAX_TOKENS = 16  # OpenAI's


@dataclass(frozen=True)
class _Prompt:
    """One prompt; `text` is what `echo` sends back (None: not asked for)."""

    token_ids: list[int]
    text: str | None


async def completions(state: ServerState, request: Request) -> Response:
    """Complete prompts, streamed or not."""
    ask = parse(await read_body(request, state.max_body_bytes), CompletionRequest)
    model = state.served_name(ask.model)
    params = _params(ask)
    state.require_ready()
    prompts = await _prompts(state, ask)
    request_id, unique_id = request_ids(request)
    work = _Completions(
        state=state,
        ask=ask,
        params=params,
        prompts=prompts,
        response_id=f"cmpl-{unique_id}",
        model=model,
    )
    return GenerationResponse(work.chunks(), None if ask.stream else fold, request_id)


def _params(ask: CompletionRequest) -> SamplingParams:
    max_tokens = DEFAULT_MAX_TOKENS if ask.max_tokens is None else ask.max_tokens
    scored = [ask.prompt_logprobs, ask.logprobs if ask.echo else None]
    return sampling_params(
        ask,
        # Scoring a prompt (max_tokens 0 with echo) runs the model for one token, which is dropped.
        max_tokens=1 if max_tokens == 0 and ask.echo else max_tokens,
        logprobs=ask.logprobs,
        prompt_logprobs=max((k for k in scored if k is not None), default=None),
    )


async def _prompts(state: ServerState, ask: CompletionRequest) -> list[_Prompt]:
    given: Any = [ask.prompt] if isinstance(ask.prompt, str) else ask.prompt
    kinds = set(map(type, given))  # there may be millions of token ids
    if len(kinds) != 1:
        what = "a mixture of texts, token ids and lists" if given else "empty"
        raise RequestError(
            f"prompt is {what}",
            param="prompt",
            hint="send a text, a list of texts, a list of token ids, or a list of such lists",
        )
    if kinds == {int}:
        return [_from_ids(state, ask, given)]
    if len(given) * ask.n > state.max_num_queued_reqs:
        raise RequestError(
            f"{len(given)} prompts with n {ask.n} make {len(given) * ask.n} requests; "
            f"this server holds at most {state.max_num_queued_reqs} unfinished ones",
            param="prompt",
            hint="send the prompts in several requests",
        )
    if kinds == {list}:
        return [_from_ids(state, ask, item) for item in given]
    encode = partial(
        state.tokenizer.encode_async,
        add_special_tokens=ask.add_special_tokens,
        max_tokens=state.engine.max_request_tokens,
    )
    encoded = await asyncio.gather(*[encode(text) for text in given])
    return [
        _Prompt(ids, text if ask.echo else None) for ids, text in zip(encoded, given, strict=True)
    ]


def _from_ids(state: ServerState, ask: CompletionRequest, token_ids: list[int]) -> _Prompt:
    if not ask.echo:
        return _Prompt(token_ids, None)
    skip = ask.skip_special_tokens
    return _Prompt(token_ids, state.tokenizer.decode(token_ids, skip_special_tokens=skip))


class _Sample:
    """What one choice has told so far."""

    def __init__(self, work: "_Completions", prompt: _Prompt) -> None:
        self.is_new = True
        self.prompt = prompt
        self.columns = CompletionColumns(
            work.state.tokenizer,
            work.ask.logprobs or 0,
            skip_special_tokens=work.ask.skip_special_tokens,
            is_text_start=work.ask.echo,
        )


@dataclass(kw_only=True)
class _Completions:
    """The prompts of one HTTP request on their way through the engine."""

    state: ServerState
    ask: CompletionRequest
    params: SamplingParams
    prompts: list[_Prompt]
    response_id: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))

    async def chunks(self) -> AsyncGenerator[Completion, None]:
        """The stream: pieces, then the usage when it is wanted."""
        usage = UsageCounter(self.ask, sum(len(prompt.token_ids) for prompt in self.prompts))
        samples: dict[int, _Sample] = {}
        async with aclosing(self._outputs()) as outputs:
            async for p, output, scores in outputs:
                check_finish(output)
                if self.ask.max_tokens == 0:
                    _forget_token(output)
                usage.count(output, p)
                number = p * self.params.n + output.index
                if (sample := samples.get(number)) is None:
                    sample = samples[number] = _Sample(self, self.prompts[p])
                choice = self._choice(number, sample, output, scores)
                if choice is not None:
                    yield self._chunk(usage, choice)
        if usage.is_wanted:
            last = self._chunk(usage, None)
            last.usage = usage.total()
            yield last

    async def _outputs(
        self,
    ) -> AsyncGenerator[tuple[int, RequestOutput, list[TokenLogprobs | None] | None], None]:
        """Outputs of all prompts, each with its prompt's log-probabilities when it needs them.

        These come with sample 0 only; what other samples have before that is held back.
        """
        generate = self.state.engine.generate
        merged = merge(
            [
                generate(
                    prompt.token_ids,
                    self.params,
                    request_id=self.response_id + (f"-{p}" if len(self.prompts) > 1 else ""),
                    priority=self.ask.priority,
                    cache_salt=self.ask.cache_salt,
                    final_only=not self.ask.stream,
                )
                for p, prompt in enumerate(self.prompts)
            ]
        )
        waits = self.params.prompt_logprobs is not None
        scores: dict[int, list[TokenLogprobs | None]] = {}
        held: dict[int, list[RequestOutput]] = {}
        async with aclosing(merged):
            async for p, output in merged:
                if output.prompt_logprobs is not None:
                    scores[p] = output.prompt_logprobs
                if waits and p not in scores and output.finish_reason not in ("error", "abort"):
                    held.setdefault(p, []).append(output)
                    continue
                for early in held.pop(p, []):
                    yield p, early, scores[p]
                yield p, output, scores.get(p)

    def _choice(
        self,
        number: int,
        sample: _Sample,
        output: RequestOutput,
        scores: list[TokenLogprobs | None] | None,
    ) -> CompletionChoice | None:
        """What an output adds to its choice; None when it has nothing to tell yet."""
        is_new = sample.is_new
        choice = CompletionChoice(number, output.text, finish_reason=output.finish_reason)
        if output.finish_reason is not None:
            choice.stop_reason = output.stop_reason
        token_ids, positions = list(output.token_ids), list[TokenLogprobs | None]()
        positions += output.logprobs or []
        if is_new and sample.prompt.text is not None:
            choice.text = sample.prompt.text + choice.text
            if scores is not None and self.params.logprobs is not None:
                token_ids = sample.prompt.token_ids + token_ids
                positions = scores + positions
        if self.params.logprobs is not None and positions:
            choice.logprobs = sample.columns.take(token_ids, positions)
        if is_new and scores is not None and self.ask.prompt_logprobs is not None:
            choice.prompt_logprobs = prompt_logprobs(self.state.tokenizer, scores)
        if self.ask.return_token_ids:
            choice.token_ids = output.token_ids
            if is_new:
                choice.prompt_token_ids = sample.prompt.token_ids
        if not (choice.text or choice.finish_reason or choice.logprobs or choice.token_ids):
            return None
        sample.is_new = False
        return choice

    def _chunk(self, usage: UsageCounter, choice: CompletionChoice | None) -> Completion:
        chunk = Completion(
            id=self.response_id,
            created=self.created,
            model=self.model,
            choices=[] if choice is None else [choice],
        )
        if usage.is_wanted:
            chunk.usage = usage.total() if usage.is_continuous else None
        return chunk


def _forget_token(output: RequestOutput) -> None:
    """Drop the one token that scoring a prompt had to make."""
    output.text, output.token_ids, output.stop_reason = "", [], None
    output.logprobs = None
    if output.finish_reason is not None:
        output.finish_reason = "length"


async def fold(chunks: AsyncIterator[Completion]) -> Completion:
    """The whole answer: what a client of the stream would have put together."""
    answer: Completion | None = None
    choices: dict[int, CompletionChoice] = {}
    async for chunk in chunks:
        if answer is None:
            answer = Completion(id=chunk.id, created=chunk.created, model=chunk.model, choices=[])
        if chunk.usage is not UNSET:
            answer.usage = chunk.usage
        for piece in chunk.choices:
            if piece.index in choices:
                _add(choices[piece.index], piece)
            else:
                choices[piece.index] = piece
    if answer is None:
        raise GenerationError("the engine gave no output")
    answer.choices = [choices[index] for index in sorted(choices)]
    return answer


def _add(choice: CompletionChoice, piece: CompletionChoice) -> None:
    choice.text += piece.text
    if piece.logprobs is not None:
        columns = choice.logprobs = choice.logprobs or CompletionLogprobs()
        columns.text_offset += piece.logprobs.text_offset
        columns.token_logprobs += piece.logprobs.token_logprobs
        columns.tokens += piece.logprobs.tokens
        columns.top_logprobs += piece.logprobs.top_logprobs
    if piece.finish_reason is not None:
        choice.finish_reason, choice.stop_reason = piece.finish_reason, piece.stop_reason
    if piece.token_ids is not UNSET:
        choice.token_ids = ([] if choice.token_ids is UNSET else choice.token_ids) + piece.token_ids
