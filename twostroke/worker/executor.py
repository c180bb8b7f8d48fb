"""Executors: where the worker runs. The core sees `core.executor.Executor` and cannot tell.

    ThreadExecutor    core's main thread ──queue──▶ worker thread of the same process
    ProcessExecutor   core process ──shm_queue──▶ worker process (`proc.worker_main`)

Both load the model in their constructor, tell of it through `progress`, and then know what was
found out: `facts`, `num_blocks`, `max_model_len`.
"""

import queue
import threading
from collections.abc import Callable
from typing import Protocol

from twostroke.checkpoint import Checkpoint
from twostroke.config import EngineConfig
from twostroke.errors import EngineDeadError
from twostroke.messages import StepPlan, StepResult

Progress = Callable[[str, int, int], None]  # stage, done, total

STOP_TIMEOUT_S = 10.0  # at shutdown, for the step that still runs


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
