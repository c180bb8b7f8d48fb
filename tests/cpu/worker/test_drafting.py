"""Prompt look-up against a plain search."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostroke.messages import NewRequest, SamplingParams, StepPlan
from twostroke.worker.drafting import (
    ROW_COST,
    ROW_COST_FEW_BITS,
    DraftLengths,
    NgramDrafter,
    continuation,
)
from twostroke.worker.inputs import SeatTable


def plain_search(tokens: list[int], shortest: int, longest: int) -> int:
    for length in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        for end in range(length, len(tokens)):
            if tokens[end - length : end] == tokens[-length:]:
                return end
    return 0


@given(
    tokens=st.lists(st.integers(0, 2), min_size=1, max_size=30),
    shortest=st.integers(1, 4),
    more=st.integers(0, 4),
)
def test_the_longest_match_counts_and_of_several_the_first(tokens, shortest, more):
    found = continuation(np.array(tokens, np.int32), shortest, shortest + more)
    assert found == plain_search(tokens, shortest, shortest + more)


@pytest.mark.parametrize(
    ("tokens", "limit", "drafts"),
    [
        ([1, 2, 3, 4, 9, 1, 2], 3, [3, 4, 9]),
        ([1, 2, 3, 4, 9, 1, 2], 1, [3]),
        ([1, 2, 3, 4, 9, 1, 2], 0, []),
        ([5, 1, 2, 1, 2], 4, [1, 2]),  # no more follows
        ([1, 2, 3, 4], 4, []),
        ([7], 4, []),
    ],
)
def test_drafts_stand_behind_the_known_tokens(tokens, limit, drafts):
    seats = SeatTable(max_num_seqs=2, max_model_len=20, block_size=4, num_blocks=9)
    none = np.empty(0, np.int32)
    new = NewRequest(
        slot=1,
        request_id="r",
        token_ids=np.array(tokens, np.int32),
        num_prompt_tokens=len(tokens),
        params=SamplingParams(),
        stop_token_ids=(),
        block_ids=np.array([1, 2], np.int32),
    )
    empty = np.empty(0, np.bool_)
    seats.apply(
        StepPlan(
            step=0, slots=none, num_computed=none, num_scheduled=none, samples=empty, new=[new]
        )
    )
    drafter = NgramDrafter(seats, shortest=2, longest=3)
    seat = np.array([1], np.int32)
    counts = drafter.propose(seat, np.array([limit], np.int32), 1)
    assert counts.tolist() == [len(drafts)]
    assert seats.drafts(seat, counts).tolist() == drafts
    assert seats.num_tokens[1] == len(tokens)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def lengths(row_cost: float, accepted: list[int], *, most: int = 12, num_rows: int = 1) -> int:
    """Drafts of a request after steps of 4 in which so many were accepted."""
    rule = DraftLengths(2, row_cost)
    for count in accepted:
        rule.observe(ints(0, 1), ints(4, 0), ints(count, 0))
    (limit,) = rule.limits(ints(0), ints(most), num_rows)
    return int(limit)


def test_the_more_were_accepted_the_more_are_proposed():
    found = [lengths(ROW_COST_FEW_BITS, [count] * 9) for count in range(5)]
    assert found == sorted(found)
    assert (found[0], found[-1]) == (0, 12)
    assert lengths(ROW_COST, [2] * 9) > found[2], "cheap rows allow for more"


def test_who_runs_beside_many_others_gets_drafts_only_if_they_are_likely():
    assert lengths(ROW_COST_FEW_BITS, [], num_rows=1) > 0
    assert lengths(ROW_COST_FEW_BITS, [], num_rows=64) == 0
    assert lengths(ROW_COST_FEW_BITS, [4] * 20, num_rows=64) > 0


def test_limits_hold_and_requests_are_apart():
    rule = DraftLengths(3, ROW_COST)
    rule.observe(ints(0, 2), ints(4, 4), ints(4, 0))
    assert rule.limits(ints(0, 1), ints(3, 0), 2).tolist() == [3, 0]
    fresh = rule.limits(ints(1), ints(12), 2)
    rule.seat(2)
    assert rule.limits(ints(2), ints(12), 2).tolist() == fresh.tolist()


def test_a_request_whose_drafts_failed_is_tried_again():
    rule = DraftLengths(1, ROW_COST_FEW_BITS)
    for _ in range(9):
        rule.observe(ints(0), ints(4), ints(0))
    found = [int(rule.limits(ints(0), ints(4), 1)[0]) for _ in range(40)]
    assert found[0] == 0
    assert found[-1] > 0
