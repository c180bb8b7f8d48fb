"""The engine as the API process sees it.

    generate() ── checks, AddRequest ──▶ engine core
        ▲                                    │ EngineOutputs, one message a step
        └── the request's slot ◀── output task (detokenises, applies stop strings)

One output task reads what the core sends and wakes exactly the requests concerned. All of this
runs on one event loop, so there are no locks; a request's client state lives in `_samples` from
AddRequest until it ends or is aborted, and everything later about it is ignored.
"""

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from twostroke.client.request import Request, RequestOutput, Sample
from twostroke.client.sampling import validate
from twostroke.client.tokenizer import Tokenizer
from twostroke.clock import Clock, WallClock
from twostroke.errors import (
    ContextLengthError,
    EngineDeadError,
    QueueFullError,
    RequestError,
    TwostrokeError,
)
from twostroke.ledger import Boundary
from twostroke.messages import (
    AbortRequests,
    AddRequest,
    EngineDead,
    EngineOutputs,
    EngineProgress,
    EngineReady,
    EngineStats,
    Finished,
    FromEngine,
    SamplingParams,
    TokenLogprobs,
    UtilityCall,
    UtilityReply,
)
from twostroke.metrics import Metrics, SampleRecord, StatusLine, request_line
from twostroke.transport import EngineChannel

__all__ = ["AsyncEngine", "RequestOutput"]

logger = logging.getLogger("twostroke")

_ROWS_PER_TURN = 256  # of a step's outputs, before other tasks get the event loop
_SEED_STEP = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: spreads consecutive requests' seeds


def _seed(base: int, offset: int) -> int:
    """`base + offset`, wrapped into a signed 64-bit integer."""
    return (base + offset + (1 << 63)) % (1 << 64) - (1 << 63)


class _Step:
    """What gathers while one step's outputs are handed out."""

    def __init__(self, time_s: float, now_s: float) -> None:
        self.time_s = time_s  # when the engine finished the step
        self.aborts: list[int] = []
        self.first_token_s: list[float] = []
        self.inter_token_s: list[float] = []
        self._now_s = now_s

    def count_token(self, sample: Sample) -> None:
        """`sample` got tokens in this step."""
        if sample.last_token_s is None:
            self.first_token_s.append(self._now_s - sample.request.arrival_s)
            sample.ledger.mark(Boundary.FIRST_TOKEN, self.time_s)
        else:
            self.inter_token_s.append(self.time_s - sample.last_token_s)
            if sample.ledger.num_preemptions:
                sample.ledger.mark(Boundary.TOKEN, self.time_s)
        sample.last_token_s = self.time_s


