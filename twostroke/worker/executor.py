"""Executors: where the worker runs. The core sees `core.executor.Executor` and cannot tell.

    ThreadExecutor    core's main thread ──queue──▶ worker thread of the same process
    ProcessExecutor   core process ──shm_queue──▶ worker process (`proc.worker_main`)

Both load the model in their constructor, tell of it through `progress`, and then know what was
found out: `facts`, `num_blocks`, `max_model_len`.
"""

import contextlib
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Protocol

import msgspec

from twostroke.checkpoint import Checkpoint
from twostroke.config import EngineConfig
from twostroke.errors import ConfigError, EngineDeadError, ModelError, TwostrokeError
from twostroke.messages import (
    EngineDead,
    EngineProgress,
    EngineReady,
    StepPlan,
    StepResult,
    decoder_for,
    encode,
)
from twostroke.shm_queue import ShmReader, ShmRing, ShmWriter

Progress = Callable[[str, int, int], None]  # stage, done, total

STOP_TIMEOUT_S = 10.0  # at shutdown, for the step that still runs

# What a worker process says. It is ready once, then sends a result a plan; EngineDead is its last.
FromWorker = EngineReady | EngineProgress | EngineDead | StepResult

# Exit codes of a worker process whose start failed, by the error that says why.
EXIT_CODES: dict[type[TwostrokeError], int] = {ConfigError: 2, ModelError: 3}


class WorkerLaunch(msgspec.Struct):
    """What `ProcessExecutor` writes to a worker's standard input, as one line of JSON."""

    config: EngineConfig
    checkpoint: str


class Runner(Protocol):
    """What an executor needs of `worker.runner.ModelRunner`."""

    facts: list[tuple[str, str, str]]
    num_blocks: int
    max_model_len: int

    def run(self, plan: StepPlan) -> StepResult: ...


MakeRunner = Callable[[EngineConfig, Checkpoint, Progress | None], Runner]


def _model_runner(
    config: EngineConfig, checkpoint: Checkpoint, progress: Progress | None
) -> Runner:
    from twostroke.worker.runner import ModelRunner  # imports torch, which takes a second

    return ModelRunner(config, checkpoint, progress)


class ThreadExecutor:
    """Runs the model in a thread of this process: torch and the kernels let go of the GIL.

    Raises what loading the model raises (ModelError, ConfigError).
    """

    def __init__(
        self,
        config: EngineConfig,
        checkpoint: Checkpoint,
        progress: Progress | None = None,
        *,
        make_runner: MakeRunner = _model_runner,
    ) -> None:
        self._plans: queue.SimpleQueue[StepPlan | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[StepResult | BaseException] = queue.SimpleQueue()
        self._num_in_flight = 0
        self._failure: BaseException | None = None
        started: queue.SimpleQueue[Runner | BaseException] = queue.SimpleQueue()

        def work() -> None:
            try:
                runner = make_runner(config, checkpoint, progress)
            except BaseException as error:
                started.put(error)
                return
            started.put(runner)
            self._serve(runner)

        self._thread = threading.Thread(target=work, name="worker", daemon=True)
        self._thread.start()
        runner = started.get()
        if isinstance(runner, BaseException):
            raise runner
        self.facts = runner.facts
        self.num_blocks = runner.num_blocks
        self.max_model_len = runner.max_model_len

    def _serve(self, runner: Runner) -> None:
        try:
            while (plan := self._plans.get()) is not None:
                self._results.put(runner.run(plan))
        except BaseException as error:
            self._results.put(error)

    def submit(self, plan: StepPlan) -> None:
        self._plans.put(plan)
        self._num_in_flight += 1

    def collect(self) -> StepResult:
        if self._failure is None:
            if not self._num_in_flight:
                raise RuntimeError("collect() without a step in flight")
            result = self._results.get()
            if isinstance(result, StepResult):
                self._num_in_flight -= 1
                return result
            self._failure = result
        cause = self._failure
        raise EngineDeadError(f"the worker failed: {type(cause).__name__}: {cause}") from cause

    def shutdown(self) -> None:
        self._plans.put(None)
        self._thread.join(STOP_TIMEOUT_S)


class ProcessExecutor:
    """Runs the model in a process of its own. Linux only (ConfigError elsewhere).

    The worker ends when its standard input closes, which the system does for us even if this
    process is killed; what the two share has no name, so nothing is left behind. Raises what
    loading the model raises, and EngineDeadError when the worker dies meanwhile.
    """

    def __init__(
        self, config: EngineConfig, checkpoint: Checkpoint, progress: Progress | None = None
    ) -> None:
        if sys.platform != "linux":
            raise ConfigError(
                f"--worker-process needs Linux, this is {sys.platform}", hint="leave it out"
            )
        self._plans, self._results = ShmRing.create(), ShmRing.create()
        self._writer, self._reader = ShmWriter(self._plans), ShmReader(self._results)
        self._decoder = decoder_for(FromWorker)
        self._num_in_flight = 0
        self._closed = False
        self._seen_dead = False
        self._process = subprocess.Popen(
            (
                *(sys.executable, "-m", "twostroke.proc.worker_main"),
                *(self._plans.spec, self._results.spec),
            ),
            stdin=subprocess.PIPE,
            pass_fds=(*self._plans.fds, *self._results.fds),
        )
        try:
            launch = WorkerLaunch(config, str(checkpoint.path))
            assert self._process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it is dead already: told below
                self._process.stdin.write(msgspec.json.encode(launch) + b"\n")
                self._process.stdin.flush()
            ready = self._wait_until_ready(progress)
        except BaseException:
            self.shutdown()
            raise
        self.facts = ready.facts
        self.num_blocks = ready.num_blocks
        self.max_model_len = ready.max_model_len

    def _wait_until_ready(self, progress: Progress | None) -> EngineReady:
        while True:
            match self._receive():
                case EngineReady() as ready:
                    return ready
                case EngineProgress(stage, done, total):
                    if progress is not None:
                        progress(stage, done, total)
                case EngineDead(error):
                    code = self._process.wait(STOP_TIMEOUT_S)
                    kind = next((k for k, c in EXIT_CODES.items() if c == code), EngineDeadError)
                    raise kind(error)
                case other:
                    raise EngineDeadError(f"the worker sent {type(other).__name__} at start-up")

    def _receive(self) -> FromWorker:
        message: FromWorker = self._decoder.decode(self._reader.get(self._check_alive))
        return message

    def _check_alive(self) -> None:
        """Called while waiting. Raises once the worker is dead and what it had sent is read."""
        code = self._process.poll()
        if code is None:
            return
        if not self._seen_dead:  # its last message may have come since we looked
            self._seen_dead = True
            return
        cause = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
        raise EngineDeadError(f"the worker process died ({cause})")

    def submit(self, plan: StepPlan) -> None:
        self._writer.put(encode(plan), self._check_alive)
        self._num_in_flight += 1

    def collect(self) -> StepResult:
        if not self._num_in_flight:
            raise RuntimeError("collect() without a step in flight")
        message = self._receive()
        if isinstance(message, StepResult):
            self._num_in_flight -= 1
            return message
        error = message.error if isinstance(message, EngineDead) else type(message).__name__
        raise EngineDeadError(f"the worker failed: {error}")

    def shutdown(self) -> None:
        if self._closed:
            return
        self._closed = True
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for side in (self._writer, self._reader):
            side.close()
        for ring in (self._plans, self._results):
            ring.close()
