"""The persistent batch: what a worker remembers of each seat between steps.

A plan is a diff (who left, who came, who got blocks) plus columns of rows; this table keeps every
seat's tokens and block table, applies the diff and turns the rows into the flat arrays that a
model runs on. All of it is NumPy over whole columns: nothing here costs Python time per token.

    seat's tokens   |<--- prompt --->|<------ outputs ------>|     .
                    0        num_computed      end = num_tokens    width = max_model_len
    a row runs               [num_computed, end)   and, when it samples, writes token `end`

A row with g drafts runs [num_computed, end + g) and writes 1 to g + 1 tokens from `end` on. With
two steps in flight the core plans the next row before it knows which drafts were accepted, and
counts all as computed. Its plan then starts too far right, by the drafts that were rejected, so
that rows start at our own count instead. It also plans for K drafts where there may be fewer: such
a row is shorter than planned. Below, K = 3, x is a token that was sampled, a to f are drafts:

    position          10  11  12  13  14  15  16  17
    step 5, planned  [ x   a   b   c ]                  a is accepted: it and a new x at 12 are kept
    step 6, planned                  [ .   .   .   . ]  made before the result of step 5
    step 6, run              [ x   d   e   f ]          2 drafts were rejected, so 2 to the left
    step 7, planned                          [ .   .    the core knows of step 5: 18 - 2 = 16

Shapes: S seats, R rows of the step, T tokens of the step.
"""

from dataclasses import dataclass

import numpy as np

from twostroke.messages import (
    NO_TOKENS,
    Bools,
    Int32s,
    Int64s,
    NewRequest,
    SamplingParams,
    StepPlan,
)
from twostroke.worker.input_rows import (
    FAULTS,
    accept_rows,
    append_rows,
    fill_rows,
    look_up_blocks,
    sampled_rows,
)


class PlanError(RuntimeError):
    """A plan that contradicts what the worker holds: a bug of ours, never of a request."""


@dataclass(frozen=True)
class StepInputs:
    """A step's rows, flattened in plan order."""

    token_ids: Int64s  # [T]
    positions: Int64s  # [T]
    query_start: Int32s  # [R + 1] row i is tokens query_start[i]:query_start[i + 1]
    num_computed: Int32s  # [R]
    block_tables: Int32s  # [R, widest row's blocks]


