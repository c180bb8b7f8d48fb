"""The engine as the API process sees it.

    generate() ── checks, submits ──▶ dispatcher ── messages ──▶ engine core 0 ... N-1
        ▲                                                             │ EngineOutputs, one a step
        └── the request's slot ◀── output task of that engine ◀── dispatcher: what is the client's
                                   (detokenises, applies stop strings)

An output task for each engine reads what its core sends and wakes exactly the requests concerned.
All of this runs on one event loop, so there are no locks; a request's client state lives in
`_samples` from its submission until it ends or is aborted, and everything later about it is
ignored. Which engines serve a request, one or two, is the dispatcher's business (`router/`).
"""

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from typing import Any

import msgspec
import numpy as np

from twostroke.client.fleet import EngineFleet
from twostroke.client.limits import check_request, resolve_max_tokens
from twostroke.client.link import EngineLink, total_progress
from twostroke.client.outputs import OutputHandler
from twostroke.client.request import Request, RequestOutput, Sample
from twostroke.client.tokenizer import Tokenizer
from twostroke.clock import Clock, WallClock
from twostroke.errors import EngineDeadError, QueueFullError, RequestError
from twostroke.ledger import Boundary, LedgerWithTimes
from twostroke.ledger_file import LedgerFile
from twostroke.log_lines import StatusLine, request_line
from twostroke.messages import (
    AddRequest,
    EngineDead,
    EngineOutputs,
    EngineProgress,
    EngineReady,
    EngineStats,
    FromEngine,
    SamplingParams,
    UtilityReply,
)
from twostroke.metrics import Metrics, SampleRecord
from twostroke.router.dispatch import Dispatcher, DispatchSettings, Role
from twostroke.trace import Tracer
from twostroke.transport import EngineChannel

__all__ = ["AsyncEngine", "RequestOutput"]

logger = logging.getLogger("twostroke")

_RETIRE_POLL_S = 0.05
_SEED_STEP = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: spreads consecutive requests' seeds


def _seed(base: int, offset: int) -> int:
    """`base + offset`, wrapped into a signed 64-bit integer."""
    return (base + offset + (1 << 63)) % (1 << 64) - (1 << 63)


