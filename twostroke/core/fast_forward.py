"""Many plain decode steps in one go, with the result of the single steps.

Where no request waits and every running one only appends a token each step, k turns of the loop of
an engine (begin a step, finish the oldest) change nothing but counters, block tables and prefix
keys, all predictable, up to the turn in which requests reach their length. On a wall clock the
turns have to be taken; on a virtual one they need not.

    in flight         [ step n - 1 ]                  (with asynchronous scheduling; else nothing)
    after k turns     [ step n - 1 + k ]              begun n ... n - 1 + k, finished the k oldest

Blocks are taken in the order of the single steps, and within a step in row order, so block ids, the
free list and the prefix cache come out the same.
"""

from typing import NamedTuple

import msgspec
import numpy as np

from twostroke.arrays import ONE, ZERO, are_same, has_all, has_any, least, ones, places, total
from twostroke.core.request import Request
from twostroke.core.state import EngineState
from twostroke.core.step import Step
from twostroke.messages import Bools, EngineStats, FinishReason, Int32s, Int64s

_FEW = 32  # rows that Python counts faster than NumPy


def skippable_turns(state: EngineState) -> int:
    """How many turns are plain decodes from here, if nothing comes from outside; 0 if none is.

    A turn in which blocks run short is none. One in which requests end by their length is the last,
    because others may take their place; it is none where their end does not show in advance.
    """
    config, rows = state.config, state.num_running
    if (
        not rows
        or rows > state.token_budget
        or len(state.in_flight) != config.async_scheduling
        or config.num_spec_tokens
        or config.sliding_window is not None
    ):
        return 0
    if _may_admit(state) or (state.in_flight and not _is_plain(state, state.in_flight[0])):
        return 0
    seats, slots, num_due = state.seats, state.running, len(state.in_flight)
    known, placeholders = seats.known[slots], seats.placeholders[slots]
    if (
        has_any(placeholders != (ONE if num_due else ZERO))
        or not are_same(seats.computed[slots] + ONE, known + placeholders)
        or has_any(seats.special[slots])
    ):
        return 0
    left = seats.stop_at[slots] - known
    turns = least(left)
    if turns > 0 and not _ends_are_plain(state, slots[left == turns]):
        turns -= 1
    return _turns_with_blocks(state, turns) if turns > 0 else 0


def _ends_are_plain(state: EngineState, ending: Int64s) -> bool:
    """Whether the requests in these seats certainly end by length, and give all back at once."""
    seats = state.seats
    if state.connector is not None:
        return False
    # A length limit of the engine's does not keep the scheduler from beginning one more step.
    if state.in_flight and not are_same(seats.end[ending], seats.stop_at[ending]):
        return False
    for slot in ending.tolist():
        request = state.request_at(slot)
        if request.min_tokens > request.max_tokens:
            return False
    return True


def _may_admit(state: EngineState) -> bool:
    """Whether the next turn looks at anybody who waits, or has more to say than rows."""
    if state.handoff is not None:
        if state.handoff.has_commands or state.queues.num_held_back:
            return True
        if state.loaded and state.num_running < state.config.max_num_seqs:
            return True
    has_seat = state.num_seats_taken < state.config.max_num_seqs
    return has_seat and state.queues.head() is not None


def _is_plain(state: EngineState, step: Step) -> bool:
    """Whether the step samples a token of each running request, in order."""
    return (
        has_all(step.samples)
        and are_same(step.slots, state.running)
        and are_same(step.uids, state.seats.uid[step.slots])
    )


def ends_in(state: EngineState, turns: int) -> bool:
    """Whether requests end in the last of these turns, which are at most `skippable_turns`."""
    seats, slots = state.seats, state.running
    return least(seats.stop_at[slots] - seats.known[slots]) == turns


def first_due(state: EngineState) -> Int64s:
    """Seats of requests that get their first token in the next turn."""
    seats, slots = state.seats, state.running
    due: Int64s = slots[seats.known[slots] == seats.num_prompt[slots]]
    return due


def prompts_due(state: EngineState) -> int:
    """Prompt tokens of the requests of `first_due`."""
    prompts = state.seats.num_prompt[state.running]
    due = state.seats.known[state.running] == prompts
    return total(prompts[due]) if has_any(due) else 0


def _growth(state: EngineState, turns: int | Int32s) -> Int32s:
    """[rows] Blocks that each running request takes when so many of its steps are begun."""
    seats, slots, size = state.seats, state.running, state.config.block_size
    grown: Int32s = seats.computed[slots] - seats.room[slots]
    grown += turns
    grown += size - 1
    grown //= size
    return np.maximum(grown, ZERO, out=grown)


