"""Engine-core process: three threads that overlap because each lets go of the GIL where it waits.

    input thread   ZMQ ──decode──▶ inbox                          waits in recv
    main thread    inbox ▶ begin ▶ submit ▶ collect ▶ finish ▶ outbox      waits for the device
    output thread  outbox ──encode──▶ ZMQ                         waits on the queue

With asynchronous scheduling two steps are in flight: while the device runs step N, the main thread
plans step N+1 and the output thread sends the results of step N-1. A request that comes meanwhile
is put into step N+1. Started by `proc.launch`, which writes the settings to our standard input and
keeps it open: when it closes, the parent is gone.
"""

import contextlib
import faulthandler
import gc
import logging
import math
import os
import queue
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil

from twostroke import log
from twostroke.checkpoint import open_checkpoint
from twostroke.clock import WallClock
from twostroke.config import EngineConfig, SchedulerConfig
from twostroke.connector.handoff import HandoffScheduler
from twostroke.core.loop import EngineCore
from twostroke.cost import StepCost
from twostroke.cost_fit import LearnedStepCost
from twostroke.cost_profile import profiled_step_cost
from twostroke.errors import ConfigError, ModelError, TwostrokeError
from twostroke.kv_messages import KvConnect, KvDisconnect, KvReady, KvRelease, KvRenew
from twostroke.messages import (
    NO_TOKENS,
    AbortRequests,
    AddRequest,
    EngineDead,
    EngineOutputs,
    EngineProgress,
    EngineReady,
    Finished,
    FinishReason,
    FromEngine,
    Shutdown,
    StepPlan,
    StepResult,
    ToEngine,
    UtilityCall,
    UtilityReply,
)
from twostroke.proc.deferred import import_torch
from twostroke.proc.start import IMPORT_TORCH
from twostroke.trace import Tracer
from twostroke.transport import CoreSockets
from twostroke.worker.executor import ProcessExecutor, Progress, ThreadExecutor

logger = logging.getLogger("twostroke.core")


class CoreLaunch(msgspec.Struct):
    """What `proc.launch` writes to our standard input, as one line of JSON."""

    config: EngineConfig
    checkpoint: str
    directory: str
    engine: int


class StartUp:
    """How long each part of this process's start took, for the start-up block."""

    def __init__(self) -> None:
        self._ends: dict[str, float] = {}

    def end(self, part: str) -> None:
        """A part ends now, and the next begins; said again, it counts the first time."""
        self._ends.setdefault(part, time.time())

    def fact(self) -> tuple[str, str, str]:
        begun_s = before_s = psutil.Process().create_time()
        parts = []
        for part, end_s in self._ends.items():
            parts.append(f"{part} {end_s - before_s:.2f} s")
            before_s = end_s
        return "Start", f"{before_s - begun_s:.2f} s", ", ".join(parts)


class WorkerEnded:
    """For the main thread, which may be waiting for requests: a worker process has ended."""


