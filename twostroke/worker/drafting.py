"""Draft tokens: guesses at a request's next tokens, for the model to verify all at once.

    async   plan N+1 says "K drafts, fill them in" ▶ propose ▶ step N+1 verifies them
    sync    step N ends ▶ propose ▶ the core hands them out again in plan N+1

A drafter may propose fewer than it is asked for, or none. Whatever it proposes, tokens come out as
if there were no drafts (see `sampler`): it decides on speed alone.
"""

from typing import Protocol

import numpy as np

from twostroke.messages import Float64s, Int32s, StepPlan
from twostroke.model.few_rows_quantised import MAX_QUANTISED_ROWS
from twostroke.worker.draft_rows import BEFORE, draft_rows, weigh_rows
from twostroke.worker.inputs import SeatTable, StepInputs

# Times of steps of 1, 2, ... rows in that of one, with all that the host does in them: SmolLM2 with
# two threads, in bfloat16 and in few bits, which take more arithmetic. For more rows than
# MAX_QUANTISED_ROWS such a model's weights are read in bfloat16. These are constants: a rule that
# followed the clock would cut a request in other ways when it comes again, and so change a token of
# a near tie. They need not be exact, for how many guesses are best changes slowly with them.
WHOLE_COSTS = 1.0, 1.04, 1.05, 1.06, 1.10, 1.15, 1.20, 1.24
FEW_BITS_COSTS = 1.0, 1.07, 1.22, 1.38, 1.57, 1.77, 1.98, 2.20
WHOLE_ROW_COST = 0.08  # what each row beyond adds
WHOLE_IN_FEW_BITS = 2.5  # a row in bfloat16, in the time of one in few bits


def step_costs(most: int, *, few_bits: bool) -> Float64s:
    """[r]: what a step of r rows takes, 1 to `most`, in the time of one row."""
    rows = np.arange(most + 1, dtype=np.float64)
    costs: Float64s = WHOLE_COSTS[-1] + WHOLE_ROW_COST * (rows - len(WHOLE_COSTS))
    costs[1 : len(WHOLE_COSTS) + 1] = WHOLE_COSTS[:most]
    if few_bits:
        costs *= WHOLE_IN_FEW_BITS
        costs[1 : MAX_QUANTISED_ROWS + 1] = FEW_BITS_COSTS[:most]
    return costs


class Drafter(Protocol):
    """Writes drafts behind the known tokens of seats."""

    def propose(self, seats: Int32s, limits: Int32s, num_rows: int) -> Int32s:
        """Put at most `limits[i]` drafts behind the last token of `seats[i]`; returns how many.

        The step that is to verify them has `num_rows` requests.
        """
        ...

    def observe(self, seats: Int32s, widths: Int32s, counts: Int32s) -> None:
        """Of `widths[i]` tokens that were sampled for `seats[i]`, `counts[i]` are its next ones.

        The last is no draft, so `counts[i] - 1` of `widths[i] - 1` drafts were accepted.
        """
        ...

    def follow(self, plan: StepPlan, inputs: StepInputs) -> None:
        """The model has run these rows; their sampled tokens are not known yet."""
        ...


class NgramDrafter:
    """Prompt look-up: what followed when the request's last tokens occurred before.

    The places where at least `shortest` of them recur, down to a single one, vote: by how many
    recur, up to `longest`, and by what lies beyond one token that differs. vLLM takes the first
    place of the longest match; but a word that stands alone in one place and in another at the end
    of a match is likelier to go on as in the latter, and an answer that changes a word of a text
    goes on with that text. How many guesses are made follows from their chances, how the request's
    guesses fared and what rows cost (`draft_rows`). `costs[r]` is the time of a step of r rows, up
    to all that there can be.
    """

    def __init__(
        self, seats: SeatTable, *, shortest: int, longest: int, most: int, costs: Float64s
    ) -> None:
        self._seats = seats
        self._shortest, self._longest, self._costs = shortest, longest, costs
        max_num_seqs = len(seats.num_tokens)
        self._chances = np.zeros((max_num_seqs, most))
        self._refusals = np.full((max_num_seqs, 2), BEFORE)  # seen and expected
        seat, one = np.zeros(1, np.int32), np.ones(1, np.int32)
        self.propose(seat, seat, 1)  # compiles it, or loads it from the cache: not in a step
        self.observe(seat, one, one)

    def propose(self, seats: Int32s, limits: Int32s, num_rows: int) -> Int32s:
        counts = np.empty(len(seats), np.int32)
        draft_rows(
            *(seats, limits, num_rows, self._costs, self._seats.token_ids, self._seats.num_tokens),
            *(self._shortest, self._longest, self._refusals, self._chances, counts),
        )
        return counts

    def observe(self, seats: Int32s, widths: Int32s, counts: Int32s) -> None:
        weigh_rows(seats, widths, counts, self._chances, self._refusals)

    def follow(self, plan: StepPlan, inputs: StepInputs) -> None:
        for new in plan.new:
            self._refusals[new.slot] = BEFORE