class AsyncEngine:
    """Sends requests to one engine core and hands out what comes back.

    `max_model_len` is the model's own until the engine is ready and tells what it serves.
    `vocab_size` is the number of token ids that the model knows (default: the tokenizer's).
    `eos_token_ids` end a request unless it ignores EOS. `on_progress` is told how start-up goes.
    """

    def __init__(
        self,
        channel: EngineChannel,
        tokenizer: Tokenizer,
        *,
        model_name: str,
        max_model_len: int,
        eos_token_ids: Sequence[int],
        max_num_queued_reqs: int,
        metrics: Metrics | None = None,
        vocab_size: int | None = None,
        default_seed: int = 0,
        max_logprobs: int = 20,
        clock: Clock | None = None,
        on_progress: Callable[[EngineProgress], None] | None = None,
        status_interval_s: float = 10.0,
    ) -> None:
        self.tokenizer = tokenizer
        self.model_name = model_name
        self.max_model_len = self._model_max_len = max_model_len
        self.vocab_size = tokenizer.vocab_size if vocab_size is None else vocab_size
        self.metrics = metrics or Metrics(model_name=model_name, max_model_len=max_model_len)
        self.ready: EngineReady | None = None
        self.dead: EngineDeadError | None = None
        self.stats = EngineStats()
        self._channel = channel
        self._eos_token_ids = tuple(eos_token_ids)
        self._max_num_queued_reqs = max_num_queued_reqs
        self._default_seed = default_seed
        self._max_logprobs = max_logprobs
        self._clock: Clock = clock or WallClock()
        self._on_progress = on_progress
        self._status_interval_s = status_interval_s
        self._samples: dict[int, Sample] = {}
        self._handles = itertools.count(1)
        self._call_ids = itertools.count(1)
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._changed = asyncio.Event()  # ready or dead
        self._ended_s: deque[float] = deque(maxlen=64)  # when the last requests ended
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start the output task and the status line on the running loop."""
        self._tasks = [asyncio.create_task(self._receive_all(), name="engine outputs")]
        if self._status_interval_s > 0:
            self._tasks.append(asyncio.create_task(self._log_status(), name="status line"))

    async def close(self) -> None:
        """Stop the tasks. What is still open ends with EngineDeadError. The channel stays open."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._die(EngineDeadError("the engine was shut down"))

    @property
    def num_unfinished(self) -> int:
        """Core requests that are open: running or waiting."""
        return len(self._samples)

    @property
    def max_request_tokens(self) -> int:
        """Most prompt plus output tokens of one request: the model's length or the KV pool."""
        return min(self.max_model_len, self._kv_tokens)

    @property
    def _kv_tokens(self) -> int:
        if self.ready is None:
            return self.max_model_len
        return (self.ready.num_blocks - 1) * self.ready.block_size  # block 0 is never used

    async def wait_ready(self) -> EngineReady:
        """Wait until the model is loaded. Raises EngineDeadError when that fails."""
        while True:
            if self.dead is not None:
                raise EngineDeadError(self.dead.message, hint=self.dead.hint)
            if self.ready is not None:
                return self.ready
            await self._changed.wait()

    async def call(self, method: str, *args: Any) -> Any:
        """Ask the core something off the hot path (see `UtilityCall`).

        Raises TwostrokeError with the core's words when it cannot, EngineDeadError when it is gone.
        """
        await self.wait_ready()
        call_id = next(self._call_ids)
        future = self._calls[call_id] = asyncio.get_running_loop().create_future()
        try:
            self._channel.send(UtilityCall(call_id, method, list(args)))
            return await future
        finally:
            del self._calls[call_id]

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str = "",
        arrival_s: float | None = None,
        final_only: bool = False,
        on_close: Callable[[list[SampleRecord]], object] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run a request; ends when all its `params.n` samples have ended.

        `arrival_s` is when the request arrived, on the monotonic clock (default: now). With
        `final_only` the consumer is woken once, at the end, with one output per sample.
        `on_close` is given the records of all samples, ledgers included, however the request ends.

        Before the first output this raises RequestError (a wrong parameter), ContextLengthError,
        or QueueFullError; at any time EngineDeadError. Leaving it in whatever way (cancelled,
        timed out, `aclose`) aborts in the core what has not ended.
        """
        arrival_s = self._clock.now() if arrival_s is None else arrival_s
        self._check(prompt_token_ids, params, cache_salt)
        await self.wait_ready()
        request = Request(
            request_id,
            params,
            num_prompt_tokens=len(prompt_token_ids),
            max_tokens=self._resolve_max_tokens(len(prompt_token_ids), params),
            arrival_s=arrival_s,
            final_only=final_only,
        )
        self._admit(params.n)
        try:
            self._send(request, prompt_token_ids, priority, cache_salt)
            while request.is_open:
                for output in await request.take():
                    if output.finish_reason is not None:
                        request.close_sample(output.index, self._clock.now())
                    yield output
        finally:
            self._close(request, on_close)

    # ------------------------------------------------------------ towards the core

    def _check(
        self, prompt_token_ids: Sequence[int], params: SamplingParams, cache_salt: str
    ) -> None:
        """Raise RequestError for what no engine state can make right."""
        validate(params, vocab_size=self.vocab_size, max_logprobs=self._max_logprobs)
        if params.n > self._max_num_queued_reqs:
            raise RequestError(
                f"n is {params.n}; this server runs at most {self._max_num_queued_reqs} at once",
                param="n",
            )
        if len(prompt_token_ids) == 0:
            raise RequestError("the prompt is empty; it needs at least one token", param="prompt")
        for token_id in (min(prompt_token_ids), max(prompt_token_ids)):
            if not 0 <= token_id < self.vocab_size:
                raise RequestError(
                    f"the prompt holds token {token_id}; the vocabulary has ids 0 to "
                    f"{self.vocab_size - 1}",
                    param="prompt",
                )
        if not cache_salt.isascii():
            raise RequestError("cache_salt must be ASCII text", param="cache_salt")

    def _resolve_max_tokens(self, num_prompt: int, params: SamplingParams) -> int:
        """Output tokens at most; None fills what is left. Raises ContextLengthError."""
        limit = self.max_request_tokens
        if limit == self.max_model_len:
            what = f"the maximum context length is {limit:,} tokens"
            needed = num_prompt + (params.max_tokens or 1)
            longer = needed <= self._model_max_len
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

    def _admit(self, n: int) -> None:
        """Raise QueueFullError unless `n` more core requests may be open."""
        if len(self._samples) + n <= self._max_num_queued_reqs:
            return
        self.metrics.observe_rejection()
        excess = len(self._samples) + n - self._max_num_queued_reqs
        retry_after_s = 1.0
        if len(self._ended_s) > 1:  # the time in which as many requests ended lately
            rate = len(self._ended_s) / max(self._clock.now() - self._ended_s[0], 1e-3)
            retry_after_s = min(max(excess / rate, 1.0), 60.0)
        raise QueueFullError(
            f"{len(self._samples)} requests are unfinished; at most {self._max_num_queued_reqs}",
            retry_after_s=retry_after_s,
            hint="try again later or restart with a larger --max-num-queued-reqs",
        )

    def _send(
        self, request: Request, prompt_token_ids: Sequence[int], priority: int, cache_salt: str
    ) -> None:
        """Expand the request into `n` core requests and send them."""
        params = request.params
        tokens = np.asarray(prompt_token_ids, np.int32)
        for index in range(params.n):
            handle = next(self._handles)
            sample = Sample(request, index, handle, self.tokenizer)
            request.samples.append(sample)
            self._samples[handle] = sample
            if params.seed is None:
                seed = _seed(self._default_seed, handle * _SEED_STEP)
            else:
                seed = _seed(params.seed, index)
            child = msgspec.structs.replace(
                params,
                n=1,
                seed=seed,
                stop=(),  # stop strings are found here; neither core nor worker has text
                prompt_logprobs=params.prompt_logprobs if index == 0 else None,
            )
            suffix = f"-{index}" if params.n > 1 else ""
            self._channel.send(
                AddRequest(
                    handle=handle,
                    request_id=request.request_id + suffix,
                    prompt_token_ids=tokens,
                    params=child,
                    max_tokens=request.max_tokens,
                    eos_token_ids=() if params.ignore_eos else self._eos_token_ids,
                    arrival_s=request.arrival_s,
                    priority=priority,
                    cache_salt=cache_salt,
                )
            )
            sample.ledger.mark(Boundary.SENT, self._clock.now())

    def _close(
        self, request: Request, on_close: Callable[[list[SampleRecord]], object] | None
    ) -> None:
        """The one place where a request leaves: abort, metrics, log line."""
        live = [s.handle for s in request.samples if self._samples.pop(s.handle, None) is not None]
        if live and self.dead is None:
            self._channel.send(AbortRequests(live))
        now_s = self._clock.now()
        self._ended_s.append(now_s)
        for sample in request.samples:
            sample.ledger.mark(Boundary.FINISHED, now_s)
            sample.ledger.mark(Boundary.CLOSED, now_s)
        records = [sample.record() for sample in request.samples]
        if records:
            self.metrics.observe_request(records)
            logger.info("%s", request_line(request.request_id, records))
            if on_close is not None:
                on_close(records)

    # ------------------------------------------------------------ from the core

    async def _receive_all(self) -> None:
        """The output task. Ends when the engine does."""
        try:
            while self.dead is None:
                await self._on_message(await self._channel.receive())
                await asyncio.sleep(0)  # a backlog must not keep the consumers waiting
        except EngineDeadError as error:
            self._die(error)
        except Exception as error:
            logger.exception("the output task failed")
            self._die(EngineDeadError(f"cannot read the engine's outputs: {error}"))

    async def _on_message(self, message: FromEngine) -> None:
        match message:
            case EngineOutputs():
                await self._on_outputs(message)
            case UtilityReply(call_id, result, error):
                future = self._calls.get(call_id)
                if future is not None and not future.done():
                    if error is None:
                        future.set_result(result)
                    else:
                        future.set_exception(TwostrokeError(error))
            case EngineProgress():
                if self._on_progress is not None:
                    self._on_progress(message)
            case EngineReady():
                self.ready = message
                self.max_model_len = message.max_model_len
                self.metrics.engine_ready(message)
                self._changed.set()
            case EngineDead(error):
                self._die(EngineDeadError(f"the engine stopped: {error}"))

    async def _on_outputs(self, outputs: EngineOutputs) -> None:
        """Hand out one step's outputs: a dictionary look-up per row, and one abort message."""
        samples = self._samples
        step = _Step(outputs.time_s or self._clock.now(), self._clock.now())
        logprobs = self._note(outputs)
        finished = {end.handle: end for end in outputs.finished}
        token_ids, at = outputs.token_ids.tolist(), 0
        counts = zip(outputs.handles.tolist(), outputs.num_tokens.tolist(), strict=True)
        for row, (handle, count) in enumerate(counts, start=1):
            tokens = token_ids[at : at + count]
            at += count
            if (sample := samples.get(handle)) is not None:
                end = finished.pop(handle, None)
                self._feed(step, sample, tokens, end, logprobs.get(handle))
            if row % _ROWS_PER_TURN == 0:
                self._end_turn(step)
                await asyncio.sleep(0)
        for handle, end in finished.items():
            if (sample := samples.get(handle)) is not None:
                self._feed(step, sample, [], end, None)
        self._end_turn(step)

    def _note(self, outputs: EngineOutputs) -> dict[int, list[TokenLogprobs]]:
        """Everything about a step but its tokens; returns the tokens' log-probs by handle."""
        samples = self._samples
        if outputs.stats is not None:
            self.stats = outputs.stats
            self.metrics.observe_stats(outputs.stats)
        if (events := outputs.events) is not None:
            columns = (events.handles.tolist(), events.kinds.tolist(), events.times_s.tolist())
            for handle, kind, time_s in zip(*columns, strict=True):
                if (sample := samples.get(handle)) is not None:
                    sample.ledger.mark(kind, time_s)
        for prefill in outputs.prefills:
            if (sample := samples.get(prefill.handle)) is not None:
                sample.cached_tokens = prefill.cached_tokens
        logprobs: dict[int, list[TokenLogprobs]] = {}
        for entry in outputs.logprobs:
            if entry.prompt_start is None:
                logprobs[entry.handle] = entry.tokens
            elif (sample := samples.get(entry.handle)) is not None:
                sample.add_prompt_logprobs(entry.prompt_start, entry.tokens)
        return logprobs

    def _feed(
        self,
        step: "_Step",
        sample: Sample,
        token_ids: list[int],
        finished: Finished | None,
        logprobs: list[TokenLogprobs] | None,
    ) -> None:
        """Give one sample its tokens. An error here is that request's alone."""
        if token_ids:
            step.count_token(sample)
        try:
            output = sample.feed(token_ids, finished, logprobs)
        except Exception as error:
            logger.exception("%s: cannot read its output", sample.request.request_id)
            output = sample.fail(f"cannot read the output: {error}")
        if output.finish_reason is not None:
            del self._samples[sample.handle]
            sample.ledger.mark(Boundary.FINISHED, step.time_s)
            if finished is None:  # the core does not know: a stop string, or an error here
                step.aborts.append(sample.handle)
        sample.request.put(output)

    def _end_turn(self, step: "_Step") -> None:
        """Send and record what has gathered; the event loop turns to others after this."""
        if step.aborts:
            self._channel.send(AbortRequests(step.aborts))
        self.metrics.observe_tokens(step.first_token_s, step.inter_token_s)
        step.aborts, step.first_token_s, step.inter_token_s = [], [], []

    def _die(self, error: EngineDeadError) -> None:
        """The engine is gone: everything that waits for it ends, now."""
        if self.dead is not None:
            return
        self.dead = error
        self._changed.set()
        for request in {sample.request for sample in self._samples.values()}:
            request.fail(EngineDeadError(error.message, hint=error.hint))
        self._samples.clear()
        for future in self._calls.values():
            if not future.done():
                future.set_exception(EngineDeadError(error.message, hint=error.hint))

    async def _log_status(self) -> None:
        status = StatusLine(self._clock.now())
        while self.dead is None:
            await asyncio.sleep(self._status_interval_s)
            line = status.line(self.stats, self._clock.now())
            if line is not None:
                logger.info("%s", line)
