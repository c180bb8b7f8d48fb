import math

import numpy as np
import pytest

from twostroke.clock import VirtualClock
from twostroke.cost import HostCost, LinearStepCost, StepWork
from twostroke.kv_messages import KvLoadEnd, KvReport
from twostroke.messages import StepPlan
from twostroke.twin.executor import IDLE_WAIT_S, CostExecutor

COST = LinearStepCost(base_s=1.0, context_s=0.001)


class Loads:
    """Stands for transfers under way."""

    reads_ahead = True

    def __init__(self):
        self.is_busy = True
        self.has_report = False

    def apply(self, commands):
        raise AssertionError("there are no commands")

    def report(self):
        if not self.has_report:
            return None
        self.has_report = False
        return KvReport(loads=[KvLoadEnd(load_id=1)])


def plan(step, computed=(10,), scheduled=(1,)):
    rows = len(computed)
    return StepPlan(
        step=step,
        slots=np.arange(rows, dtype=np.int32),
        num_computed=np.array(computed, np.int32),
        num_scheduled=np.array(scheduled[:rows], np.int32),
        samples=np.ones(rows, np.bool_),
    )


def make(**fields):
    clock = VirtualClock()
    return clock, CostExecutor(clock, COST, max_num_seqs=4, token_of=int, **fields)


def test_steps_follow_each_other_with_a_gap():
    clock, executor = make(host=HostCost(gap_s=0.25, gap_row_s=0.25))
    executor.submit(plan(0))
    executor.submit(plan(1, (11,)))
    assert executor.end_of_oldest_s == pytest.approx(1.01)
    clock.advance_to(1.01)
    result = executor.collect()
    assert (result.step, result.num_sampled.tolist()) == (0, [1])
    assert executor.end_of_oldest_s == pytest.approx(1.01 + 0.5 + 1.011)
    assert executor.busy_s == pytest.approx(2.021)


def test_a_plan_without_rows_takes_no_time_when_nothing_is_moved():
    clock, executor = make()
    clock.advance_to(3.0)
    executor.submit(plan(0, ()))
    assert executor.end_of_oldest_s == 3.0


def test_a_plan_without_rows_waits_for_a_transfer():
    loads = Loads()
    clock, executor = make(transfers=loads)
    executor.submit(plan(0, ()))
    assert executor.end_of_oldest_s == math.inf
    assert executor.looked_up_s(0.012) == pytest.approx(3 * IDLE_WAIT_S)
    clock.advance_to(0.02)
    loads.has_report = True
    executor.transfer_ended()
    assert executor.end_of_oldest_s == 0.02
    assert executor.collect().kv.loads[0].load_id == 1


def test_it_stops_waiting_when_there_is_another_plan():
    clock, executor = make(transfers=Loads())
    executor.submit(plan(0, ()))
    clock.advance_to(0.012)
    executor.submit(plan(1))
    assert executor.end_of_oldest_s == pytest.approx(3 * IDLE_WAIT_S)
    clock.advance_to(executor.end_of_oldest_s)
    executor.collect()
    assert executor.end_of_oldest_s == pytest.approx(3 * IDLE_WAIT_S + 1.01)
    # It has a start, so that it can be said when it hears of what comes.
    assert executor.looked_up_s(0.016) == pytest.approx(4 * IDLE_WAIT_S)


def test_behind_a_step_it_waits_no_longer_than_a_worker_does():
    loads = Loads()
    clock, executor = make(transfers=loads)
    executor.submit(plan(0))
    executor.submit(plan(1, ()))
    clock.advance_to(1.01)
    executor.collect()
    executor.submit(plan(2))
    assert executor.end_of_oldest_s == pytest.approx(1.01 + IDLE_WAIT_S)


