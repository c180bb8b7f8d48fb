"""Loops over the rows of a step: its inputs, checked and flattened, and what comes of them.

Compiled where numba can be imported, since NumPy over columns takes sixty calls for one row;
elsewhere Python runs the same function.

They keep the interpreter's lock, which most of NumPy's look-ups by index let go. When a step begins
the core's main thread waits for it, and would have it until the last step is finished and the next
one is planned: 250 us in which no model runs.
"""

from collections.abc import Callable
from typing import Any

from twostroke.messages import Bools, Int32s, Int64s


def compiled_in(file: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates functions of `file`, which call none of other files."""

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        try:
            from twostroke.model import compiled
        except ImportError:
            return function
        cache = compiled.use_kernel_cache(file, compiled.__file__)
        return compiled.kernel(cache=cache, nogil=False)(function)

    return compiled


_compiled = compiled_in(__file__)


FAULTS = (
    "is no seat that is taken, or is named twice",
    "has a negative number of computed tokens",
    "leaves a gap of tokens",
    "schedules no token",
    "runs past its known tokens",
    "samples before its last token",
    "verifies drafts without sampling",
    "samples past the model's length",
    "runs past its blocks' slots",
    "has a negative number of drafts, or more than planned",
)
_SEAT, _NEGATIVE, _GAP, _NO_TOKEN, _UNKNOWN, _EARLY, _UNSAMPLED, _FULL, _BLOCKS, _DRAFTS = range(10)


@_compiled
def _fault_of(
    planned: int,
    scheduled: int,
    samples: bool,
    drafts: int,
    num_drafts: int,
    known: int,
    computed: int,
    rejected: int,
    room: int,
    max_model_len: int,
) -> tuple[int, int]:
    """What is wrong with a row, and the limit that it passes; -1 each: nothing."""
    begin, most = min(planned, computed), computed + rejected
    end = begin + scheduled - drafts
    fault, limit = -1, -1
    if planned < 0:
        fault = _NEGATIVE
    elif planned > most:
        fault, limit = _GAP, most
    elif drafts < 0 or num_drafts > drafts:
        fault, limit = _DRAFTS, drafts
    elif end <= begin:
        fault = _NO_TOKEN
    elif end > known:
        fault, limit = _UNKNOWN, known
    elif samples and end != known:
        fault, limit = _EARLY, known
    elif not samples and drafts > 0:
        fault, limit = _UNSAMPLED, known
    elif samples and end + drafts >= max_model_len:
        fault = _FULL
    elif end + drafts > room:
        fault, limit = _BLOCKS, room
    return fault, limit


@_compiled
def fill_rows(
    slots: Int32s,
    planned: Int32s,
    scheduled: Int32s,
    samples: Bools,
    planned_drafts: Int32s,
    num_drafts: Int32s,
    block_size: int,
    table: Int32s,
    num_tokens: Int32s,
    num_computed: Int32s,
    num_rejected: Int32s,
    num_blocks: Int32s,
    taken: Bools,
    named: Bools,
    token_ids: Int64s,
    positions: Int64s,
    query_start: Int32s,
    starts: Int32s,
) -> tuple[int, int, int, int]:
    """Check rows; if all are right fill in the last four columns and count them as computed.

    Columns to `num_drafts` are by row, from `table` (the tokens) on by seat. `named` is scratch,
    all False. Returns an index into FAULTS or -1, the row that has it, the limit that it passes or
    -1, and the longest row's end.
    """
    fault, wrong, limit = -1, 0, -1
    for row in range(len(slots)):
        slot = slots[row]
        if slot < 0 or slot >= len(taken) or not taken[slot] or named[slot]:
            fault, wrong = _SEAT, row
            break
        named[slot] = True
        fault, limit = _fault_of(
            *(planned[row], scheduled[row], samples[row], planned_drafts[row], num_drafts[row]),
            *(num_tokens[slot], num_computed[slot], num_rejected[slot]),
            *(num_blocks[slot] * block_size, table.shape[1]),
        )
        if fault >= 0:
            wrong = row
            break
    for row in range(len(slots)):
        if 0 <= slots[row] < len(named):
            named[slots[row]] = False
    at = longest = 0
    for row in range(len(slots) if fault < 0 else 0):
        slot, begin = slots[row], min(planned[row], num_computed[slots[row]])
        end = begin + scheduled[row] - planned_drafts[row] + num_drafts[row]
        for position in range(begin, end):
            token_ids[at] = table[slot, position]
            positions[at] = position
            at += 1
        query_start[row + 1], starts[row] = at, begin
        num_computed[slot], num_rejected[slot] = end, planned_drafts[row]
        longest = max(longest, end)
    return fault, wrong, limit, longest


@_compiled
def look_up_blocks(block_ids: Int32s, slots: Int32s, block_tables: Int32s) -> None:
    """block_tables[i] gets the first of block_ids[slots[i]]."""
    for row in range(len(slots)):
        for i in range(block_tables.shape[1]):
            block_tables[row, i] = block_ids[slots[row], i]


@_compiled
def sampled_rows(
    seats: Int32s,
    widths: Int32s,
    table: Int32s,
    num_tokens: Int32s,
    row_seats: Int32s,
    positions: Int32s,
    drafts: Int32s,
) -> None:
    """For each of the `widths[i]` rows of `seats[i]`: its seat, the position that it samples, and
    the draft that stands there, -1 for the last."""
    at = 0
    for i in range(len(seats)):
        for j in range(widths[i]):
            position = num_tokens[seats[i]] + j
            row_seats[at], positions[at] = seats[i], position
            drafts[at] = table[seats[i], position] if j < widths[i] - 1 else -1
            at += 1


@_compiled
def accept_rows(seats: Int32s, accepted: Bools, kept: Bools) -> None:
    """kept: rows all of whose seat's rows before them had their draft `accepted`."""
    for row in range(len(seats)):
        follows = row > 0 and seats[row] == seats[row - 1]
        kept[row] = not follows or (kept[row - 1] and accepted[row - 1])


@_compiled
def append_rows(
    seats: Int32s,
    widths: Int32s,
    token_ids: Int32s,
    sound: Bools,
    kept: Bools,
    table: Int32s,
    num_tokens: Int32s,
    num_computed: Int32s,
    num_rejected: Int32s,
    counts: Int32s,
    appended: Int32s,
) -> int:
    """Append to `seats[i]` those of its `widths[i]` tokens that are kept; returns how many in all.

    `counts` and `appended` tell them, but for seats that have a token which is not sound: theirs is
    a count of 0.
    """
    at = total = 0
    for i in range(len(seats)):
        slot, known, count, fine = seats[i], num_tokens[seats[i]], 0, True
        for row in range(at, at + widths[i]):
            if kept[row]:
                table[slot, known + count] = token_ids[row]
                fine = fine and sound[row]
                count += 1
        at += widths[i]
        num_tokens[slot], num_computed[slot] = known + count, known + count - 1
        num_rejected[slot] -= count - 1
        counts[i] = count if fine else 0
        for j in range(counts[i]):
            appended[total] = table[slot, known + j]
            total += 1
    return total
