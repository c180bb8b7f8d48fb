"""Prompt look-up against a plain search."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostroke.messages import NewRequest, SamplingParams, StepPlan
from twostroke.worker.drafting import NgramDrafter, continuation
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
    counts = drafter.propose(seat, np.array([limit], np.int32))
    assert counts.tolist() == [len(drafts)]
    assert seats.drafts(seat, counts).tolist() == drafts
    assert seats.num_tokens[1] == len(tokens)
