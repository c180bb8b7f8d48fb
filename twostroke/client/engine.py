"""The engine as the API process sees it.

    generate() ── checks, chooses an engine, AddRequest ──▶ engine core 0 ... N-1
        ▲                                                       │ EngineOutputs, one message a step
        └── the request's slot ◀── output task of that engine (detokenises, applies stop strings)

An output task for each engine reads what its core sends and wakes exactly the requests concerned.
All of this runs on one event loop, so there are no locks; a request's client state lives in
`_samples` from AddRequest until it ends or is aborted, and everything later about it is ignored.
"""

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from twostroke.client.limits import check_request, resolve_max_tokens
from twostroke.client.link import EngineLink, join_answers, join_ready, total_progress
from twostroke.client.request import Request, RequestOutput, Sample
from twostroke.client.tokenizer import Tokenizer
from twostroke.clock import Clock, WallClock
from twostroke.errors import EngineDeadError, QueueFullError
from twostroke.ledger import Boundary
from twostroke.messages import (
    AddRequest,
    EngineDead,
    EngineOutputs,
    EngineProgress,
    EngineReady,
    EngineStats,
    Finished,
    FromEngine,
    Int32s,
    SamplingParams,
    TokenLogprobs,
    UtilityReply,
)
from twostroke.metrics import Metrics, SampleRecord, StatusLine, request_line, total_stats
from twostroke.router.policy import RoutingPolicy
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

    def __init__(self, link: EngineLink, time_s: float, now_s: float) -> None:
        self.link = link
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
    """Sends requests to the engine cores and hands out what comes back.

    Each engine has a channel. When one dies, `dead` says so and nothing new is taken, but what runs
    on the others is still handed out.

    `max_model_len` is the model's own until the engine is ready and tells what it serves.
    `vocab_size` is the number of token ids that the model knows (default: the tokenizer's).
    `eos_token_ids` end a request unless it ignores EOS. `on_progress` is told how start-up goes.
    `prefix_caching` says that the engines reuse prefixes, so that equal ones should meet again.
    """

    def __init__(
        self,
        channels: EngineChannel | Sequence[EngineChannel],
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
        prefix_caching: bool = True,
        clock: Clock | None = None,
        on_progress: Callable[[EngineProgress], None] | None = None,
        status_interval_s: float = 10.0,
    ) -> None:
        self.tokenizer = tokenizer
        self.model_name = model_name
        self.max_model_len = self._model_max_len = max_model_len
        self.vocab_size = tokenizer.vocab_size if vocab_size is None else vocab_size
        channels = channels if isinstance(channels, Sequence) else [channels]
        self.metrics = metrics or Metrics(
            model_name=model_name, num_engines=len(channels), max_model_len=max_model_len
        )
        self.ready: EngineReady | None = None
        self.dead: EngineDeadError | None = None
        self._links = [EngineLink(index, channel) for index, channel in enumerate(channels)]
        self._policy = RoutingPolicy(len(channels), affinity=prefix_caching)
        self._eos_token_ids = tuple(eos_token_ids)
        self._max_num_queued_reqs = max_num_queued_reqs
        self._default_seed = default_seed
        self._max_logprobs = max_logprobs
        self._clock: Clock = clock or WallClock()
        self._on_progress = on_progress
        self._status_interval_s = status_interval_s
        self._samples: dict[int, Sample] = {}
        self._handles = itertools.count(1)
        self._changed = asyncio.Event()  # ready or dead
        self._ended_s: deque[float] = deque(maxlen=64)  # when the last requests ended
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start the output tasks and the status line on the running loop."""
        self._tasks = [
            asyncio.create_task(self._receive_all(link), name=f"outputs of engine {link.index}")
            for link in self._links
        ]
        if self._status_interval_s > 0:
            self._tasks.append(asyncio.create_task(self._log_status(), name="status line"))

    async def close(self) -> None:
        """Stop the tasks. What is still open ends with EngineDeadError. The channels stay open."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for link in self._links:
            self._die(link, EngineDeadError("the engine was shut down"))

    @property
    def num_engines(self) -> int:
        return len(self._links)

    @property
    def stats(self) -> EngineStats:
        """The latest of every engine, added up."""
        return total_stats([link.stats for link in self._links])

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
        """Wait until every engine has loaded. Raises EngineDeadError when one fails."""
        while True:
            if self.dead is not None:
                raise EngineDeadError(self.dead.message, hint=self.dead.hint)
            if self.ready is not None:
                return self.ready
            await self._changed.wait()

    async def call(self, method: str, *args: Any) -> Any:
        """Ask every core something off the hot path (see `UtilityCall`).

        `slots` come in one list, each with its `engine`; `reset_prefix_cache` is True if all did
        (an engine without requests does it in any case); other answers are as they are, in a list
        if there are several engines. Raises TwostrokeError
        with the core's words when one cannot, EngineDeadError when one is gone.
        """
        await self.wait_ready()
        asked = [asyncio.create_task(link.call(method, list(args))) for link in self._links]
        try:
            answers = await asyncio.gather(*asked)
        finally:
            for task in asked:
                task.cancel()
        if method == "reset_prefix_cache":
            for link, is_reset in zip(self._links, answers, strict=True):
                if is_reset:
                    self._policy.prefixes_reset(link.index)
        return join_answers(method, answers)

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
        check_request(
            prompt_token_ids,
            params,
            cache_salt,
            vocab_size=self.vocab_size,
            max_logprobs=self._max_logprobs,
            max_num_queued_reqs=self._max_num_queued_reqs,
        )
        await self.wait_ready()
        max_tokens = resolve_max_tokens(
            len(prompt_token_ids),
            params,
            max_model_len=self.max_model_len,
            model_max_len=self._model_max_len,
            kv_tokens=self._kv_tokens,
        )
        self._admit(params.n)
        tokens = np.asarray(prompt_token_ids, np.int32)
        request = Request(
            request_id,
            params,
            engine=self._policy.choose(self._policy.keys_of(tokens, cache_salt)),
            num_prompt_tokens=len(prompt_token_ids),
            max_tokens=max_tokens,
            arrival_s=arrival_s,
            final_only=final_only,
        )
        try:
            self._send(request, tokens, priority, cache_salt)
            while request.is_open:
                for output in await request.take():
                    if output.finish_reason is not None:
                        request.close_sample(output.index, self._clock.now())
                    yield output
        finally:
            self._close(request, on_close)

    # ------------------------------------------------------------ towards the core

    def _admit(self, n: int) -> None:
        """Raise QueueFullError unless `n` more core requests may be open."""
        if len(self._samples) + n <= self._max_num_queued_reqs:
            return
        self.metrics.engines[0].observe_rejection()
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

    def _send(self, request: Request, tokens: Int32s, priority: int, cache_salt: str) -> None:
        """Expand the request into `n` core requests and send them to its engine."""
        params, link = request.params, self._links[request.engine]
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
            keys = self._policy.keys_of(tokens, cache_salt)
            self._policy.sent(handle, link.index, len(tokens), keys)
            link.send(
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
        for handle in live:
            self._policy.ended(handle)
        if live:
            self._links[request.engine].abort(live)
        now_s = self._clock.now()
        self._ended_s.append(now_s)
        for sample in request.samples:
            sample.ledger.mark(Boundary.FINISHED, now_s)
            sample.ledger.mark(Boundary.CLOSED, now_s)
        records = [sample.record() for sample in request.samples]
        if records:
            self.metrics.engines[request.engine].observe_request(records)
            logger.info("%s", request_line(request.request_id, records))
            if on_close is not None:
                on_close(records)

    # ------------------------------------------------------------ from the core

    async def _receive_all(self, link: EngineLink) -> None:
        """An engine's output task. Ends when the engine does."""
        try:
            while link.dead is None:
                await self._on_message(link, await link.receive())
                await asyncio.sleep(0)  # a backlog must not keep the consumers waiting
        except EngineDeadError as error:
            self._die(link, error)
        except Exception as error:
            logger.exception("the output task failed")
            self._die(link, EngineDeadError(f"cannot read the engine's outputs: {error}"))

    async def _on_message(self, link: EngineLink, message: FromEngine) -> None:
        match message:
            case EngineOutputs():
                await self._on_outputs(link, message)
            case UtilityReply():
                link.on_reply(message)
            case EngineProgress(stage):
                link.progress[stage] = message
                if self._on_progress is not None:
                    self._on_progress(total_progress(self._links, stage))
            case EngineReady():
                self._on_ready(link, message)
            case EngineDead(error):
                self._die(link, EngineDeadError(f"the engine stopped: {error}"))

    def _on_ready(self, link: EngineLink, message: EngineReady) -> None:
        link.ready = message
        self.metrics.engines[link.index].engine_ready(message)
        self._policy.engine_ready(link.index, (message.num_blocks - 1) * message.block_size)
        ready = [it.ready for it in self._links if it.ready is not None]
        if len(ready) == len(self._links):
            self.ready = join_ready(ready)
            self.max_model_len = self.ready.max_model_len
            self._changed.set()

    async def _on_outputs(self, link: EngineLink, outputs: EngineOutputs) -> None:
        """Hand out one step's outputs: a dictionary look-up per row, and one abort message."""
        samples = self._samples
        step = _Step(link, outputs.time_s or self._clock.now(), self._clock.now())
        logprobs = self._note(link, outputs)
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

    def _note(self, link: EngineLink, outputs: EngineOutputs) -> dict[int, list[TokenLogprobs]]:
        """Everything about a step but its tokens; returns the tokens' log-probs by handle."""
        samples = self._samples
        if outputs.stats is not None:
            link.stats = outputs.stats
            self._policy.engine_stats(link.index, outputs.stats)
            self.metrics.engines[link.index].observe_stats(outputs.stats)
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
            if sample.last_token_s is None:
                self._policy.first_token(sample.handle)
            step.count_token(sample)
        try:
            output = sample.feed(token_ids, finished, logprobs)
        except Exception as error:
            logger.exception("%s: cannot read its output", sample.request.request_id)
            output = sample.fail(f"cannot read the output: {error}")
        if output.finish_reason is not None:
            del self._samples[sample.handle]
            self._policy.ended(sample.handle)
            sample.ledger.mark(Boundary.FINISHED, step.time_s)
            if finished is None:  # the core does not know: a stop string, or an error here
                step.aborts.append(sample.handle)
        sample.request.put(output)

    def _end_turn(self, step: "_Step") -> None:
        """Send and record what has gathered; the event loop turns to others after this."""
        if step.aborts:
            step.link.abort(step.aborts)
        seen = self.metrics.engines[step.link.index]
        seen.observe_tokens(step.first_token_s, step.inter_token_s)
        step.aborts, step.first_token_s, step.inter_token_s = [], [], []

    def _die(self, link: EngineLink, error: EngineDeadError) -> None:
        """An engine is gone: everything that waits for it ends, now, and nothing new is taken."""
        if link.dead is not None:
            return
        if len(self._links) > 1:
            error = EngineDeadError(f"engine {link.index}: {error.message}", hint=error.hint)
        link.die(error)
        self._policy.engine_died(link.index)
        self.dead = self.dead or error
        self._changed.set()
        lost = [s for s in self._samples.values() if s.request.engine == link.index]
        for sample in lost:
            del self._samples[sample.handle]
        for request in {sample.request for sample in lost}:
            request.fail(EngineDeadError(error.message, hint=error.hint))

    async def _log_status(self) -> None:
        status = StatusLine(self._clock.now())
        while self.dead is None:
            await asyncio.sleep(self._status_interval_s)
            line = status.line(self.stats, self._clock.now())
            if line is not None:
                logger.info("%s", line)
