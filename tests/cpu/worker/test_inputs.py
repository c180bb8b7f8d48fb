"""The persistent batch against a plain per-token model of it."""

import sys
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostroke.messages import NewRequest, SamplingParams, StepPlan
from twostroke.worker.inputs import PlanError, SeatTable, warm_up_rows

BLOCK_SIZE = 4
MAX_MODEL_LEN = 30


def table() -> SeatTable:
    return SeatTable(
        max_num_seqs=4, max_model_len=MAX_MODEL_LEN, block_size=BLOCK_SIZE, num_blocks=40
    )


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def new(slot: int, tokens: list[int], blocks: list[int], num_prompt: int | None = None):
    return NewRequest(
        slot=slot,
        request_id=f"r{slot}",
        token_ids=ints(*tokens),
        num_prompt_tokens=len(tokens) if num_prompt is None else num_prompt,
        params=SamplingParams(),
        stop_token_ids=(),
        block_ids=ints(*blocks),
    )


def plan(rows: list[tuple[int, int, int, bool]] = (), **changes: object) -> StepPlan:
    """Rows are (seat, num_computed, num_scheduled, samples)."""
    columns = list(zip(*rows, strict=True)) or [(), (), (), ()]
    return StepPlan(
        step=7,
        slots=ints(*columns[0]),
        num_computed=ints(*columns[1]),
        num_scheduled=ints(*columns[2]),
        samples=np.array(columns[3], np.bool_),
        **changes,
    )


def test_rows_become_flat_inputs_in_plan_order():
    seats = table()
    seats.apply(plan(new=[new(2, [20, 21, 22, 23, 24], [5, 6]), new(0, [1, 2, 3], [9])]))
    step = plan([(2, 1, 3, False), (0, 2, 1, True)])
    inputs = seats.step_inputs(step)
    assert inputs.token_ids.tolist() == [21, 22, 23, 3]
    assert inputs.positions.tolist() == [1, 2, 3, 2]
    assert inputs.query_start.tolist() == [0, 3, 4]
    assert inputs.num_computed.tolist() == [1, 2]
    assert inputs.block_tables[:, 0].tolist() == [5, 9]
    assert inputs.token_ids.dtype == inputs.positions.dtype == np.int64


def test_blocks_grow_seat_by_seat_and_sampled_tokens_are_kept():
    seats = table()
    seats.apply(plan(new=[new(0, [1, 2, 3, 4], [1]), new(3, [7], [2])]))
    seats.append(ints(0, 3), ints(1, 1), ints(50, 51))
    seats.apply(
        plan(grown_slots=ints(3, 0), grown_counts=ints(2, 1), grown_blocks=ints(30, 31, 32))
    )
    inputs = seats.step_inputs(plan([(0, 4, 1, True), (3, 1, 1, True)]))
    assert inputs.token_ids.tolist() == [50, 51]
    assert inputs.block_tables.tolist() == [[1, 32], [2, 30]]
    assert seats.block_ids[3, :3].tolist() == [2, 30, 31]


def test_a_seat_can_be_vacated_and_taken_in_one_plan():
    seats = table()
    seats.apply(plan(new=[new(1, [1, 2, 3, 4, 5], [1, 2])]))
    seats.apply(plan(freed_slots=ints(1), new=[new(1, [9, 8], [3])]))
    assert seats.step_inputs(plan([(1, 0, 2, True)])).token_ids.tolist() == [9, 8]


