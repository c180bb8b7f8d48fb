"""Executors: where the worker runs. The core sees `core.executor.Executor` and cannot tell.

    ThreadExecutor    core's main thread ──queue──▶ worker thread of the same process
    ProcessExecutor   core process ──shm_queue──▶ worker processes (`proc.worker_main`)

Worker processes are the ranks of a tensor-parallel group, often of one: each gets every plan and
runs its part of the model; rank 0 sends the results.

Both load the model in their constructor, tell of it through `progress`, and then know what was
found out: `facts`, `num_blocks`, `max_model_len`, `endpoint`. Where KV is handed over all ranks
send results, for each has transfers of its own, and a step is over when it is on all of them: only
then are the lease words of its plan in place everywhere.
"""

import contextlib
import os
import queue
import secrets
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from twostroke.checkpoint import Checkpoint
from twostroke.config import EngineConfig
from twostroke.connector.transfer import RankReports
from twostroke.errors import ConfigError, EngineDeadError, ModelError, TwostrokeError
from twostroke.kv_messages import KvEndpoint, KvLoad
from twostroke.messages import (
    EngineDead,
    EngineProgress,
    EngineReady,
    StepPlan,
    StepResult,
    decoder_for,
    encode,
)
from twostroke.shape import ModelShape, parallel_sizes
from twostroke.shm_queue import ShmReader, ShmRing, ShmWriter

Progress = Callable[[str, int, int], None]  # stage, done, total

STOP_TIMEOUT_S = 10.0  # at shutdown, for the step that still runs

CAUSE_TIMEOUT_S = 1.0  # after a worker has failed, until the one that is to blame has ended

# What a worker process says. It is ready once, then rank 0 (with hand-offs every rank) sends a
# result a plan; EngineDead is its last.
FromWorker = EngineReady | EngineProgress | EngineDead | StepResult


class LostContactError(TwostrokeError):
    """A rank cannot go on because another does not answer: not the cause, but its consequence."""


# Exit codes of a worker process that failed, by the error that says why.
EXIT_CODES: dict[type[TwostrokeError], int] = {ConfigError: 2, ModelError: 3, LostContactError: 5}

# All ranks are on this machine: what they say to each other stays on it.
RANKS_ENVIRONMENT = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


class WorkerLaunch(msgspec.Struct):
    """What `ProcessExecutor` writes to a worker's standard input, as one line of JSON.

    `rendezvous_fd` is a memory file in which the ranks find each other. `engine_id` is that of the
    engine's KV endpoint.
    """

    config: EngineConfig
    checkpoint: str
    rank: int = 0
    rendezvous_fd: int = -1
    engine_id: str = ""


class Runner(Protocol):
    """What an executor needs of `worker.runner.ModelRunner`."""

    facts: list[tuple[str, str, str]]
    num_blocks: int
    max_model_len: int

    @property
    def endpoint(self) -> KvEndpoint | None: ...
    def run(self, plan: StepPlan) -> StepResult: ...
    def read(self, loads: list[KvLoad]) -> None: ...
    def prepare(self) -> bool: ...
    def shutdown(self) -> None: ...


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
        self._results: queue.SimpleQueue[StepResult | BaseException | None] = queue.SimpleQueue()
        self._result: StepResult | BaseException | None = None  # that `wait` has waited for
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
        self.endpoint = runner.endpoint
        self._runner = runner

    def _serve(self, runner: Runner) -> None:
        try:
            while (plan := self._next_plan(runner)) is not None:
                self._results.put(runner.run(plan))
        except BaseException as error:
            self._results.put(error)
        finally:
            runner.shutdown()

    def _next_plan(self, runner: Runner) -> StepPlan | None:
        while self._plans.empty() and runner.prepare():
            pass
        return self._plans.get()

    def check_alive(self) -> None:
        """Nothing to find out: what fails, `collect` tells."""

    def submit(self, plan: StepPlan) -> None:
        self._plans.put(plan)
        self._num_in_flight += 1

    def read(self, loads: list[KvLoad]) -> None:
        """Begin to read KV of other engines now, whatever step runs."""
        self._runner.read(loads)

    def recall(self) -> StepPlan | None:
        """Take back the plan that was submitted last, if it is the next and was not begun."""
        if self._plans.qsize() != 1:  # of two, the one before it was not begun either
            return None
        with contextlib.suppress(queue.Empty):  # begun meanwhile
            plan = self._plans.get_nowait()
            self._num_in_flight -= 1
            return plan
        return None

    def nudge(self) -> None:
        """Let who is in `wait`, or will be, go on; from any thread."""
        self._results.put(None)

    def wait(self) -> bool:
        """Until the oldest step in flight is over; False: until `nudge`."""
        if self._result is None:
            self._result = self._results.get()
        return self._result is not None

    def collect(self) -> StepResult:
        if self._failure is None:
            if not self._num_in_flight:
                raise RuntimeError("collect() without a step in flight")
            while not self.wait():
                pass
            result, self._result = self._result, None
            if isinstance(result, StepResult):
                self._num_in_flight -= 1
                return result
            self._failure = result
        cause = self._failure
        raise EngineDeadError(f"the worker failed: {type(cause).__name__}: {cause}") from cause

    def shutdown(self) -> None:
        self._plans.put(None)
        self._thread.join(STOP_TIMEOUT_S)