class AsyncEngine:
    """Sends requests to the engine cores and hands out what comes back.

    Each engine has a channel. Without `roles` all of them are needed: when one dies, `dead` says so
    and nothing new is taken, but what runs on the others is still handed out. With `roles`, one for
    each channel, prefill and decode may run apart, engines may come and go, and the server is dead
    only when none is left that decodes; `dispatch` says how requests are spread.

    `max_model_len` is the model's own until the engines are ready and tell what they serve.
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
        roles: Sequence[Role] | None = None,
        dispatch: DispatchSettings | None = None,
        metrics: Metrics | None = None,
        vocab_size: int | None = None,
        default_seed: int = 0,
        max_logprobs: int = 20,
        prefix_caching: bool = True,
        clock: Clock | None = None,
        on_progress: Callable[[EngineProgress], None] | None = None,
        status_interval_s: float = 10.0,
        tracer: Tracer | None = None,
        ledger_file: LedgerFile | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.model_name = model_name
        self._model_max_len = max_model_len
        self.vocab_size = tokenizer.vocab_size if vocab_size is None else vocab_size
        self.metrics = metrics or Metrics(model_name=model_name, max_model_len=max_model_len)
        self._eos_token_ids = tuple(eos_token_ids)
        self._max_num_queued_reqs = max_num_queued_reqs
        self._default_seed = default_seed
        self._max_logprobs = max_logprobs
        self._clock: Clock = clock or WallClock()
        self._on_progress = on_progress
        self._status_interval_s = status_interval_s
        self._tracer = tracer
        self._ledger_file = ledger_file
        self._samples: dict[int, Sample] = {}
        self._handles = itertools.count(1)
        self._ended_s: deque[float] = deque(maxlen=64)  # when the last requests ended
        self._tasks: set[asyncio.Task[None]] = set()
        self._outputs = OutputHandler(
            self._samples,
            self.metrics,
            self._clock,
            abort=self._abort,
            on_end=self._remember,
        )
        settings = dispatch or DispatchSettings(
            max_retries=0 if roles is None else 1, affinity=prefix_caching
        )
        self._fleet = EngineFleet(
            channels if isinstance(channels, Sequence) else [channels],
            roles,
            settings,
            self._clock,
            self.metrics,
            on_timer=self._on_timer,
            on_unsent=self._on_unsent,
        )

    def start(self) -> None:
        """Start the output tasks and the status line on the running loop."""
        for link in self._fleet.links.values():
            self._start_task(self._receive_all(link), f"outputs of engine {link.index}")
        if self._status_interval_s > 0:
            self._start_task(self._log_status(), "status line")

    def add_engine(self, channel: EngineChannel, role: Role) -> int:
        """An engine has joined; returns its index, which may be that of one that is gone.

        It gets requests once it has said that it is ready, until its channel says that it is gone.
        """
        link = self._fleet.add(channel, role)
        self._start_task(self._receive_all(link), f"outputs of engine {link.index}")
        return link.index

    def set_role(self, engine: int, role: Role) -> None:
        """Give an engine another role once it has drained; RequestError when that cannot be."""
        if not self._fleet.has_roles:
            raise RequestError(
                "the engines of this server have no roles",
                param="role",
                hint="start it with --prefill and --decode",
            )
        self._fleet.dispatcher.set_role(engine, role)
        self._fleet.send_all()

    async def retire(self, engine: int) -> None:
        """Send an engine nothing new; returns once it has nothing left to do, or is gone."""
        self.dispatcher.retire(engine)
        self._fleet.send_all()
        it = self.dispatcher.fleet[engine]
        while it.state != "gone" and not it.has_nothing_left:
            await asyncio.sleep(_RETIRE_POLL_S)

    async def wait_change(self) -> None:
        """Wait until an engine comes, goes or is ready."""
        await self._fleet.changed.wait()

    def _start_task(self, coroutine: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Stop the tasks. What is still open ends with EngineDeadError. The channels stay open."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for link in self._fleet.living:
            self._die(link, EngineDeadError("the engine was shut down"))
        self._fleet.close()
        if self._tracer is not None:
            self._tracer.flush()
        if self._ledger_file is not None:
            self._ledger_file.close()

    @property
    def dispatcher(self) -> Dispatcher:
        """Which engines serve what."""
        return self._fleet.dispatcher

    @property
    def ready(self) -> EngineReady | None:
        """What every engine can do; None while they are being loaded."""
        return self._fleet.ready

    @property
    def dead(self) -> EngineDeadError | None:
        """Why nothing new can be served, if so."""
        return self._fleet.dead

    @property
    def gone(self) -> dict[int, str]:
        """Engines that are gone, and why: the server may do without them."""
        return {it.index: it.error for it in self.dispatcher.fleet if it.state == "gone"}

    @property
    def engines(self) -> list[dict[str, Any]]:
        """What each engine is and does, for people."""
        return self._fleet.describe()

    @property
    def num_engines(self) -> int:
        return len(self._fleet.links)

    @property
    def stats(self) -> EngineStats:
        """The latest of every engine, added up."""
        return self._fleet.stats

    @property
    def num_unfinished(self) -> int:
        """Core requests that are open: running or waiting."""
        return len(self._samples)

    @property
    def max_model_len(self) -> int:
        return self._model_max_len if self.ready is None else self.ready.max_model_len

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
        """Wait until every engine has loaded. Raises EngineDeadError when one fails.

        With roles, one that fails is done without as long as another decodes.
        """
        return await self._fleet.wait_ready()

    async def call(self, method: str, *args: Any) -> Any:
        """Ask every core something off the hot path (see `UtilityCall`).

        `slots` come in one list, each with its `engine`; `reset_prefix_cache` is True if all did
        (an engine without requests does it in any case); other answers are as they are, in a list
        if there are several engines. Raises TwostrokeError with the core's words when one cannot,
        EngineDeadError when one is gone (with roles: when none is left).
        """
        await self.wait_ready()
        return await self._fleet.call(method, *args)

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
            tokens,
            cache_salt=cache_salt,
            max_tokens=max_tokens,
            arrival_s=arrival_s,
            final_only=final_only,
        )
        try:
            self._send(request, priority)
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

    def _send(self, request: Request, priority: int) -> None:
        """Expand the request into `n` core requests, which share engines."""
        params = request.params
        for index in range(params.n):
            handle = next(self._handles)
            sample = Sample(request, index, handle, self.tokenizer)
            if self._tracer is not None:
                sample.ledger = LedgerWithTimes(request.arrival_s)
            if self.dispatcher.routing.has_affinity:
                sample.output_ids = []
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
            passed = self.dispatcher.submit(
                AddRequest(
                    handle=handle,
                    request_id=request.request_id + suffix,
                    prompt_token_ids=request.prompt_token_ids,
                    params=child,
                    max_tokens=request.max_tokens,
                    eos_token_ids=() if params.ignore_eos else self._eos_token_ids,
                    arrival_s=request.arrival_s,
                    priority=priority,
                    cache_salt=request.cache_salt,
                ),
                beside=request.samples[0].handle if index else None,
            )
            sample.engine = next(iter(self.dispatcher.engines_of(handle)), 0)
            sample.ledger.mark(passed, self._clock.now())
        self._fleet.send_all()

    def _close(
        self, request: Request, on_close: Callable[[list[SampleRecord]], object] | None
    ) -> None:
        """The one place where a request leaves: abort, metrics, log line."""
        live = [s.handle for s in request.samples if self._samples.pop(s.handle, None) is not None]
        if live:
            self._abort(live)
        now_s = self._clock.now()
        self._ended_s.append(now_s)
        for sample in request.samples:
            sample.ledger.mark(Boundary.FINISHED, now_s)
            sample.ledger.mark(Boundary.CLOSED, now_s)
            self._trace(sample)
        records = [sample.record() for sample in request.samples]
        if records:
            self.metrics.engines[request.samples[0].engine].observe_request(records)
            self._fleet.ended(records)
            if self._ledger_file is not None:
                self._ledger_file.add(records, self._fleet.num_of_roles)
            logger.info("%s", request_line(request.request_id, records))
            if on_close is not None:
                on_close(records)

    def _trace(self, sample: Sample) -> None:
        """A track of its own for the sample, in which its intervals lie end to end."""
        if self._tracer is not None and isinstance(sample.ledger, LedgerWithTimes):
            track = f"{sample.request.request_id} {sample.index}"
            for interval, start_s, end_s in sample.ledger.spans():
                self._tracer.span(track, interval.name.lower(), start_s, end_s)

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
                self._fleet.observe(link.index, message)
                left = self.dispatcher.on_outputs(link.index, message)
                self._fleet.send_all()
                await self._outputs.take(link, left)
            case UtilityReply():
                link.on_reply(message)
            case EngineProgress(stage):
                link.progress[stage] = message
                if self._on_progress is not None:
                    self._on_progress(total_progress(list(self._fleet.links.values()), stage))
            case EngineReady():
                self._fleet.on_ready(link, message)
            case EngineDead(error):
                self._die(link, EngineDeadError(f"the engine stopped: {error}"))

    def _remember(self, link: EngineLink, sample: Sample) -> None:
        """The engine has the KV of what it wrote, too: a next turn may begin with it."""
        request = sample.request
        if sample.output_ids is not None and sample.finish_reason in ("stop", "length"):
            output = np.array(sample.output_ids, np.int32)
            tokens = np.concatenate([request.prompt_token_ids, output])
            self.dispatcher.computed(link.index, tokens, request.cache_salt)

    def _abort(self, handles: list[int]) -> None:
        self.dispatcher.abort(handles)
        self._fleet.send_all()

    def _on_timer(self, outputs: EngineOutputs) -> None:
        """The dispatcher moved or ended requests because it was time."""
        self._outputs.mark(outputs.events)
        for end in outputs.finished:
            if (sample := self._samples.get(end.handle)) is not None:
                self._outputs.end(self._fleet.links[sample.engine], end, outputs.time_s)

    def _on_unsent(self, link: EngineLink, request: AddRequest, error: EngineDeadError) -> None:
        """A request cannot be sent: its engine is gone, and we are the first to notice."""
        if self._fleet.has_roles:
            self._die(link, error)
        elif (sample := self._samples.get(request.handle)) is not None:
            sample.request.fail(error)

    def _die(self, link: EngineLink, error: EngineDeadError) -> None:
        """An engine is gone: what only it could serve ends, now."""
        if link.dead is not None:
            return
        ends = self._fleet.died(link, error)
        for end in ends:
            if (sample := self._samples.pop(end.handle, None)) is not None:
                why = end.error if self.num_engines > 1 else error.message
                sample.request.fail(EngineDeadError(why or error.message, hint=error.hint))

    async def _log_status(self) -> None:
        status = StatusLine(self._clock.now())
        while True:
            await asyncio.sleep(self._status_interval_s)
            handoff = self._fleet.numbers() if self._fleet.has_roles else None
            line = status.line(self.stats, self._clock.now(), handoff)
            if line is not None:
                logger.info("%s", line)