@given(st.data())
def test_any_mix_of_rows_equals_the_loop_over_tokens(data: st.DataObject):
    seats = table()
    tokens: dict[int, list[int]] = {}
    rows = []
    for seat in data.draw(st.permutations(range(4))):
        length = data.draw(st.integers(1, MAX_MODEL_LEN - 1))
        tokens[seat] = data.draw(st.lists(st.integers(0, 999), min_size=length, max_size=length))
        blocks = list(range(1 + seat * 8, 1 + seat * 8 + -(-length // BLOCK_SIZE)))
        seats.apply(plan(new=[new(seat, tokens[seat], blocks)]))
        first = data.draw(st.integers(0, length - 1))
        count = data.draw(st.integers(1, length - first))
        rows.append((seat, first, count, first + count == length))
    inputs = seats.step_inputs(plan(rows))
    expected = [
        (tokens[seat][position], position)
        for seat, first, count, _ in rows
        for position in range(first, first + count)
    ]
    flat = zip(inputs.token_ids.tolist(), inputs.positions.tolist(), strict=True)
    assert list(flat) == expected
    for i, (seat, first, count, _) in enumerate(rows):
        for position in range(first + count):
            block = inputs.block_tables[i, position // BLOCK_SIZE]
            assert block == 1 + seat * 8 + position // BLOCK_SIZE


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (plan([(1, 0, 1, False)]), r"seats \[1\] are empty"),
        (plan([(9, 0, 1, False)]), "there are 4 seats"),
        (plan([(0, 0, 1, False), (0, 1, 1, False)]), "named twice"),
        (plan([(0, 0, 0, False)]), "schedules no token"),
        (plan([(0, -1, 1, False)]), "negative"),
        (plan([(0, 4, 2, False)]), "past its known tokens.*limit 5"),
        (plan([(0, 0, 3, True)]), "samples before its last token"),
        (plan([(2, 0, 9, True)]), "past its blocks"),
        (plan([(3, 20, 10, True)]), "samples past the model's length"),
        (plan([(0, 0, 1, False)], num_drafts=ints(1)), "schedules no token"),
        (plan([(0, 0, 2, False)], num_drafts=ints(1)), "drafts without sampling"),
        (plan([(0, 0, 2, False)], num_drafts=ints(0, 0)), r"1 rows with \[0, 0\] drafts"),
        (plan([(3, 29, 2, True)], num_drafts=ints(1)), "samples past the model's length"),
        (plan(new=[new(0, [1], [1])]), "seat 0 is taken"),
        (plan(new=[new(4, [1], [1])]), "seat 4; there are 4"),
        (plan(new=[new(1, [1] * 31, [1])]), "31 tokens"),
        (plan(new=[new(1, [1], [1], num_prompt=2)]), "1 tokens of which 2 are prompt"),
        (plan(new=[new(1, [1], [40])]), "outside 40"),
        (plan(new=[new(1, [1], list(range(9)))]), "9 blocks; at most 8"),
        (plan(freed_slots=ints(1)), "freed_slots.*empty"),
        (plan(grown_slots=ints(0), grown_counts=ints(2), grown_blocks=ints(1)), "but 1 are given"),
        (plan(grown_slots=ints(3), grown_counts=ints(1), grown_blocks=ints(1)), "grows past 8"),
    ],
)
def test_a_plan_that_contradicts_the_seats_is_named(wrong: StepPlan, text: str):
    seats = table()
    seats.apply(plan(new=[new(0, [1, 2, 3, 4, 5], [1, 2]), new(2, [1] * 9, [3, 4])]))
    seats.apply(plan(new=[new(3, [1] * 30, list(range(5, 13)))]))
    with pytest.raises(PlanError, match=text):
        apply_and_build(seats, wrong)


def apply_and_build(seats: SeatTable, step: StepPlan) -> None:
    seats.apply(step)
    seats.step_inputs(step)


def test_no_other_thread_runs_before_the_inputs_are_ready():
    """The core's main thread waits for the interpreter at that time, and would keep it for long."""
    warm_up_rows()
    seats = table()
    seats.apply(plan(new=[new(0, [1, 2, 3], [9])]))
    step, go, ran = plan([(0, 2, 1, True)]), threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: go.wait() and ran.set())
    thread.start()
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # it gets its turn only if it is let in
    try:
        go.set()
        for _ in range(2000):  # 20 ms, in which it wakes up
            seats.num_computed[0] = 2
            seats.step_inputs(step)
            _, positions, _ = seats.sampled_rows(ints(0), ints(1))
        let_in = ran.is_set()
    finally:
        sys.setswitchinterval(interval_s)
    thread.join()
    assert positions.tolist() == [3]
    assert ran.is_set()
    assert not let_in


def test_rows_start_at_our_own_count_when_drafts_were_rejected_meanwhile():
    """The drawing at the top of `inputs`, with its numbers."""
    seats = table()
    seats.apply(plan(new=[new(0, [*range(100, 110), 1], [1, 2, 3, 4, 5])]))
    seats.put_drafts(ints(0), ints(3), ints(2, 3, 4))
    step = plan([(0, 10, 4, True)], num_drafts=ints(3))
    assert seats.step_inputs(step, ints(3)).token_ids.tolist() == [1, 2, 3, 4]
    seats.append(ints(0), ints(2), ints(2, 5))

    seats.put_drafts(ints(0), ints(3), ints(6, 7, 8))
    inputs = seats.step_inputs(plan([(0, 14, 4, True)], num_drafts=ints(3)), ints(3))
    assert inputs.positions.tolist() == [12, 13, 14, 15]
    assert inputs.token_ids.tolist() == [5, 6, 7, 8]
    seats.append(ints(0), ints(4), ints(6, 7, 8, 9))

    seats.put_drafts(ints(0), ints(1), ints(10))
    step = plan([(0, 16, 4, True)], num_drafts=ints(3))
    inputs = seats.step_inputs(step, ints(1))
    assert inputs.positions.tolist() == [16, 17]  # two of the planned drafts do not exist
    assert inputs.token_ids.tolist() == [9, 10]
    seats.append(ints(0), ints(1), ints(11))
    with pytest.raises(PlanError, match="leaves a gap of tokens"):
        seats.step_inputs(plan([(0, 21, 1, True)]))
