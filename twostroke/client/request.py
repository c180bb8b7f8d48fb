"""A request as process 1 sees it: its samples, and the one slot in which their output waits.

    output task ── Sample.feed ──▶ merging slot ── Request.take ──▶ handler

The slot merges: when the consumer is slow, what comes later is appended to what waits, so memory
is bounded by the output and nothing slows the engine down.
"""

import asyncio
from collections.abc import Sequence

import msgspec

from twostroke.client.detokenizer import Detokenizer
from twostroke.client.tokenizer import Tokenizer
from twostroke.kv_messages import KvReceived
from twostroke.ledger import Boundary, RequestLedger
from twostroke.messages import Finished, FinishReason, Int32s, SamplingParams, TokenLogprobs
from twostroke.metrics import SampleRecord


class RequestOutput(msgspec.Struct, kw_only=True):
    """What one sample of a request got since its last output.

    `index` says which of the n samples. `finish_reason` is "stop", "length", "abort" or "error"
    (then `error` says why) in a sample's last output, else None. `stop_reason` is the stop string,
    or the stop token id (not EOS), that ended it. `token_ids` and `logprobs` have one entry per new
    token; `text` may lag behind them (partial characters, possible stop strings) until the last
    output, and leaves out the token that stopped it. `prompt_logprobs` comes once, complete, in the
    first output of sample 0, when asked for: one entry per prompt token, None for the first.
    """

    index: int
    text: str = ""
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    def merge(self, later: "RequestOutput") -> None:
        """Append what the same sample got later."""
        self.text += later.text
        self.token_ids += later.token_ids
        if later.logprobs is not None:
            self.logprobs = (self.logprobs or []) + later.logprobs
        self.finish_reason = later.finish_reason
        self.stop_reason = later.stop_reason
        self.error = later.error
        self.cached_tokens = later.cached_tokens
        self.prompt_logprobs = self.prompt_logprobs or later.prompt_logprobs


class Sample:
    """One of a request's n samples: a request of its own to the core, known there by `handle`."""

    __slots__ = (
        "_detokenizer",
        "_include_stop",
        "_prompt_logprobs",
        "cached_tokens",
        "engine",
        "finish_reason",
        "handle",
        "index",
        "last_token_s",
        "ledger",
        "num_tokens",
        "output_ids",
        "request",
        "transfer_bytes",
        "transfer_s",
    )

    def __init__(self, request: "Request", index: int, handle: int, tokenizer: Tokenizer) -> None:
        params = request.params
        self.request = request
        self.index = index
        self.handle = handle
        self.ledger = RequestLedger(request.arrival_s)
        self.finish_reason: str | None = None
        self.num_tokens = 0
        self.cached_tokens = 0
        self.engine = 0  # the index of the one that serves it, or did last
        self.transfer_bytes = 0  # of its KV, from another engine, in so many seconds
        self.transfer_s = 0.0
        self.output_ids: list[int] | None = None  # collected where that is of use
        self.last_token_s: float | None = None
        self._detokenizer = Detokenizer(tokenizer, params)
        self._include_stop = params.include_stop_str_in_output
        wants = params.prompt_logprobs is not None and index == 0
        self._prompt_logprobs: list[TokenLogprobs | None] | None = [None] if wants else None

    def add_prompt_logprobs(self, start: int, tokens: Sequence[TokenLogprobs]) -> None:
        """A piece of them from position `start`; after a preemption it may repeat positions."""
        if self._prompt_logprobs is not None:
            self._prompt_logprobs[start:] = tokens

    def received(self, received: KvReceived) -> None:
        """Its KV came from another engine, or did not."""
        self.transfer_bytes += received.num_bytes
        self.transfer_s += received.moving_s

    def feed(
        self,
        token_ids: list[int],
        finished: Finished | None,
        logprobs: list[TokenLogprobs] | None,
    ) -> RequestOutput:
        """Turn what the core sent in one step into an output; sets `finish_reason` at the end.

        A stop string ends the sample here, whatever the core says: tokens after the one that
        completed it are dropped.
        """
        detokenizer = self._detokenizer
        output = RequestOutput(index=self.index, cached_tokens=self.cached_tokens)
        # A token that ends the sample (EOS or a stop id) is not text, unless asked for.
        hidden = finished is not None and finished.reason == FinishReason.STOP
        shown = token_ids[:-1] if hidden and not self._include_stop else token_ids
        num_before = detokenizer.num_tokens
        output.text = detokenizer.push(shown)
        if finished is not None:
            output.text += detokenizer.flush()
        if detokenizer.stop is not None:
            token_ids = token_ids[: detokenizer.num_tokens - num_before]
            output.finish_reason, output.stop_reason = "stop", detokenizer.stop
        elif finished is not None:
            output.finish_reason = finished.reason.name.lower()
            output.stop_reason, output.error = finished.stop_token_id, finished.error
        self.finish_reason = output.finish_reason
        self.num_tokens += len(token_ids)
        output.token_ids = token_ids
        if self.output_ids is not None:
            self.output_ids += token_ids
        if logprobs is not None:
            output.logprobs = logprobs[: len(token_ids)]
        if self._prompt_logprobs is not None and (token_ids or finished is not None):
            output.prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, None
        return output

    def fail(self, error: str) -> RequestOutput:
        """End the sample with an error of ours."""
        self.finish_reason = "error"
        return RequestOutput(index=self.index, finish_reason="error", error=error)

    def record(self) -> SampleRecord:
        """What metrics and the log need once the sample is closed."""
        request = self.request
        return SampleRecord(
            prompt_tokens=request.num_prompt_tokens,
            cached_tokens=self.cached_tokens,
            output_tokens=self.num_tokens,
            max_tokens=request.max_tokens,
            finish_reason=self.finish_reason or "abort",
            ledger=self.ledger,
            transfer_bytes=self.transfer_bytes,
            transfer_s=self.transfer_s,
        )


