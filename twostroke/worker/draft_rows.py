"""Loops over the requests of a step that are drafted for by prompt look-up (see `drafting`)."""

import numpy as np

from twostroke.messages import Float64s, Int32s
from twostroke.worker.input_rows import compiled_in

# A place's weight is _WEIGHT * m^_RISE where the last m tokens recur: what followed there holds at
# odds of the weight to 1, and less likely where other places say otherwise. Beyond a token that
# differs, as in an answer that changes a word of what it repeats, up to _BEYOND more count _SHARE
# each; if that token is the last one, at least _LEAST must recur before it. With these numbers the
# time of all steps was least, over answers to prompts that ask to summarise, quote, correct, list
# or change a text or code; `benchmarks/speculative.py --matches` compares chances with what held.
_WEIGHT, _RISE, _SHARE, _BEYOND, _LEAST = 0.4, 1.35, 0.15, 6, 2
_MOST_PLACES = 64  # that are weighed: the strongest
# A request's own refusals, against those that were expected: what was seen counts this much with
# each step after it, and as many are taken as seen before.
FADING, BEFORE = 0.9, 3.0

_compiled = compiled_in(__file__)


@_compiled
def _recurring(tokens: Int32s, end: int, last: int, most: int) -> int:
    """How many tokens up to `end` are those up to `last`."""
    count = 0
    while count < min(most, end + 1) and tokens[end - count] == tokens[last - count]:
        count += 1
    return count


@_compiled
def _places(
    tokens: Int32s, last: int, shortest: int, longest: int, ends: Int32s, recurring: Float64s
) -> int:
    """Where the last tokens occurred before, the latest first, and how many of them; returns how
    many places there are: the strongest, if there is no room for all."""
    found = weakest = 0
    for end in range(last - 1, -1, -1):
        same = _recurring(tokens, end, last, longest)
        beyond = end - same - 1
        if beyond < 0 or (same == 0 and tokens[beyond] != tokens[last - 1]):
            before = 0
        else:
            before = _recurring(tokens, beyond, last - same - 1, _BEYOND)
        if same + before < shortest or (same == 0 and before < _LEAST):
            continue
        count = same + _SHARE * before
        if found < len(ends):
            at, found = found, found + 1
        else:
            at = weakest
            if count <= recurring[at]:
                continue
        ends[at], recurring[at] = end, count
        if found == len(ends):
            weakest = int(recurring.argmin())
    return found


@_compiled
def guess(
    tokens: Int32s,
    length: int,
    shortest: int,
    longest: int,
    most: int,
    elsewhere: float,
    chances: Float64s,
) -> int:
    """Put up to `most` guesses behind the first `length` tokens; returns how many.

    The places at which the last tokens occurred before vote for what followed them there, and those
    that were right vote for what follows that. At least `shortest` tokens recur; more than
    `longest` count for no more. `chances[j]` becomes the chance of guess j if those before it hold:
    its share of the votes, `elsewhere` being those for what no place says.
    """
    ends, recurring = np.empty(_MOST_PLACES, np.int32), np.empty(_MOST_PLACES)
    weights = np.empty(_MOST_PLACES)
    places = _places(tokens, length - 1, shortest, longest, ends, recurring)
    if places == 0:
        return 0
    for made in range(most):
        total, votes, guessed = elsewhere, 0.0, 0
        for i in range(places):
            weights[i] = _WEIGHT * min(recurring[i] + made, longest) ** _RISE
            total += weights[i]
        for i in range(places):
            token, theirs = tokens[ends[i] + 1 + made], 0.0
            for j in range(i, places):
                if tokens[ends[j] + 1 + made] == token:
                    theirs += weights[j]
            if theirs > votes:
                votes, guessed = theirs, token
        tokens[length + made], chances[made] = guessed, votes / total
        right = 0
        for i in range(places):
            if tokens[ends[i] + 1 + made] == guessed:
                ends[right], recurring[right] = ends[i], recurring[i]
                right += 1
        places = right
    return most


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
                *(table[seat], num_tokens[seat], shortest, longest, limits[i]),
                *(refusals[seat, 0] / refusals[seat, 1], chances[seat]),
            )
            num_found += found[i]
            reach[i] = chances[seat, 0]
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
            reach[likeliest] *= chances[seats[likeliest], counts[likeliest]]
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