def blocks_taken(state: EngineState, turns: int) -> int:
    """Blocks that all running requests take within so many turns."""
    seats, slots, size = state.seats, state.running, state.config.block_size
    if len(slots) > _FEW:
        return total(_growth(state, turns))
    missing = (seats.computed[slots] - seats.room[slots]).tolist()
    return sum(-(-(it + turns) // size) for it in missing if it + turns > 0)


def _turns_with_blocks(state: EngineState, turns: int) -> int:
    """As many of these turns as there are free blocks for."""
    free, size = state.kv.num_free, state.config.block_size
    if state.num_running * (turns // size + 1) <= free or blocks_taken(state, turns) <= free:
        return turns
    low, high = 0, turns  # enough for `low`, not for `high`
    while high - low > 1:
        middle = (low + high) // 2
        if blocks_taken(state, middle) <= free:
            low = middle
        else:
            high = middle
    return low


class Skipped(NamedTuple):
    """What came of turns that were skipped."""

    freed_slots: list[int]  # which the first turn vacates
    num_begun: int  # rows of all steps that were begun
    ended: list[Request]  # in the last turn, by length
    prompt_tokens: int  # of requests that got their first token


def skip(state: EngineState, turns: int, token_ids: Int32s) -> Skipped:
    """Take `turns` turns, at most `skippable_turns`; row i samples token_ids[i] in each of them.

    No such token may be a stop id of its request.
    """
    seats, slots = state.seats, state.running
    known = seats.known[slots]
    left = seats.stop_at[slots] - known
    ends = left == turns if least(left) == turns else None
    prompt_tokens = prompts_due(state)
    # A step behind the one that certainly ends a request has no row of it.
    late = ends if state.in_flight else None
    begun = turns if late is None else turns - late.astype(np.int32)
    # Tokens first: the keys of the blocks that get full are made of them.
    for slot, end, token in zip(slots.tolist(), known.tolist(), token_ids.tolist(), strict=True):
        seats.tokens[slot, end : end + turns] = token
    _take_blocks(state, begun)
    _register_blocks(state, turns, late)
    seats.known[slots] = known + turns
    computed = seats.computed[slots] + begun
    seats.computed[slots] = computed
    if state.in_flight:
        step = state.in_flight[0]
        step.number += turns
        step.num_computed = computed - ONE
        step.num_scheduled = ones(len(slots))
        if ends is not None:
            _drop_rows(step, ends)
    freed = state.flush_freed_slots()
    num_begun, ended = turns * len(slots), []
    if ends is not None:
        ended = [state.request_at(slot) for slot in slots[ends].tolist()]
        num_begun -= len(ended) if late is not None else 0
        for request in ended:
            state.finish(request, FinishReason.LENGTH)
        state.compact()
    return Skipped(freed, num_begun, ended, prompt_tokens)


def _drop_rows(step: Step, dropped: Bools) -> None:
    kept = ~dropped
    step.slots, step.uids, step.handles = step.slots[kept], step.uids[kept], step.handles[kept]
    step.num_computed, step.num_scheduled = step.num_computed[kept], step.num_scheduled[kept]
    step.samples, step.num_drafts = step.samples[kept], step.num_drafts[kept]


def is_drained(state: EngineState) -> bool:
    """Whether no request is left, no step in flight has rows, and nothing moves KV."""
    return (
        not state.requests
        and state.connector is None
        and not any(len(step.slots) for step in state.in_flight)
    )


def drain(state: EngineState) -> int:
    """Take the turns that are left of a drained engine; returns how many begin a step."""
    state.in_flight.clear()
    begun = int(state.has_work)
    state.flush_freed_slots()
    return begun


def _due_turns(first: Int32s, counts: Int32s, size: int) -> Int64s:
    """Turns of events, row by row: row i has counts[i], one every `size` turns from first[i] on.

    `argsort(kind="stable")` puts them in the order of single turns, in which rows are in order.
    """
    ends = counts.cumsum()
    due: Int64s = (first - size * (ends - counts)).repeat(counts)
    due += size * places(len(due))
    return due


def _take_blocks(state: EngineState, turns: int | Int32s) -> None:
    seats, slots, size = state.seats, state.running, state.config.block_size
    counts = _growth(state, turns)
    grown = counts.nonzero()[0]
    if not len(grown):
        return
    lacking, counts = slots[grown], counts[grown]
    room = seats.room[lacking]
    tables = state.tables_at(lacking)
    order = None
    if len(tables) > 1:
        first = room - seats.computed[lacking] + ONE
        order = _due_turns(first, counts, size).argsort(kind="stable")
    state.kv.take_for(tables, counts.tolist(), order)
    seats.room[lacking] = room + counts * size


def _register_blocks(state: EngineState, turns: int, late: Bools | None) -> None:
    """Enter the blocks that get full into the prefix cache, in order of turns, then rows.

    What a `late` row fills last is entered behind the others: when its last token is known.
    """
    if not state.kv.caching:
        return
    seats, slots, size = state.seats, state.running, state.config.block_size
    # In the last turn's begin, as the scheduler sees it.
    full, register_at = seats.known[slots] + (turns - 1), seats.register_at[slots]
    due = (full >= register_at).nonzero()[0]
    if not len(due):
        return
    slots, full, register_at = slots[due], full[due], register_at[due]
    counts = (full - register_at) // size + ONE
    seats.hash_blocks(slots, full)
    tables = state.tables_at(slots)

    def in_order() -> Int64s:
        first = np.maximum(register_at - full + turns, 1)
        at = _due_turns(first, counts, size)
        if late is not None:
            at[late[due].repeat(counts) & (at == turns)] += 1
        order: Int64s = at.argsort(kind="stable")
        return order

    state.kv.register_in_turns(tables, counts.tolist(), in_order)
    seats.register_at[slots] = register_at + counts * size


class Outlook:
    """An engine's stats in turns to come in which nothing ends; until they are taken."""

    def __init__(self, stats: EngineStats, prompt_tokens: int, state: EngineState) -> None:
        self._stats = stats
        self._prompt_tokens = prompt_tokens  # of requests that get their first token
        self._state = state

    def after(self, turns: int) -> EngineStats:
        """What the engine will say of itself when so many are over, and nothing was added."""
        stats, tokens = msgspec.structs.replace(self._stats), turns * self._state.num_running
        stats.kv_usage = self._state.kv.usage_with(blocks_taken(self._state, turns))
        stats.num_steps += turns
        stats.step_tokens += tokens
        stats.generation_tokens += tokens
        stats.prompt_tokens += self._prompt_tokens if turns else 0
        return stats
