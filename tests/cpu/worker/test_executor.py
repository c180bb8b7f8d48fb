"""Both executors: order, failures, and what they leave behind."""

import threading

import numpy as np
import pytest

from twostroke.checkpoint import Checkpoint
from twostroke.config import EngineConfig
from twostroke.errors import EngineDeadError, ModelError
from twostroke.messages import NO_TOKENS, StepPlan, StepResult
from twostroke.worker.executor import Progress, ThreadExecutor


def empty_plan(step: int) -> StepPlan:
    return StepPlan(
        step=step,
        slots=NO_TOKENS,
        num_computed=NO_TOKENS,
        num_scheduled=NO_TOKENS,
        samples=np.empty(0, np.bool_),
    )


class CountingRunner:
    """Fails in step 3."""

    facts = (("Device", "none", "a test"),)
    num_blocks = 7
    max_model_len = 100

    def __init__(
        self, config: EngineConfig, checkpoint: Checkpoint, progress: Progress | None
    ) -> None:
        if progress is not None:
            progress("weights", 1, 2)

    def run(self, plan: StepPlan) -> StepResult:
        if plan.step == 3:
            raise ZeroDivisionError("step 3")
        return StepResult(step=plan.step, num_sampled=NO_TOKENS, token_ids=NO_TOKENS)


def start(make_runner=CountingRunner, **kwargs) -> ThreadExecutor:
    return ThreadExecutor(EngineConfig(), None, make_runner=make_runner, **kwargs)


def test_thread_runs_plans_in_order_with_two_in_flight():
    stages = []
    executor = start(progress=lambda *progress: stages.append(progress))
    assert stages == [("weights", 1, 2)]
    assert (executor.num_blocks, executor.max_model_len) == (7, 100)
    assert executor.facts == CountingRunner.facts
    for step in (0, 1):
        executor.submit(empty_plan(step))
    assert [executor.collect().step for _ in range(2)] == [0, 1]
    with pytest.raises(RuntimeError, match="without a step in flight"):
        executor.collect()
    executor.shutdown()
    executor.shutdown()
    assert "worker" not in {thread.name for thread in threading.enumerate()}


def test_a_failing_step_ends_the_thread_and_keeps_its_cause():
    executor = start()
    for step in (2, 3, 4):
        executor.submit(empty_plan(step))
    assert executor.collect().step == 2
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="ZeroDivisionError: step 3") as failure:
            executor.collect()
        assert isinstance(failure.value.__cause__, ZeroDivisionError)
    executor.shutdown()


def test_what_loading_raises_reaches_the_caller():
    def broken(*_: object) -> CountingRunner:
        raise ModelError("model.safetensors is damaged")

    with pytest.raises(ModelError, match="damaged"):
        start(broken)
