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

from twostroke.messages import NO_TOKENS, Bools, Int32s, Int64s, NewRequest, StepPlan


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
        slots, counts = plan.slots, plan.num_scheduled
        starts = self._check_rows(plan)
        if len(plan.num_drafts):
            counts = counts - plan.num_drafts
            if len(num_drafts):
                counts += num_drafts
        self.num_computed[slots] = starts + counts
        self.num_rejected[slots] = plan.num_drafts if len(plan.num_drafts) else 0
        return self.rows(slots, starts, counts)

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

    def append(self, seats: Int32s, counts: Int32s, token_ids: Int32s) -> None:
        """Write `counts` sampled tokens (flat in `token_ids`) at the end of each of `seats`.

        Drafts that are not among them are gone: only what precedes the last token is computed.
        """
        self.put_drafts(seats, counts, token_ids)
        self.num_tokens[seats] += counts
        self.num_computed[seats] = self.num_tokens[seats] - 1
        self.num_rejected[seats] -= counts - 1

    def _check_rows(self, plan: StepPlan) -> Int32s:
        """Where the rows start."""
        rows = len(plan.slots)
        for name in ("num_computed", "num_scheduled", "samples"):
            if len(getattr(plan, name)) != rows:
                raise PlanError(f"{rows} rows but {len(getattr(plan, name))} of {name}")
        self._check_seats("slots", plan.slots)
        drafts: Int32s = plan.num_drafts
        if not len(drafts):
            drafts = np.zeros(rows, np.int32)
        if len(drafts) != rows or (drafts < 0).any():
            raise PlanError(f"{rows} rows with {drafts.tolist()} drafts")
        self._refuse(plan, plan.num_computed < 0, "has a negative number of computed tokens")
        computed = self.num_computed[plan.slots]
        limit = computed + self.num_rejected[plan.slots]
        self._refuse(plan, plan.num_computed > limit, "leaves a gap of tokens", limit)
        starts = np.minimum(plan.num_computed, computed)
        ends = starts + plan.num_scheduled - drafts
        known = self.num_tokens[plan.slots]
        self._refuse(plan, ends <= starts, "schedules no token")
        self._refuse(plan, ends > known, "runs past its known tokens", known)
        self._refuse(plan, plan.samples & (ends != known), "samples before its last token", known)
        self._refuse(plan, ~plan.samples & (drafts > 0), "verifies drafts without sampling", known)
        full = plan.samples & (ends + drafts >= self.token_ids.shape[1])
        self._refuse(plan, full, "samples past the model's length")
        held = self.num_blocks[plan.slots] * self.block_size
        self._refuse(plan, ends + drafts > held, "runs past its blocks' slots", held)
        return starts

    def _refuse(self, plan: StepPlan, wrong: Bools, what: str, limit: Int32s | None = None) -> None:
        if not wrong.any():
            return
        row = int(np.argmax(wrong))
        raise PlanError(
            f"step {plan.step}, row {row} (seat {plan.slots[row]}) {what}: "
            f"{plan.num_computed[row]} computed + {plan.num_scheduled[row]} scheduled"
            + ("" if limit is None else f"; limit {limit[row]}")
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
        if len(blocks) and (blocks.min() < 0 or blocks.max() >= self.num_pool_blocks):
            raise PlanError(f"{name}: block ids {blocks.tolist()} outside {self.num_pool_blocks}")