def spans(starts: Int32s | Int64s, counts: Int32s | Int64s) -> Int64s:
    """starts[0], starts[0] + 1, ... (counts[0] numbers), then the same from starts[1] on, ..."""
    ends = np.cumsum(counts, dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    numbers: Int64s = np.arange(total) + np.repeat(starts - (ends - counts), counts)
    return numbers


class SeatTable:
    """Tokens and block tables by seat.

    Memory is reserved for `max_num_seqs` requests of `max_model_len` tokens and touched only
    where used. `num_blocks` is the size of the pool that block ids must lie in.
    """

    def __init__(
        self, *, max_num_seqs: int, max_model_len: int, block_size: int, num_blocks: int
    ) -> None:
        self.block_size = block_size
        self.num_pool_blocks = num_blocks
        self.highest_block = 0  # of those that were ever given to a seat
        self.token_ids = np.empty((max_num_seqs, max_model_len), np.int32)
        self.num_tokens = np.zeros(max_num_seqs, np.int32)
        self.num_prompt_tokens = np.zeros(max_num_seqs, np.int32)
        self.max_tokens = np.zeros(max_num_seqs, np.int32)  # in all: no need to draft beyond
        self.num_computed = np.zeros(max_num_seqs, np.int32)  # tokens whose KV is in place
        # Drafts of the last row that were not accepted, which a plan made before may count.
        self.num_rejected = np.zeros(max_num_seqs, np.int32)
        max_blocks = -(-max_model_len // block_size)
        self.block_ids = np.zeros((max_num_seqs, max_blocks), np.int32)
        self.num_blocks = np.zeros(max_num_seqs, np.int32)
        self.taken = np.zeros(max_num_seqs, np.bool_)
        self._named = np.zeros(max_num_seqs, np.bool_)  # scratch: seats that rows have named

    def apply(self, plan: StepPlan) -> None:
        """Vacate, seat and grow, in that order. Raises PlanError and names what is wrong."""
        self._check_seats("freed_slots", plan.freed_slots)
        self.taken[plan.freed_slots] = False
        for new in plan.new:
            self._seat(new)
        if len(plan.grown_slots):
            self._grow(plan.grown_slots, plan.grown_counts, plan.grown_blocks)

    def _seat(self, new: NewRequest) -> None:
        name, num_tokens, num_blocks = new.request_id, len(new.token_ids), len(new.block_ids)
        seats, max_model_len = self.token_ids.shape
        if not 0 <= new.slot < seats:
            raise PlanError(f"{name}: seat {new.slot}; there are {seats}")
        if self.taken[new.slot]:
            raise PlanError(f"{name}: seat {new.slot} is taken")
        if not 0 < new.num_prompt_tokens <= num_tokens <= max_model_len:
            raise PlanError(
                f"{name}: {num_tokens} tokens of which {new.num_prompt_tokens} are prompt; "
                f"at most {max_model_len}"
            )
        if num_blocks > self.block_ids.shape[1]:
            raise PlanError(f"{name}: {num_blocks} blocks; at most {self.block_ids.shape[1]}")
        self._check_blocks(name, new.block_ids)
        self.token_ids[new.slot, :num_tokens] = new.token_ids
        self.num_tokens[new.slot] = num_tokens
        self.num_prompt_tokens[new.slot] = new.num_prompt_tokens
        most = max_model_len if new.params.max_tokens is None else new.params.max_tokens
        self.max_tokens[new.slot] = min(new.num_prompt_tokens + most, max_model_len)
        self.num_computed[new.slot] = max_model_len  # its first row tells
        self.num_rejected[new.slot] = 0
        self.block_ids[new.slot, :num_blocks] = new.block_ids
        self.num_blocks[new.slot] = num_blocks
        self.taken[new.slot] = True

    def _grow(self, seats: Int32s, counts: Int32s, blocks: Int32s) -> None:
        self._check_seats("grown_slots", seats)
        self._check_blocks("grown_blocks", blocks)
        if len(counts) != len(seats) or counts.sum() != len(blocks) or (counts < 0).any():
            raise PlanError(
                f"{len(seats)} seats grow by {counts.tolist()} blocks, but {len(blocks)} are given"
            )
        held = self.num_blocks[seats]
        if (held + counts > self.block_ids.shape[1]).any():
            seat = seats[np.argmax(held + counts)]
            raise PlanError(f"seat {seat} grows past {self.block_ids.shape[1]} blocks")
        self.block_ids[np.repeat(seats, counts), spans(held, counts)] = blocks
        self.num_blocks[seats] = held + counts

    def step_inputs(self, plan: StepPlan, num_drafts: Int32s = NO_TOKENS) -> StepInputs:
        """Flat inputs of the plan's rows, of which there is at least one. Raises PlanError.

        `num_drafts` [R] is how many drafts `put_drafts` was given for each, at most the plan's;
        empty: none. The rows' tokens count as computed from now on.
        """
        # Copies, since columns that came in a message cannot be written: another type to numba.
        slots, drafts = np.array(plan.slots, np.int32), np.array(plan.num_drafts, np.int32)
        planned, counts = (np.array(it, np.int32) for it in (plan.num_computed, plan.num_scheduled))
        samples, rows = np.array(plan.samples, np.bool_), len(slots)
        for name, column in (
            ("num_computed", planned),
            ("num_scheduled", counts),
            ("samples", samples),
        ):
            if len(column) != rows:
                raise PlanError(f"{rows} rows but {len(column)} of {name}")
        if len(drafts) != rows:
            if len(drafts):
                raise PlanError(f"{rows} rows with {drafts.tolist()} drafts")
            drafts = np.zeros(rows, np.int32)
        total = int(counts.sum())
        token_ids, positions = np.empty((2, max(total, 0)), np.int64)
        query_start, starts = np.zeros(rows + 1, np.int32), np.empty(rows, np.int32)
        fault, row, limit, longest = fill_rows(
            *(slots, planned, counts, samples, drafts),
            *(num_drafts if len(num_drafts) else np.zeros(rows, np.int32), self.block_size),
            *(self.token_ids, self.num_tokens, self.num_computed, self.num_rejected),
            *(self.num_blocks, self.taken, self._named),
            *(token_ids, positions, query_start, starts),
        )
        if fault >= 0:
            self._refuse(plan, fault, row, limit)
        total = query_start[-1]
        block_tables = np.empty((rows, -(-longest // self.block_size)), np.int32)
        look_up_blocks(self.block_ids, slots, block_tables)
        return StepInputs(
            token_ids=token_ids[:total],
            positions=positions[:total],
            query_start=query_start,
            num_computed=starts,
            block_tables=block_tables,
        )

    def rows(self, seats: Int32s, starts: Int32s, counts: Int32s) -> StepInputs:
        """Row i runs `counts[i]` tokens of `seats[i]` from `starts[i]` on."""
        query_start = np.zeros(len(counts) + 1, np.int32)
        np.cumsum(counts, out=query_start[1:])
        positions = spans(starts, counts)
        widest = -(-int((starts + counts).max()) // self.block_size)
        return StepInputs(
            token_ids=self.token_ids[np.repeat(seats, counts), positions].astype(np.int64),
            positions=positions,
            query_start=query_start,
            num_computed=starts,
            block_tables=self.block_ids[seats, :widest],
        )

    def put_drafts(self, seats: Int32s, counts: Int32s, token_ids: Int32s) -> None:
        """Write drafts behind the last token of each of `seats`, where their row finds them."""
        self.token_ids[np.repeat(seats, counts), spans(self.num_tokens[seats], counts)] = token_ids

    def drafts(self, seats: Int32s, counts: Int32s) -> Int32s:
        """The first `counts` drafts of each of `seats`, flat."""
        positions = spans(self.num_tokens[seats], counts)
        drafts: Int32s = self.token_ids[np.repeat(seats, counts), positions]
        return drafts

    def sampled_rows(self, seats: Int32s, widths: Int32s) -> tuple[Int32s, Int32s, Int32s]:
        """Seat, position and draft of each row that is sampled: `widths[i]` rows of `seats[i]`.

        The last row of a seat has no draft: NO_DRAFT.
        """
        rows: Int32s = np.empty((3, widths.sum()), np.int32)
        sampled_rows(seats, widths, self.token_ids, self.num_tokens, *rows)
        return rows[0], rows[1], rows[2]

    def append(
        self,
        seats: Int32s,
        widths: Int32s,
        token_ids: Int32s,
        sound: Bools | None = None,
        kept: Bools | None = None,
    ) -> tuple[Int32s, Int32s]:
        """Write `widths` sampled tokens (flat in `token_ids`) at the end of each of `seats`.

        Of these, the ones that are `kept` (None: all). Drafts that are not among them are gone:
        only what precedes the last token is computed. Returns how many each seat got, 0 if one of
        them is not `sound`, and those tokens.
        """
        every = np.ones(len(token_ids), np.bool_)
        counts, appended = np.empty(len(seats), np.int32), np.empty(len(token_ids), np.int32)
        total = append_rows(
            *(seats, widths, token_ids),
            *(every if sound is None else sound, every if kept is None else kept),
            *(self.token_ids, self.num_tokens, self.num_computed, self.num_rejected),
            *(counts, appended),
        )
        return counts, appended[:total]

    def _refuse(self, plan: StepPlan, fault: int, row: int, limit: int) -> None:
        self._check_seats("slots", plan.slots)
        raise PlanError(
            f"step {plan.step}, row {row} (seat {plan.slots[row]}) {FAULTS[fault]}: "
            f"{plan.num_computed[row]} computed + {plan.num_scheduled[row]} scheduled"
            + ("" if limit < 0 else f"; limit {limit}")
        )

    def _check_seats(self, name: str, seats: Int32s) -> None:
        if not len(seats):
            return
        if seats.min() < 0 or seats.max() >= len(self.taken):
            raise PlanError(f"{name} {seats.tolist()}: there are {len(self.taken)} seats")
        if not self.taken[seats].all():
            raise PlanError(f"{name}: seats {seats[~self.taken[seats]].tolist()} are empty")
        if np.bincount(seats).max() > 1:
            raise PlanError(f"{name} {seats.tolist()}: a seat is named twice")

    def _check_blocks(self, name: str, blocks: Int32s) -> None:
        if not len(blocks):
            return
        highest = int(blocks.max())
        if blocks.min() < 0 or highest >= self.num_pool_blocks:
            raise PlanError(f"{name}: block ids {blocks.tolist()} outside {self.num_pool_blocks}")
        self.highest_block = max(self.highest_block, highest)


def warm_up_rows() -> None:
    """Compile what `input_rows` has, or load it from the cache: before the first step needs it."""
    seats = SeatTable(max_num_seqs=1, max_model_len=4, block_size=4, num_blocks=2)
    slots, ones = np.zeros(1, np.int32), np.ones(1, np.int32)
    new = NewRequest(
        slot=0,
        request_id="warm-up",
        token_ids=ones,
        num_prompt_tokens=1,
        params=SamplingParams(),
        stop_token_ids=(),
        block_ids=ones,
    )
    plan = StepPlan(
        step=0,
        slots=slots,
        num_computed=slots,
        num_scheduled=ones,
        samples=np.ones(1, np.bool_),
        new=[new],
    )
    seats.apply(plan)
    seats.step_inputs(plan)
    row_seats, _, drafts = seats.sampled_rows(slots, ones)
    accept_rows(row_seats, drafts == drafts, np.empty(1, np.bool_))
    seats.append(slots, ones, ones)


def null_block_inputs(counts: tuple[int, ...], block_size: int) -> StepInputs:
    """Rows of `counts` tokens that follow one computed block; all read and write block 0."""
    query_start = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    return StepInputs(
        token_ids=np.zeros(query_start[-1], np.int64),
        positions=np.zeros(query_start[-1], np.int64),
        query_start=query_start,
        num_computed=np.full(len(counts), block_size, np.int32),
        block_tables=np.zeros((len(counts), 3), np.int32),
    )
