"""Loops over the requests of a step that are drafted for by prompt look-up (see `drafting`)."""

import numpy as np

from twostroke.messages import Float64s, Int32s
from twostroke.worker.input_rows import compiled_in

# How often a guess is refused where the last m tokens recur, over answers to prompts that ask to
# summarise, quote, correct, list or change a text or code: 0.55 / m^0.9, which
# `benchmarks/speculative.py --matches` compares with what it finds. Where the places differ in what
# followed, half of the guesses do not hold that else would.
_REFUSED, _FALL, _DIFFERING = 0.55, 0.9, 0.5
# A request's own refusals, against those that were expected: what was seen counts this much with
# each step after it, and as many are taken as seen before.
FADING, BEFORE = 0.9, 3.0

_compiled = compiled_in(__file__)


@_compiled
def guess(
    tokens: Int32s, length: int, shortest: int, longest: int, most: int, chances: Float64s
) -> int:
    """Put up to `most` guesses behind the first `length` tokens; returns how many.

    What followed the latest of the places at which the most of the last tokens occurred before, at
    least `shortest` of them; more than `longest` count for no more. `chances[j]` becomes the chance
    of guess j if those before it hold: the match is longer by them.
    """
    last = length - 1
    best = start = 0
    agreed = most
    for end in range(last - 1, -1, -1):
        matched = 0
        while matched < min(longest, end + 1) and tokens[end - matched] == tokens[last - matched]:
            matched += 1
        if matched > best:
            best, start, agreed = matched, end + 1, most
        elif matched == best and best > 0:
            same = 0
            most_same = min(agreed, length - start)
            while same < most_same and tokens[end + 1 + same] == tokens[start + same]:
                same += 1
            if same < most_same:
                agreed = same
    if best < shortest:
        return 0
    for j in range(most):
        tokens[length + j] = tokens[start + j]  # beyond the last token: what was guessed just now
        chances[j] = 1 - _REFUSED / min(best + j, longest) ** _FALL
        if j == agreed:
            chances[j] *= _DIFFERING
    return most


@_compiled
def _held(chance: float, refusals: Float64s) -> float:
    """A guess's chance, by how the request's were refused against what was expected."""
    held: float = 1 - (1 - chance) * refusals[0] / refusals[1]
    return max(0.0, held)


@_compiled
def draft_rows(
    seats: Int32s,
    limits: Int32s,
    num_rows: int,
    costs: Float64s,
    table: Int32s,
    num_tokens: Int32s,
    shortest: int,
    longest: int,
    refusals: Float64s,
    chances: Float64s,
    counts: Int32s,
) -> None:
    """Guess at most `limits[i]` tokens of `seats[i]`, of which `counts[i]` are worth their rows.

    The likeliest guesses of all are, as many as make the most tokens in the time of the step:
    `costs[r]` with r rows, of which `num_rows` hold no guess. Columns from `table` to `chances` are
    by seat.
    """
    found, reach, num_found = np.zeros(len(seats), np.int32), np.ones(len(seats)), 0
    for i in range(len(seats)):
        counts[i] = 0
        if limits[i] > 0:
            seat = seats[i]
            found[i] = guess(
                table[seat], num_tokens[seat], shortest, longest, limits[i], chances[seat]
            )
            num_found += found[i]
            reach[i] = _held(chances[seat, 0], refusals[seat])
    order, num_taken = np.empty(num_found, np.int32), 0
    tokens = float(num_rows)
    best = tokens / costs[num_rows]
    for taken in range(num_found):
        likeliest = -1
        for i in range(len(seats)):
            if counts[i] < found[i] and (likeliest < 0 or reach[i] > reach[likeliest]):
                likeliest = i
        order[taken] = likeliest
        tokens += reach[likeliest]
        counts[likeliest] += 1
        if counts[likeliest] < found[likeliest]:
            seat = seats[likeliest]
            reach[likeliest] *= _held(chances[seat, counts[likeliest]], refusals[seat])
        rate = tokens / costs[num_rows + taken + 1]
        if rate > best:
            best, num_taken = rate, taken + 1
    for likeliest in order[num_taken:]:
        counts[likeliest] -= 1


@_compiled
def weigh_rows(
    seats: Int32s, widths: Int32s, counts: Int32s, chances: Float64s, refusals: Float64s
) -> None:
    """Of `widths[i]` sampled tokens `counts[i]` were kept: all guesses but the last one held."""
    for i in range(len(seats)):
        seat, drafted, accepted = seats[i], widths[i] - 1, max(counts[i] - 1, 0)
        for column in range(2):
            refusals[seat, column] = FADING * refusals[seat, column] + (1 - FADING) * BEFORE
        if accepted < drafted:
            refusals[seat, 0] += 1
        for j in range(min(accepted + 1, drafted)):
            refusals[seat, 1] += 1 - chances[seat, j]