def test_a_change_of_rows_costs_that_step_and_the_next_ones_less_and_less():
    clock, executor = make(host=HostCost(changed_s=0.1))
    ends = [0.0]
    contexts = 10, 11, 12, 30, 31
    for step, context in enumerate(contexts):
        executor.submit(plan(step, (context,)))
        clock.advance_to(executor.end_of_oldest_s)
        executor.collect()
        ends.append(clock.now())
    # A row that comes with its prompt computed is told of during the next step: another change.
    levels = [1, 0.6, 0.36, 1 + 0.216, 1 + 0.6 * 1.216]
    plain = [COST.step_s(StepWork(1, 1, 1, context, context + 0.5)) for context in contexts]
    late = [0.1 * level for level in levels]
    assert np.diff(ends) - plain == pytest.approx(late)


@pytest.mark.parametrize("context", [11, 30])
def test_many_steps_after_a_row_that_joined_are_those_of_the_steps(context):
    """The first step, or the one in flight before it, has a new row."""
    (clock, single), (many_clock, many) = (make(host=HostCost(changed_s=0.3)) for _ in range(2))
    for executor in (single, many):
        executor.submit(plan(0))
        executor.submit(plan(1, (context,)))
    for its_clock, executor in ((clock, single), (many_clock, many)):
        its_clock.advance_to(executor.end_of_oldest_s)
        executor.collect()
    for first in (context + 1, 60):
        ends = many.ends_of_decodes(1, first, 4)
        taken = []
        for turn in range(4):
            single.submit(plan(2 + turn, (first + turn,)))
            clock.advance_to(single.end_of_oldest_s)
            single.collect()
            taken.append(clock.now())
        assert ends[:4].tolist() == taken  # to the last bit
        many_clock.advance_to(taken[-1])
        many.skip(4, ends)
        assert many.end_of_oldest_s == single.end_of_oldest_s


def test_a_request_delays_the_step_that_runs_and_what_waits_for_it():
    clock, executor = make(host=HostCost(gap_s=0.25, arrival_s=0.5, arrivals_s=0.125))
    assert executor.arrivals_delay
    assert not executor.request_arrives(0.0)  # nothing runs
    executor.submit(plan(0, scheduled=(4,)))
    executor.submit(plan(1, (14,)))
    assert executor.request_arrives(1.0)
    assert executor.end_of_oldest_s == pytest.approx(1.51)
    assert executor.request_arrives(1.25)
    assert executor.end_of_oldest_s == pytest.approx(1.635)
    assert executor.busy_s == pytest.approx(1.01 + 0.625 + 1.014)
    assert executor.prefill_s == pytest.approx(1.01 + 0.625)
    clock.advance_to(executor.end_of_oldest_s)
    executor.collect()
    assert not executor.request_arrives(1.7)  # between the steps
    assert executor.end_of_oldest_s == pytest.approx(1.635 + 0.25 + 1.014)
    assert executor.request_arrives(2.0)  # the first one during this step
    assert executor.end_of_oldest_s == pytest.approx(1.635 + 0.25 + 1.014 + 0.5)


def test_the_ends_of_many_steps_are_those_of_the_steps():
    for in_flight in (True, False):
        host = HostCost(gap_s=0.1, changed_s=0.3)
        clock, single = make(host=host)
        clock_of_many, many = make(host=host)
        if in_flight:
            single.submit(plan(0))
            many.submit(plan(0))
        ends = many.ends_of_decodes(1, 11, 5)
        taken = []
        for turn in range(5):
            single.submit(plan(turn + in_flight, (11 + turn,)))
            clock.advance_to(single.end_of_oldest_s)
            single.collect()
            taken.append(clock.now())
        assert ends[:5].tolist() == taken  # to the last bit
        clock_of_many.advance_to(float(ends[4]))
        many.skip(5, ends)
        assert many.busy_s == pytest.approx(single.busy_s)
        if in_flight:
            assert many.end_of_oldest_s == single.end_of_oldest_s
            assert many.collect().step == single.collect().step == 5