class CoreProcess:
    """The three threads around one `EngineCore` and one `Executor`."""

    def __init__(self, launch: CoreLaunch, start_up: StartUp | None = None) -> None:
        self.launch = launch
        self.start_up = start_up or StartUp()
        self.config = launch.config
        self.sockets = CoreSockets(Path(launch.directory), launch.engine)
        self.inbox: queue.SimpleQueue[ToEngine | WorkerEnded] = queue.SimpleQueue()
        self.outbox: queue.SimpleQueue[FromEngine | None] = queue.SimpleQueue()
        self.input_thread = threading.Thread(
            target=_or_end, args=(self._receive_inputs,), name="input", daemon=True
        )
        self.output_thread = threading.Thread(
            target=_or_end, args=(self._send_outputs,), name="output", daemon=True
        )
        self.loading = True
        self.tracer: Tracer | None = None
        if self.config.trace:
            self.tracer = Tracer(Path(self.config.trace), f"engine core {launch.engine}")
        self.depth = 2 if self.config.async_scheduling else 1
        self.extending: ThreadExecutor | None = None  # the executor, if its last plan may grow
        self.learned: LearnedStepCost | None = None  # from the steps that we run
        self.stopping = False
        self.stop_by_s = 0.0

    # ------------------------------------------------------------ life

    def run(self) -> int:
        """Load, serve until told to stop, clean up. Returns the exit code."""
        self.output_thread.start()
        self.input_thread.start()
        executor: ThreadExecutor | ProcessExecutor | None = None
        try:
            executor, ready = start_executor(
                self.launch, self._report_progress, lambda: self.inbox.put(WorkerEnded())
            )
            step_cost: StepCost | None = profiled_step_cost(self.config)
            if step_cost is None and ready.kv is not None and self.config.pd_policy == "cost":
                step_cost = self.learned = LearnedStepCost()
            self.core = make_core(self.config, ready, step_cost)
            self.executor = executor
            # Not where KV is handed over: who comes waits for that, and messages of it have order.
            if isinstance(executor, ThreadExecutor) and self.depth > 1 and ready.kv is None:
                self.extending = executor
            self.loading = False
            self.start_up.end("first steps")
            ready.facts.append(self.start_up.fact())
            self.outbox.put(ready)
            # Start-up objects live for ever: keep the collector from walking them, now as well.
            gc.freeze()
            gc.enable()
            self._loop()
            return 0
        except TwostrokeError as error:
            self.outbox.put(EngineDead(str(error)))
            if isinstance(error, ConfigError):  # codes as the command line's
                return 2
            return 3 if isinstance(error, ModelError) else 1
        except Exception as error:
            logger.exception("the engine core failed")
            self.outbox.put(EngineDead(f"the engine core failed: {type(error).__name__}: {error}"))
            return 1
        finally:
            if executor is not None:
                executor.shutdown()
            self.outbox.put(None)
            self.output_thread.join(timeout=5)
            if self.tracer:
                self.tracer.flush()

    def _report_progress(self, stage: str, done: int, total: int) -> None:
        if stage in ("weights", "kernels"):  # begins, so what comes before it ends
            self.start_up.end("kernels" if stage == "weights" else "weights")
        self.outbox.put(EngineProgress(stage, done, total))

    # ------------------------------------------------------------ the three threads

    def _loop(self) -> None:
        core = self.core
        while not (self.stopping and self._drained()):
            idle = core.num_in_flight == 0 and not core.has_work()
            if idle and self.config.check:
                core.check_integrity()
            if idle and self.tracer:
                self.tracer.flush()  # so that who reads a trace meanwhile has all of it
            self._take_inbox(wait=idle)
            plan = self._begin() if core.num_in_flight < self.depth else None
            if plan is None:
                self._put_outputs()  # of what has expired
            if plan is not None and len(plan.slots) and core.num_in_flight < self.depth:
                continue  # filling the pipeline comes before returning results
            if core.num_in_flight:
                self._finish_oldest()

    def _begin(self) -> StepPlan | None:
        start_s = time.monotonic()
        plan = self.core.begin()
        if plan is not None:
            self.executor.submit(plan)
            if self.tracer:
                self.tracer.span(
                    "main",
                    f"plan {plan.step}",
                    start_s,
                    time.monotonic(),
                    requests=len(plan.slots),
                    tokens=int(plan.num_scheduled.sum()),
                )
        return plan

    def _extend_last(self) -> None:
        """Somebody has come: into the plan that waits for its turn, if one does."""
        assert self.extending is not None
        if self.inbox.empty():  # taken in already, before the last plan was made
            return
        self._take_inbox(wait=False)
        if (plan := self.extending.recall()) is not None:
            self.extending.submit(self.core.extend() or plan)

    def _finish_oldest(self) -> None:
        wait_s = time.monotonic()
        while self.extending is not None and not self.extending.wait():
            self._extend_last()
        result = self.executor.collect()
        # What arrived while the step ran, aborts above all, counts before its tokens do.
        self._take_inbox(wait=False)
        start_s = time.monotonic()
        outputs = self.core.finish(result)
        self.outbox.put(outputs)
        if self.learned is not None and outputs.step is not None:
            self.learned.add(outputs.step)
        if self.tracer:
            self.tracer.span("main", f"wait for {result.step}", wait_s, start_s)
            self.tracer.span("main", f"finish {result.step}", start_s, time.monotonic())
            _trace_device(self.tracer, result, outputs)

    def _take_inbox(self, *, wait: bool) -> None:
        """Apply every message that is there; with `wait`, block for the first, or a deadline."""
        if wait:
            with contextlib.suppress(queue.Empty):
                self._apply(self.inbox.get(timeout=self._patience_s()))
        while not self.inbox.empty():  # nobody else takes from it
            self._apply(self.inbox.get_nowait())
        # Ranks in processes of their own hear of what they are to read with their plans alone.
        if isinstance(self.executor, ThreadExecutor) and (pieces := self.core.take_pieces()):
            self.executor.read(pieces)
        self._put_outputs()

    def _patience_s(self) -> float | None:
        """How long we may sleep; None: until a message comes."""
        deadline_s = self.core.next_deadline_s()
        if self.stopping:
            deadline_s = min(self.stop_by_s, deadline_s or math.inf)
        return None if deadline_s is None else max(0.0, deadline_s - time.monotonic())

    def _put_outputs(self) -> None:
        """Send what belongs to no step."""
        if (outputs := self.core.take_outputs()) is not None:
            self.outbox.put(outputs)

    def _apply(self, message: ToEngine | WorkerEnded) -> None:
        match message:
            case AddRequest():
                self.core.add(message)
            case AbortRequests(handles):
                self.core.abort(handles)
            case KvReady() | KvRelease() | KvRenew() | KvConnect() | KvDisconnect():
                self.core.apply_kv(message)
            case UtilityCall(call_id, method, args):
                self.outbox.put(self._call(call_id, method, args))
            case WorkerEnded():
                self.executor.check_alive()
            case Shutdown(drain_s):
                self.stopping = True
                self.stop_by_s = time.monotonic() + drain_s

    def _call(self, call_id: int, method: str, args: list[Any]) -> UtilityReply:
        methods = {
            "ping": lambda: "pong",
            "slots": self.core.slots,
            "stats": lambda: msgspec.to_builtins(self.core.stats()),
            "reset_prefix_cache": self.core.reset_prefix_cache,
            "check_integrity": self.core.check_integrity,
        }
        if method not in methods:
            return UtilityReply(call_id, error=f"the engine has no method {method!r}")
        try:
            return UtilityReply(call_id, result=methods[method](*args))
        except Exception as error:
            return UtilityReply(call_id, error=f"{method}: {type(error).__name__}: {error}")

    def _drained(self) -> bool:
        """When stopping: has everything ended, or its time run out?"""
        if self.core.is_empty():
            return True
        if time.monotonic() < self.stop_by_s:
            return False
        while self.core.num_in_flight:
            self._finish_oldest()
        self.core.abort([slot["handle"] for slot in self.core.slots()])
        self._put_outputs()
        return True

    def _receive_inputs(self) -> None:
        while (data := self.sockets.receive_bytes()) is not None:
            start_s = time.monotonic()
            try:
                message = self.sockets.decode(data)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                self._refuse(data, error)
                continue
            if isinstance(message, Shutdown) and self.loading:
                os._exit(0)  # nobody waits for anything but this, and loading may take minutes
            self.inbox.put(message)
            if self.extending is not None and isinstance(message, AddRequest):
                self.extending.nudge()
            if self.tracer:
                self.tracer.span("input", "decode", start_s, time.monotonic(), bytes=len(data))

    def _refuse(self, data: bytes, error: Exception) -> None:
        """End a request that cannot be read, if its handle can: its client waits for an answer."""
        logger.error("cannot read a message of %d bytes: %s", len(data), error)
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, TypeError):
            handle = msgspec.msgpack.decode(data, type=_Handle).handle
            problem = f"the engine cannot read this request: {error}"
            self.outbox.put(
                EngineOutputs(
                    handles=np.empty(0, np.int64),
                    num_tokens=NO_TOKENS,
                    token_ids=NO_TOKENS,
                    finished=[Finished(handle, FinishReason.ERROR, error=problem)],
                )
            )

    def _send_outputs(self) -> None:
        while (message := self.outbox.get()) is not None:
            start_s = time.monotonic()
            self.sockets.send(message)
            if self.tracer:
                self.tracer.span("output", "encode + send", start_s, time.monotonic())
        self.sockets.close()