def check_parallel_size(size: int, shape: ModelShape) -> None:
    """Raise ConfigError when `size` ranks cannot share the model's heads."""
    possible = parallel_sizes(shape)
    if size not in possible:
        raise ConfigError(
            f"--tensor-parallel-size is {size}; it must divide the model's {shape.num_heads} "
            f"heads, and divide or be a multiple of its {shape.num_kv_heads} KV heads",
            hint=f"possible: {', '.join(map(str, possible))}",
        )


class _Worker:
    """One rank's process, and what it says."""

    def __init__(self, rank: int, launch: WorkerLaunch, plans: ShmRing) -> None:
        self.rank = rank
        self.last_words = ""
        self._ring = ShmRing.create()
        self._reader = ShmReader(self._ring)
        self._decoder = decoder_for(FromWorker)
        rendezvous = (launch.rendezvous_fd,) if launch.rendezvous_fd >= 0 else ()
        self.process = subprocess.Popen(
            (
                *(sys.executable, "-m", "twostroke.proc.worker_main"),
                *(plans.spec, self._ring.spec),
            ),
            stdin=subprocess.PIPE,
            pass_fds=(*plans.fds, *self._ring.fds, *rendezvous),
            env=os.environ | RANKS_ENVIRONMENT,
        )
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is dead already: told when we wait for it
            self.process.stdin.write(msgspec.json.encode(launch) + b"\n")
            self.process.stdin.flush()

    def receive(self, check: Callable[[], None]) -> FromWorker:
        """Its next message; `check` may raise while waiting."""
        message: FromWorker = self._decoder.decode(self._reader.get(check))
        if isinstance(message, EngineDead):
            self.last_words = message.error
        return message

    def hear_out(self) -> None:
        """Read what it had still sent when it ended."""

        def give_up() -> None:
            raise EOFError("the message was cut short")

        with contextlib.suppress(EOFError):
            while self._reader.ready():
                self.receive(give_up)

    def close_input(self) -> None:
        """Tell it to end."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()

    def end(self, timeout_s: float) -> None:
        """Wait for its end, or bring it about."""
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._reader.close()
        self._ring.close()


class ProcessExecutor:
    """Runs the model in worker processes, one a rank. Linux only (ConfigError elsewhere).

    A worker ends when its standard input closes, which the system does for us even if this process
    is killed; what we share has no name, so nothing is left behind. When one worker dies, all are
    of no use: `check_alive` and what waits for a worker raise EngineDeadError naming it, and
    `on_death` is called from a thread, once, even if nobody waits. Raises what loading the model
    raises, and EngineDeadError when a worker dies meanwhile.
    """

    def __init__(
        self,
        config: EngineConfig,
        checkpoint: Checkpoint,
        progress: Progress | None = None,
        *,
        on_death: Callable[[], object] | None = None,
    ) -> None:
        size = config.tensor_parallel_size
        if sys.platform != "linux":
            flag = "--worker-process" if size == 1 else "--tensor-parallel-size"
            raise ConfigError(f"{flag} needs Linux, this is {sys.platform}", hint="leave it out")
        check_parallel_size(size, checkpoint.shape)
        self._plans = ShmRing.create(size)
        self._writer = ShmWriter(self._plans)
        self._workers: list[_Worker] = []
        self._num_in_flight = 0
        self._closed = False
        self._is_ready = False
        self._failure: TwostrokeError | None = None
        self._watch: _Watch | None = None
        rendezvous_fd = os.memfd_create("twostroke-ranks") if size > 1 else -1
        launch = WorkerLaunch(
            config,
            str(checkpoint.path),
            rendezvous_fd=rendezvous_fd,
            engine_id=secrets.token_hex(8),
        )
        try:
            for rank in range(size):
                launch.rank = rank
                self._workers.append(_Worker(rank, launch, self._plans))
            readies = [self._wait_until_ready(worker, progress) for worker in self._workers]
        except BaseException:
            self.shutdown()
            raise
        finally:
            if rendezvous_fd >= 0:
                os.close(rendezvous_fd)
        self._is_ready = True
        self.facts = readies[0].facts
        self.num_blocks = readies[0].num_blocks
        self.max_model_len = readies[0].max_model_len
        self.endpoint = _joined_endpoint(readies)
        self._kv_reports = RankReports(size)
        if on_death is not None:
            self._watch = _Watch([worker.process.pid for worker in self._workers], on_death)

    def _wait_until_ready(self, worker: _Worker, progress: Progress | None) -> EngineReady:
        while True:
            match worker.receive(self.check_alive):
                case EngineReady() as ready:
                    return ready
                case EngineProgress(stage, done, total):
                    if progress is not None:
                        progress(stage, done, total)
                case EngineDead():
                    raise self._find_failure()
                case other:
                    raise EngineDeadError(f"the worker sent {type(other).__name__} at start-up")

    def check_alive(self) -> None:
        """Raise once a worker has ended, or has failed before."""
        if self._failure is not None:
            raise self._failure
        if any(worker.process.poll() is not None for worker in self._workers):
            raise self._find_failure()

    def _find_failure(self) -> TwostrokeError:
        """Why workers end or fail, told by the first that did not just lose contact with another.

        Waits a moment for that one's end: its neighbours may notice before the system does.
        """
        lost_contact = EXIT_CODES[LostContactError]
        deadline_s = time.monotonic() + CAUSE_TIMEOUT_S
        while True:
            ended = [worker for worker in self._workers if worker.process.poll() is not None]
            to_blame = [worker for worker in ended if worker.process.returncode != lost_contact]
            if to_blame or time.monotonic() > deadline_s:
                break
            time.sleep(0.01)
        failed = [worker for worker in self._workers if worker.last_words]
        worker = [*to_blame, *ended, *failed][0]
        worker.hear_out()
        self._failure = self._failure_of(worker)
        return self._failure

    def _failure_of(self, worker: _Worker) -> TwostrokeError:
        of_rank = f" of rank {worker.rank}" if len(self._workers) > 1 else ""
        code = worker.process.poll()
        if worker.last_words:
            if not self._is_ready:
                kind = next((k for k, c in EXIT_CODES.items() if c == code), EngineDeadError)
                return kind(worker.last_words)
            return EngineDeadError(f"the worker{of_rank} failed: {worker.last_words}")
        assert code is not None
        cause = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return EngineDeadError(f"the worker process{of_rank} died ({cause})")

    def submit(self, plan: StepPlan) -> None:
        self._writer.put(encode(plan), self.check_alive)
        self._num_in_flight += 1

    def collect(self) -> StepResult:
        if not self._num_in_flight:
            raise RuntimeError("collect() without a step in flight")
        if self._failure is not None:
            raise self._failure
        result = self._result_of(self._workers[0])
        if self.endpoint is not None:
            others = [self._result_of(worker).kv for worker in self._workers[1:]]
            result.kv = self._kv_reports.merge([result.kv, *others])
        self._num_in_flight -= 1
        return result

    def _result_of(self, worker: _Worker) -> StepResult:
        message = worker.receive(self.check_alive)
        if isinstance(message, StepResult):
            return message
        raise self._find_failure()

    def shutdown(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._watch is not None:
            self._watch.close()
        for worker in self._workers:
            worker.close_input()
        timeout_s = STOP_TIMEOUT_S if self._failure is None else 0.1
        for worker in self._workers:
            worker.end(timeout_s)
        self._writer.close()
        self._plans.close()


def _joined_endpoint(readies: list[EngineReady]) -> KvEndpoint | None:
    """Where the engine's KV can be read, from what each rank says of its own."""
    first, *others = [ready.kv for ready in readies]
    if first is None:
        return None
    addresses = [address for kv in (first, *others) if kv is not None for address in kv.addresses]
    return msgspec.structs.replace(first, addresses=addresses)


class _Watch:
    """A thread that calls back when one of some child processes ends."""

    def __init__(self, pids: list[int], callback: Callable[[], object]) -> None:
        self._stop_fd = os.eventfd(0)
        self._fds = [os.pidfd_open(pid) for pid in pids]
        self._callback = callback
        self._thread = threading.Thread(target=self._wait, name="watch-workers", daemon=True)
        self._thread.start()

    def _wait(self) -> None:
        poll = select.poll()
        for fd in (self._stop_fd, *self._fds):
            poll.register(fd, select.POLLIN)
        if not any(fd == self._stop_fd for fd, _ in poll.poll()):
            self._callback()

    def close(self) -> None:
        os.eventfd_write(self._stop_fd, 1)
        self._thread.join()
        for fd in (self._stop_fd, *self._fds):
            os.close(fd)
