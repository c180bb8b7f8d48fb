"""Engines that step together wait for each other, and lose nothing by it."""

from collections.abc import Sequence

import numpy as np
import pytest

from tests.pure.twin.deployments import COST, group, run
from tests.pure.twin.test_executor import Loads, plan
from twostroke.clock import VirtualClock
from twostroke.cost import StepColumns, StepWork
from twostroke.twin.executor import IDLE_WAIT_S
from twostroke.twin.hardware import GPUS
from twostroke.twin.lockstep import Lockstep, LockstepExecutor, group_step_s
from twostroke.twin.models import find_shape
from twostroke.twin.roofline import Parallel, Roofline
from twostroke.twin.scenario import EngineGroup, Result
from twostroke.twin.workload import of_columns

SPEC = "poisson:20/s,in=uniform(20,400),out=uniform(2,40),n=60"


class Shared:
    """A step takes as long as all the work of the group."""

    def step_s(self, work: StepWork) -> float:
        return COST.step_s(work)

    def step_s_many(self, works: StepColumns) -> np.ndarray:
        return COST.step_s_many(works)

    def group_step_s(self, works: Sequence[StepWork]) -> float:
        return sum(COST.step_s(work) for work in works if work.num_rows)


def together(engines: EngineGroup) -> EngineGroup:
    return EngineGroup(**{**vars(engines), "steps_together": True})


def two_requests(
    engines: EngineGroup, second_at_s: float, lengths: list[tuple[int, int]]
) -> Result:
    """One request on each of two engines: when the second comes, and (prompt, output) of both."""
    prompts, outputs = np.array(lengths, np.int32).T
    return run([engines], of_columns("two", np.array([0.0, second_at_s]), prompts, outputs))


def test_a_group_of_one_is_an_engine() -> None:
    alone, grouped = run([group()], SPEC), run([together(group())], SPEC)
    assert np.array_equal(alone.e2e_s, grouped.e2e_s)
    assert np.array_equal(alone.ttft_s, grouped.ttft_s)


def test_a_decode_waits_for_the_other_engines_prompt() -> None:
    lengths = [(16, 60), (500, 2)]
    apart = two_requests(group(count=2), 0.1, lengths)
    grouped = two_requests(together(group(count=2)), 0.1, lengths)
    prompt_s = COST.step_s(StepWork(500, 1, 1, 0, 500 * 250))
    assert apart.itl_s.max() < 0.006
    assert grouped.itl_s.max() == pytest.approx(prompt_s, rel=0.01)


def test_a_cost_that_knows_of_groups_is_asked() -> None:
    """While both decode, each step takes as long as both steps."""
    lengths = [(16, 60), (16, 60)]
    apart = two_requests(group(count=2, cost=Shared()), 0.0, lengths)
    grouped = two_requests(together(group(count=2, cost=Shared())), 0.0, lengths)
    assert grouped.tpot_s == pytest.approx(2 * apart.tpot_s, rel=0.05)


def test_of_a_cost_that_does_not_the_slowest_counts() -> None:
    works = [StepWork(1, 1, 1, 0, 0), StepWork(400, 1, 1, 0, 0), StepWork(0, 0, 0, 0, 0)]
    assert group_step_s(COST, works) == COST.step_s(works[1])


def test_equal_engines_take_the_step_of_one() -> None:
    """A roofline's own step takes all engines of its group to have the same work."""
    pair = Parallel(data_parallel_size=2, expert_parallel=True)
    cost = Roofline(find_shape("qwen3-30b-a3b"), GPUS["H100"], pair)
    work = StepWork(64, 64, 64, 64_000, 64_032)
    assert group_step_s(cost, [work, work]) == pytest.approx(cost.step_s(work))
    nothing = StepWork(0, 0, 0, 0, 0)
    assert cost.parts(work).launches < group_step_s(cost, [work, nothing]) < cost.step_s(work)


def test_a_plan_waits_for_the_one_before_it_which_then_waits_no_longer_for_a_transfer() -> None:
    clock = VirtualClock()
    executor = LockstepExecutor(
        Lockstep(COST), clock, COST, max_num_seqs=4, token_of=int, transfers=Loads()
    )
    executor.submit(plan(0, ()))
    assert executor.end_of_oldest_s == np.inf
    executor.submit(plan(1))
    assert executor.end_of_oldest_s == IDLE_WAIT_S
    clock.advance_to(IDLE_WAIT_S)
    assert executor.is_due
    executor.collect()
    step_s = COST.step_s(StepWork(1, 1, 1, 10, 11))
    assert executor.end_of_oldest_s == pytest.approx(IDLE_WAIT_S + step_s, rel=1e-3)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_all_are_answered_with_handoffs_between_groups(asynchronous: bool) -> None:
    engines = [
        together(group("prefill", 2, async_scheduling=asynchronous)),
        together(group("decode", 3, async_scheduling=asynchronous)),
    ]
    first, second = run(engines, SPEC), run(engines, SPEC)
    assert first.done.all()
    assert np.array_equal(first.e2e_s, second.e2e_s)
    assert sum(engine.loaded_bytes for engine in first.engines) > 0