class Request:
    """A request that is open: between `AsyncEngine.generate` and the core."""

    def __init__(
        self,
        request_id: str,
        params: SamplingParams,
        prompt_token_ids: Int32s,
        *,
        cache_salt: str,
        max_tokens: int,
        arrival_s: float,
        final_only: bool,
    ) -> None:
        self.request_id = request_id
        self.params = params
        self.prompt_token_ids = prompt_token_ids
        self.num_prompt_tokens = len(prompt_token_ids)
        self.cache_salt = cache_salt
        self.max_tokens = max_tokens
        self.arrival_s = arrival_s
        self.samples: list[Sample] = []
        self._final_only = final_only
        self._num_open = params.n
        self._slot: dict[int, RequestOutput] = {}
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_open(self) -> bool:
        """Some output is still to come, or to be taken."""
        return self._num_open > 0 or bool(self._slot)

    def put(self, output: RequestOutput) -> None:
        """Merge an output into the slot, and wake the consumer if it wants to know."""
        if (waiting := self._slot.get(output.index)) is not None:
            waiting.merge(output)
        elif output.text or output.token_ids or output.finish_reason:
            self._slot[output.index] = output
        if output.finish_reason is not None:
            self._num_open -= 1
        if not self._final_only or self._num_open == 0:
            self._wake()

    def fail(self, error: Exception) -> None:
        """No more output will come; `take` raises `error` once the slot is empty."""
        self._error = error
        self._wake()

    async def take(self) -> list[RequestOutput]:
        """Wait for output and empty the slot; with `final_only`, wait for all of it."""
        while True:
            complete = self._num_open == 0
            if self._slot and (complete or not self._final_only):
                outputs = list(self._slot.values())
                self._slot.clear()
                return outputs
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def close_sample(self, index: int, time_s: float) -> None:
        """The consumer has, or will never get, the last output of sample `index`."""
        self.samples[index].ledger.mark(Boundary.CLOSED, time_s)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
