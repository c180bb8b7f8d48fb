"""Prompt look-up against a plain search, and how many guesses are made of it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostroke.messages import NewRequest, SamplingParams, StepPlan
from twostroke.model.few_rows_quantised import MAX_QUANTISED_ROWS
from twostroke.worker.draft_rows import guess
from twostroke.worker.drafting import NgramDrafter, step_costs
from twostroke.worker.inputs import SeatTable

NONE = np.empty(0, np.int32)
FREE = np.ones(200)  # rows that cost nothing


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def recurring(tokens: list[int], end: int, last: int) -> int:
    """How many tokens up to `end` are those up to `last`."""
    count = 0
    while count <= end and tokens[end - count] == tokens[last - count]:
        count += 1
    return count


def places(tokens: list[int], shortest: int, longest: int) -> dict[int, tuple[int, int]]:
    """By end: how many of the last tokens recur, and how many more beyond one that differs."""
    found, last = {}, len(tokens) - 1
    for end in range(last):
        same = min(recurring(tokens, end, last), longest)
        before = min(recurring(tokens, end - same - 1, last - same - 1), 6) if same <= end else 0
        if same + before >= shortest and (same or before >= 2):
            found[end] = same, before
    return found


@given(
    tokens=st.lists(st.integers(0, 2), min_size=1, max_size=30),
    shortest=st.integers(1, 4),
    more=st.integers(0, 4),
    most=st.integers(1, 6),
)
def test_places_vote_for_what_followed_there(tokens, shortest, more, most):
    table, chances = np.array(tokens + [-1] * most, np.int32), np.zeros(most)
    longest = shortest + more
    found = guess(table, len(tokens), shortest, longest, most, 1.0, chances)
    where = places(tokens, shortest, longest)
    assert found == (most if where else 0)
    guessed = table[len(tokens) :].tolist()
    for made in range(found):
        text, votes = tokens + guessed[:made], {}
        for end, (same, before) in where.items():
            weight = 0.4 * min(same + 0.15 * before + made, longest) ** 1.35
            token = text[end + 1 + made]  # past the end: the guesses themselves
            votes[token] = votes.get(token, 0.0) + weight
        assert votes[guessed[made]] == pytest.approx(max(votes.values()))
        assert chances[made] == pytest.approx(votes[guessed[made]] / (sum(votes.values()) + 1))
        where = {end: it for end, it in where.items() if text[end + 1 + made] == guessed[made]}


def chances_of(tokens: list[int], most: int = 2, longest: int = 8, elsewhere: float = 1.0):
    table, chances = np.array(tokens + [-1] * most, np.int32), np.zeros(most)
    assert guess(table, len(tokens), 1, longest, most, elsewhere, chances) == most
    return chances.tolist()


def test_a_guess_is_the_likelier_the_more_tokens_recur():
    one, two = chances_of([1, 2, 3, 4, 1]), chances_of([1, 2, 3, 4, 1, 2])
    assert one[0] < two[0]
    assert one[1] == two[0], "if the first holds, one token more recurs"
    assert chances_of([1, 2, 3, 4, 1, 2], longest=1) == [one[0]] * 2


def test_a_guess_is_less_likely_where_places_differ():
    agree = chances_of([8, 1, 2, 3, 9, 1, 2, 3, 7, 1])
    differ = chances_of([8, 1, 2, 4, 9, 1, 2, 3, 7, 1])
    assert differ[1] < agree[1]


def test_a_guess_is_less_likely_where_the_requests_guesses_were_refused():
    assert chances_of(SHORT, elsewhere=2.0) < chances_of(SHORT) < chances_of(SHORT, elsewhere=0.5)


def test_a_text_goes_on_after_a_word_that_differs():
    text = [1, 2, 3, 4, 5, 6, 7, 8]
    table = np.array([*text, 1, 2, 3, 9, -1, -1], np.int32)
    assert guess(table, 12, 1, 8, 2, 1.0, np.zeros(2)) == 2
    assert table[12:].tolist() == [5, 6]
    # Where the last token recurs too, what precedes the word that differs tells places apart.
    table = np.array([*text, 9, 0, 5, 0, 0, 1, 2, 3, 9, 5, -1], np.int32)
    assert guess(table, 18, 1, 8, 1, 1.0, np.zeros(1)) == 1
    assert table[18] == 6


def test_of_many_places_the_strongest_vote():
    many = [token for other in range(10, 110) for token in (1, other)]  # more than are weighed
    table = np.array([2, 3, 4, 5, 1, 6, *many, 2, 3, 4, 5, 1, -1], np.int32)
    assert guess(table, len(table) - 1, 1, 8, 1, 1.0, np.zeros(1)) == 1
    assert table[-1] == 6


class Seated:
    """A drafter, and requests at seats 0, 1, ..."""

    def __init__(self, *texts: list[int], costs: np.ndarray = FREE, most: int = 8) -> None:
        self.seats = SeatTable(max_num_seqs=4, max_model_len=64, block_size=4, num_blocks=9)
        self.drafter = NgramDrafter(self.seats, shortest=1, longest=8, most=most, costs=costs)
        self.most = most
        for slot, text in enumerate(texts):
            self.seat(slot, text)

    def seat(self, slot: int, text: list[int]) -> None:
        new = NewRequest(
            slot=slot,
            request_id="r",
            token_ids=np.array(text, np.int32),
            num_prompt_tokens=len(text),
            params=SamplingParams(),
            stop_token_ids=(),
            block_ids=np.array([1, 2], np.int32),
        )
        plan = StepPlan(
            step=0,
            slots=NONE,
            num_computed=NONE,
            num_scheduled=NONE,
            samples=np.empty(0, np.bool_),
            new=[new],
        )
        self.seats.apply(plan)
        self.drafter.follow(plan, None)

    def counts(self, *seats: int, limit: int = 8, num_rows: int = 0) -> list[int]:
        limits = np.full(len(seats), limit, np.int32)
        return self.drafter.propose(ints(*seats), limits, num_rows or len(seats)).tolist()

    def refuse(self, seat: int, times: int = 9) -> None:
        for _ in range(times):
            self.counts(seat)
            self.drafter.observe(ints(seat), ints(self.most + 1), ints(1))


SHORT, LONG = [1, 2, 3, 4, 5, 6, 1], [1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("tokens", "limit", "drafts"),
    [
        ([1, 2, 3, 4, 9, 1, 2], 3, [3, 4, 9]),
        ([1, 2, 3, 4, 9, 1, 2], 1, [3]),
        ([1, 2, 3, 4, 9, 1, 2], 0, []),
        ([1, 2, 3, 1, 2, 4, 1, 2], 2, [4, 1]),
        ([5, 1, 2, 1, 2], 4, [1, 2, 1, 2]),
        ([1, 2, 3, 4], 4, []),
        ([7], 4, []),
    ],
)
def test_drafts_stand_behind_the_known_tokens(tokens, limit, drafts):
    them = Seated([0], tokens)
    assert them.counts(1, limit=limit) == [len(drafts)]
    assert them.seats.drafts(ints(1), ints(len(drafts))).tolist() == drafts
    assert them.seats.num_tokens[1] == len(tokens)


def test_rows_that_cost_more_get_fewer_guesses():
    found = [
        Seated(SHORT, costs=1 + cost * (np.arange(200) - 1)).counts(0)[0]
        for cost in (0.0, 0.05, 0.2, 0.5, 1.0)
    ]
    assert found == sorted(found, reverse=True)
    assert (found[0], found[-1]) == (8, 0)


def test_a_jump_of_the_cost_is_worth_it_for_a_long_match_only():
    rows = np.arange(200)
    costs = np.where(rows <= 3, 1.0, 1.7)
    assert Seated(SHORT, costs=costs).counts(0) == [2]
    assert Seated(LONG, costs=costs).counts(0) == [8]


def test_of_several_requests_the_likelier_guesses_are_made():
    costs = 1 + 0.3 * (np.arange(200) - 1)
    them = Seated(LONG, SHORT, [1, 2, 3], costs=costs)
    long, short, nothing = them.counts(0, 1, 2)
    assert long > short
    assert nothing == 0
    assert them.counts(1, 0)[0] == short
    # Beside others that do not guess, a row more adds less to the step's time, and so do tokens.
    assert them.counts(1, num_rows=60)[0] == 0


def test_guesses_that_fail_become_fewer_and_are_tried_again():
    costs = step_costs(200, few_bits=True)
    them = Seated(LONG, LONG, costs=costs)
    fresh = them.counts(0)
    assert fresh[0] > 0
    them.refuse(0)
    assert them.counts(0) < fresh
    assert them.counts(1) == fresh, "requests are apart"
    for _ in range(40):
        them.drafter.observe(ints(0), ints(1), ints(1))  # steps without guesses
    assert them.counts(0) == fresh
    them.refuse(1)
    them.seats.taken[1] = False
    them.seat(1, LONG)
    assert them.counts(1) == fresh, "a new request begins anew"


def test_guesses_that_hold_become_more():
    them = Seated(SHORT, costs=step_costs(200, few_bits=True))
    fresh = them.counts(0)
    for _ in range(20):
        them.counts(0)
        them.drafter.observe(ints(0), ints(5), ints(5))
    assert them.counts(0) > fresh


@pytest.mark.parametrize("few_bits", [False, True])
def test_a_step_of_more_rows_takes_longer(few_bits):
    costs = step_costs(40, few_bits=few_bits)
    assert len(costs) == 41
    assert costs[1] == 1
    assert (np.diff(costs[1:]) > 0).all()
    jump = np.diff(costs[1:]).argmax() + 2
    assert not few_bits or jump == MAX_QUANTISED_ROWS + 1