def _trace_device(tracer: Tracer, result: StepResult, outputs: EngineOutputs) -> None:
    """A step with its work, and the KV loads that ended in it; `trace_steps` reads them back."""
    done = msgspec.structs.asdict(outputs.step) if outputs.step is not None else {}
    done.pop("seconds", None)
    tracer.span("worker", f"step {result.step}", result.started_s, result.ended_s, **done)
    for load in result.kv.loads if result.kv is not None else ():
        if not load.error:
            size = {"bytes": load.num_bytes, "messages": load.num_messages}
            tracer.span("kv", f"load {load.load_id}", load.started_s, load.ended_s, **size)
            for start_s, end_s, num_bytes in load.reads:
                tracer.span("kv reads", f"read {load.load_id}", start_s, end_s, bytes=num_bytes)


class _Handle(msgspec.Struct):
    """The one field of an AddRequest that an answer needs."""

    handle: int


def _or_end(run: Callable[[], None]) -> None:
    """Run a thread's work; if it fails, end the process: without this thread nobody is served."""
    try:
        run()
    except BaseException:
        logger.exception("the %s thread failed", threading.current_thread().name)
        os._exit(1)


def scheduler_config(config: EngineConfig, ready: EngineReady) -> SchedulerConfig:
    """The core's part of the settings, with what was found out at start-up."""
    method = config.speculative_method
    return SchedulerConfig(
        block_size=ready.block_size,
        num_blocks=ready.num_blocks,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=ready.max_model_len,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        enable_prefix_caching=config.enable_prefix_caching,
        enable_chunked_prefill=config.enable_chunked_prefill,
        policy=config.scheduling_policy,
        num_spec_tokens=0 if method == "none" else config.num_speculative_tokens,
        spec_method="ngram" if method == "none" else method,
        async_scheduling=config.async_scheduling,
        reserve_full_isl=config.scheduler_reserve_full_isl,
        admission=config.admission,
        max_backfills=config.max_backfills,
        preemption=config.preemption,
        reserve_output_tokens=config.reserve_output_tokens,
    )


