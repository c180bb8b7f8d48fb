"""Draft tokens: guesses at a request's next tokens, for the model to verify all at once.

    async   plan N+1 says "K drafts, fill them in" ▶ propose ▶ step N+1 verifies them
    sync    step N ends ▶ propose ▶ the core hands them out again in plan N+1

A drafter may propose fewer than it is asked for, or none. Whatever it proposes, tokens come out as
if there were no drafts (see `sampler`): it decides on speed alone.
"""

from typing import Protocol

import numpy as np

from twostroke.messages import Int32s, StepPlan
from twostroke.worker.inputs import SeatTable, StepInputs

# What one more row of a lone request adds to the time of a step of one row, which is 1: SmolLM2 in
# bfloat16, and in few bits, which take more arithmetic (`twostroke bench step --rows 1 --rows 5`).
ROW_COST, ROW_COST_FEW_BITS = 0.05, 0.2


class Drafter(Protocol):
    """Writes drafts behind the known tokens of seats."""

    def propose(self, seats: Int32s, limits: Int32s, num_rows: int) -> Int32s:
        """Put at most `limits[i]` drafts behind the last token of `seats[i]`; returns how many.

        The step that is to verify them has `num_rows` requests.
        """
        ...

    def observe(self, seats: Int32s, drafted: Int32s, accepted: Int32s) -> None:
        """So many of the drafts that `seats` had in a step were accepted."""
        ...

    def follow(self, plan: StepPlan, inputs: StepInputs) -> None:
        """The model has run these rows; their sampled tokens are not known yet."""
        ...


class DraftLengths:
    """How many drafts a request should have, by how its last ones fared and what a row costs.

    Of g drafts of which each is accepted with chance p, if those before it were, a step makes
    1 + p + ... + p**g tokens. It takes 1 + row_cost * (rows + g - 1) times as long as one of a lone
    row. The g with the most tokens in that time is chosen, other requests' tokens included; for p
    see `observe`. It must not follow the clock: how a step is cut could then change a token of a
    near tie, between two runs of the same request.
    """

    FADING = 0.7  # of what was seen in a step, with each step after it
    BEFORE = 3.0, 2.0  # accepted and refused before anything was seen
    RECOVERY = 0.05  # of the way back to that, for a step that goes without: to try again

    def __init__(self, max_num_seqs: int, row_cost: float) -> None:
        self._row_cost = row_cost
        self._seen = np.empty((max_num_seqs, 2))
        self._seen[:] = self.BEFORE

    def seat(self, seat: int) -> None:
        """A request begins."""
        self._seen[seat] = self.BEFORE

    def limits(self, seats: Int32s, most: Int32s, num_rows: int) -> Int32s:
        """How many drafts `seats` should have in a step of `num_rows` rows, at most `most` each."""
        accepted, refused = self._seen[seats].T
        chance = accepted / (accepted + refused)
        drafts = np.arange(int(most.max(initial=0)) + 1)
        tokens = np.cumsum(chance[:, None] ** drafts, axis=1) + (num_rows - 1)
        rates = tokens / (1 + self._row_cost * (num_rows - 1 + drafts))
        rates[drafts > most[:, None]] = 0.0
        best: Int32s = rates.argmax(1).astype(np.int32)
        without = seats[best == 0]
        self._seen[without] += self.RECOVERY * (self.BEFORE - self._seen[without])
        return best

    def observe(self, seats: Int32s, drafted: Int32s, accepted: Int32s) -> None:
        """Of `drafted` tokens each of `seats` had so many `accepted`; the next one was refused."""
        tried = drafted > 0
        seats, drafted, accepted = seats[tried], drafted[tried], accepted[tried]
        self._seen[seats] *= self.FADING
        self._seen[seats, 0] += accepted
        self._seen[seats, 1] += accepted < drafted


class NgramDrafter:
    """Prompt look-up: what followed when the request's last tokens occurred before.

    Of the last `longest` tokens down to the last `shortest`, the most that occur earlier in the
    request decide; of several occurrences the first does, which has the longest continuation. Both
    are vLLM's rule.
    """

    def __init__(
        self, seats: SeatTable, *, shortest: int, longest: int, row_cost: float = ROW_COST
    ) -> None:
        self._seats = seats
        self._shortest, self._longest = shortest, longest
        self._lengths = DraftLengths(len(seats.num_tokens), row_cost)

    def propose(self, seats: Int32s, limits: Int32s, num_rows: int) -> Int32s:
        limits = self._lengths.limits(seats, limits, num_rows)
        counts = np.zeros(len(seats), np.int32)
        table, lengths = self._seats.token_ids, self._seats.num_tokens[seats].tolist()
        for i, (seat, length, limit) in enumerate(
            zip(seats.tolist(), lengths, limits.tolist(), strict=True)
        ):
            tokens = table[seat, :length]
            start = continuation(tokens, self._shortest, self._longest) if limit > 0 else 0
            if start > 0:
                found = tokens[start : start + limit]
                table[seat, length : length + len(found)] = found
                counts[i] = len(found)
        return counts

    def observe(self, seats: Int32s, drafted: Int32s, accepted: Int32s) -> None:
        self._lengths.observe(seats, drafted, accepted)

    def follow(self, plan: StepPlan, inputs: StepInputs) -> None:
        for new in plan.new:
            self._lengths.seat(new.slot)


def continuation(tokens: Int32s, shortest: int, longest: int) -> int:
    """Index of what followed an earlier occurrence of the last tokens; 0 when there is none.

    One pass of comparisons for each length, over all places at once: 20 us for 4,096 tokens.
    """
    last = len(tokens) - 1
    # matches[i]: the tokens that end at i + (length - 1) are the last `length` ones.
    matches = tokens[:last] == tokens[last]
    found = 0
    for length in range(1, min(longest, last) + 1):
        if length > 1:
            matches = matches[1:]
            matches &= tokens[: last - length + 1] == tokens[last - length + 1]
        first = int(matches.argmax())
        if not matches[first]:
            break
        if length >= shortest:
            found = first + length
    return found
