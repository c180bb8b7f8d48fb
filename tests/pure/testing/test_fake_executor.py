import numpy as np
import pytest

from twostroke.core.executor import Executor
from twostroke.messages import NewRequest, SamplingParams, StepPlan
from twostroke.testing.fake_executor import FakeExecutor, fnv1a32, simulated_token


def int32s(*values):
    return np.array(values, np.int32)


def plan(step=0, *, slots=(0,), computed=(0,), scheduled=(4,), samples=(True,), **fields):
    return StepPlan(
        step=step,
        slots=int32s(*slots),
        num_computed=int32s(*computed),
        num_scheduled=int32s(*scheduled),
        samples=np.array(samples, np.bool_),
        **fields,
    )


def new(slot=0, tokens=4, blocks=1):
    return NewRequest(
        slot=slot,
        request_id=f"r{slot}",
        token_ids=int32s(*range(tokens)),
        num_prompt_tokens=tokens,
        params=SamplingParams(),
        stop_token_ids=(),
        block_ids=int32s(*range(1, blocks + 1)),
    )


def test_known_hashes():
    assert fnv1a32("") == 0x811C9DC5
    assert fnv1a32("a") == 0xE40C292C
    assert simulated_token("r0", 4) == 100 + fnv1a32("r0:4") % 31900


def test_tokens_run_on():
    executor: Executor = FakeExecutor(block_size=4)
    executor.submit(plan(new=[new()]))
    grown = {"grown_slots": int32s(0), "grown_counts": int32s(1), "grown_blocks": int32s(2)}
    executor.submit(plan(1, computed=(4,), scheduled=(1,), **grown))
    results = [executor.collect(), executor.collect()]
    assert [result.step for result in results] == [0, 1]
    tokens = [result.token_ids.tolist() for result in results]
    assert tokens == [[simulated_token("r0", 4)], [simulated_token("r0", 5)]]
    executor.submit(plan(2, slots=(), computed=(), scheduled=(), samples=(), freed_slots=int32s(0)))
    executor.collect()
    assert executor.num_seated == 0


def test_a_chunk_yields_nothing():
    executor = FakeExecutor(block_size=4)
    executor.submit(plan(scheduled=(3,), samples=(False,), new=[new()]))
    assert executor.collect().num_sampled.tolist() == [0]


def test_drafts_are_proposed_and_verified():
    executor = FakeExecutor(block_size=8, num_drafts=2, accept=lambda request_id, drafts: 1)
    executor.submit(plan(new=[new()]))
    first = executor.collect()
    assert first.draft_token_ids.tolist() == [simulated_token("r0", 5), simulated_token("r0", 6)]
    executor.submit(plan(1, computed=(4,), scheduled=(3,), num_drafts=int32s(2)))
    assert executor.collect().token_ids.tolist() == [simulated_token("r0", p) for p in (5, 6)]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (plan(slots=(), computed=(), scheduled=(), samples=(), freed_slots=int32s(3)), "nobody"),
        (plan(new=[new(), new()]), "seat 0 is taken"),
        (plan(new=[new(1)]), "has 0 rows"),
        (plan(new=[new(tokens=5)], scheduled=(5,)), "lacks blocks"),
        (plan(new=[new(tokens=3)]), "do not exist"),
        (plan(new=[new()], samples=(False,)), "ends at 4 of 4"),
        (plan(new=[new()], scheduled=(0,)), "runs nothing"),
        (plan(new=[new()], grown_slots=int32s(0), grown_counts=int32s(2)), "do not add up"),
    ],
)
def test_wrong_plans_are_caught(wrong, words):
    executor = FakeExecutor(block_size=4)
    executor.submit(wrong)
    with pytest.raises(AssertionError, match=words):
        executor.collect()


def test_a_gap_is_caught():
    executor = FakeExecutor(block_size=8)
    executor.submit(plan(new=[new()]))
    executor.submit(plan(1, computed=(5,), scheduled=(1,)))
    executor.collect()
    with pytest.raises(AssertionError, match="starts at 5; its seat has computed 4"):
        executor.collect()


def test_at_most_two_in_flight_and_shutdown_forgets():
    executor = FakeExecutor()
    executor.submit(plan(new=[new()]))
    executor.submit(plan(1))
    with pytest.raises(AssertionError, match="more than two"):
        executor.submit(plan(2))
    executor.shutdown()
    executor.shutdown()
    assert executor.num_seated == 0