def make_core(
    config: EngineConfig, ready: EngineReady, step_cost: StepCost | None = None
) -> EngineCore:
    """The decisions of an engine; with what hands KV over, if its KV can be read.

    With a `step_cost` it computes what would take longer to read.
    """
    clock = WallClock()
    connector = None
    if ready.kv is not None:
        connector = HandoffScheduler(
            clock, ready.kv, max_hold_share=config.kv_hold_share, step_cost=step_cost
        )
    return EngineCore(
        scheduler_config(config, ready), clock, connector=connector, check=config.check
    )


def start_executor(
    launch: CoreLaunch, progress: Progress, on_death: Callable[[], object]
) -> tuple[ThreadExecutor | ProcessExecutor, EngineReady]:
    """Load the model where the settings want it. Raises ModelError or ConfigError.

    `on_death` is called, from a thread, when a worker process ends; then `check_alive` says why.
    """
    config = launch.config
    if len(config.local_roles) > 1:
        from twostroke.worker.device import take_gpus

        take_gpus(config, launch.engine)
    checkpoint = open_checkpoint(Path(launch.checkpoint), load_format=config.load_format)
    executor: ThreadExecutor | ProcessExecutor
    if config.worker_process or config.tensor_parallel_size > 1:
        executor = ProcessExecutor(config, checkpoint, progress, on_death=on_death)
    else:
        executor = ThreadExecutor(config, checkpoint, progress)
    ready = EngineReady(
        engine=launch.engine,
        max_model_len=executor.max_model_len,
        num_blocks=executor.num_blocks,
        block_size=config.block_size,
        facts=executor.facts,
        kv=executor.endpoint,
        max_num_seqs=config.max_num_seqs,
        max_hold_share=config.kv_hold_share,
    )
    return executor, ready


def _watch_parent(directory: str) -> None:
    """End this process when the parent's end of our standard input closes."""
    while os.read(0, 4096):
        pass
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(4)


def main() -> None:
    """Entry point of `python -m twostroke.proc.core_main`."""
    faulthandler.enable()
    # Ctrl-C reaches the whole process group, and so does the SIGTERM of systemd and `timeout`. The
    # API process decides what they mean; when it goes without a word, `_watch_parent` ends us.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    gc.disable()  # until all is loaded, which would be walked again and again
    start_up = StartUp()
    if IMPORT_TORCH in sys.argv:
        import_torch()
        start_up.end("torch")
    settings = sys.stdin.buffer.readline()
    if not settings:
        os._exit(4)  # the parent has ended before it knew what we are for
    launch = msgspec.json.decode(settings, type=CoreLaunch)
    threading.Thread(target=_watch_parent, args=(launch.directory,), daemon=True).start()
    log.setup(launch.config.log_level)
    code = CoreProcess(launch, start_up).run()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # daemon threads may sit in native code: do not wait for them


if __name__ == "__main__":
    main()
