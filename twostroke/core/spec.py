"""Executable rules: what every step plan satisfies, whatever the policy.

`PlanRules` follows the plans from outside, as a worker sees them, and compares them with the
engine's books. It is on in tests and with `--check`; a violation raises IntegrityError and is
always a bug of ours. The rules, by number, as the messages name them:

    1  budget     a step has at most the token budget, and each row at least one token
    2  seats      nobody sits on a taken seat; only taken ones are vacated or run, once a step
    3  positions  a row starts where the request's last row ended (earlier after rejected drafts
                  or a failed load), and never passes the model's length
    4  blocks     ids are real; a table reaches as far as its row; no two rows write one block
    5  sharing    a block in several tables stands at one index and holds one and the same prefix
    6  loading    nothing runs for a request whose KV is still arriving, and no row writes into
                  its blocks
    7  sampling   a row yields a token exactly when it reaches the end of what is known or due
    8  drafts     a row verifies fewer drafts than it has tokens
"""

from collections import Counter
from dataclasses import dataclass

from twostroke.core.request import Request, Status
from twostroke.core.state import EngineState
from twostroke.kv.blocks import NULL_BLOCK
from twostroke.kv.manager import IntegrityError
from twostroke.messages import StepPlan, StepResult


@dataclass
class _Seat:
    """What is known of a seat from the plans alone."""

    request_id: str
    end: int  # where the next row must start
    num_blocks: int
    may_fall: int = 0  # drafts of the last row, which may yet be rejected
    may_fall_before: int = 0  # and of the row before: two steps can be in flight
    was_cut: bool = False  # a load failed: the row may start anywhere before `end`


def _require(holds: bool, rule: int, step: int, what: str) -> None:
    if not holds:
        raise IntegrityError(f"step {step} breaks rule {rule}: {what}")


class PlanRules:
    """Checks plans in the order in which they are begun."""

    def __init__(self, state: EngineState) -> None:
        self._state = state
        self._seats: dict[int, _Seat] = {}

    def check(self, plan: StepPlan) -> None:
        """Verify a plan that was just begun; raises IntegrityError."""
        step = plan.step
        total, budget = int(plan.num_scheduled.sum()), self._state.token_budget
        _require(total <= budget, 1, step, f"{total} tokens of {budget}")
        self._change_seats(plan)
        slots = plan.slots.tolist()
        _require(len(set(slots)) == len(slots), 2, step, "a seat has two rows")
        written: Counter[int] = Counter()
        for row in range(len(slots)):
            self._check_row(plan, row, written)
        self._check_tables(step)
        self._check_loading(step, written)

    def observe(self, result: StepResult) -> None:
        """Take note of a result: after invalid blocks were reported, rows may start earlier."""
        if result.kv is not None and (result.kv.invalid_block_ids or result.kv.failed_recving):
            for seat in self._seats.values():
                seat.was_cut = True

    def _change_seats(self, plan: StepPlan) -> None:
        for slot in plan.freed_slots.tolist():
            _require(slot in self._seats, 2, plan.step, f"seat {slot} is vacated but is empty")
            del self._seats[slot]
        starts = dict(zip(plan.slots.tolist(), plan.num_computed.tolist(), strict=True))
        for new in plan.new:
            _require(new.slot not in self._seats, 2, plan.step, f"seat {new.slot} is taken")
            _require(new.slot in starts, 2, plan.step, f"{new.request_id} sits without a row")
            self._seats[new.slot] = _Seat(new.request_id, starts[new.slot], len(new.block_ids))
        for slot, count in zip(plan.grown_slots.tolist(), plan.grown_counts.tolist(), strict=True):
            _require(slot in self._seats, 2, plan.step, f"seat {slot} grows but is empty")
            self._seats[slot].num_blocks += count

    def _check_row(self, plan: StepPlan, row: int, written: Counter[int]) -> None:
        step, slot = plan.step, int(plan.slots[row])
        start, count = int(plan.num_computed[row]), int(plan.num_scheduled[row])
        seat = self._seats.get(slot)
        request = self._state.seats.request_of[slot]
        if seat is None or request is None:
            raise IntegrityError(f"step {step} breaks rule 2: seat {slot} runs but is empty")
        name = request.request_id
        _require(
            seat.request_id == name, 2, step, f"seat {slot} is {seat.request_id}'s, not {name}'s"
        )
        _require(count > 0, 1, step, f"{name} has a row without tokens")
        lowest = 0 if seat.was_cut else seat.end - seat.may_fall - seat.may_fall_before
        follows = lowest <= start <= seat.end
        _require(follows, 3, step, f"{name} starts at {start}, ended at {seat.end}")
        end = start + count
        _require(end <= self._state.config.max_model_len, 3, step, f"{name} reaches {end}")
        drafts = int(plan.num_drafts[row]) if len(plan.num_drafts) else 0
        _require(0 <= drafts < count, 8, step, f"{name} verifies {drafts} drafts in {count} tokens")
        seat.end, seat.was_cut = end, False
        seat.may_fall, seat.may_fall_before = drafts, seat.may_fall
        self._check_blocks(step, request, seat, start, end, written)
        _require(request.status is Status.RUNNING, 6, step, f"{name} is {request.status.name}")
        self._check_sampling(plan, row, request, end, drafts)

    def _check_blocks(
        self, step: int, request: Request, seat: _Seat, start: int, end: int, written: Counter[int]
    ) -> None:
        blocks, size = request.table.blocks, self._state.config.block_size
        name = request.request_id
        _require(
            seat.num_blocks == len(blocks),
            4,
            step,
            f"{name} has {len(blocks)} blocks; its worker was told of {seat.num_blocks}",
        )
        _require(
            end <= len(blocks) * size, 4, step, f"{name} reaches {end} with {len(blocks)} blocks"
        )
        for block in blocks[start // size : self._state.kv.blocks_for(end)]:
            usable = 0 < block <= self._state.kv.pool.num_usable
            _require(usable, 4, step, f"{name} writes into block {block}")
            written[block] += 1
            _require(written[block] == 1, 4, step, f"two rows write into block {block}")

    def _check_sampling(
        self, plan: StepPlan, row: int, request: Request, end: int, drafts: int
    ) -> None:
        seats, slot = self._state.seats, request.slot
        due = int(seats.known[slot]) + int(seats.placeholders[slot])
        if self._state.config.async_scheduling and plan.samples[row]:
            due -= 1 + drafts  # this step's own tokens are placeholders by now
        _require(
            bool(plan.samples[row]) == (end >= due),
            7,
            plan.step,
            f"{request.request_id} reaches {end} of {due}; samples: {bool(plan.samples[row])}",
        )

    def _check_tables(self, step: int) -> None:
        places: dict[int, tuple[int, Request]] = {}
        for request in (*self._state.requests.values(), *self._state.held.values()):
            for index, block in enumerate(request.table.blocks):
                if block == NULL_BLOCK:
                    continue
                other = places.setdefault(block, (index, request))
                if other[1] is request and other[0] == index:
                    continue
                theirs = other[1].table.keys
                same = (
                    other[0] == index < len(theirs) and request.table.keys[index] == theirs[index]
                )
                _require(
                    same,
                    5,
                    step,
                    f"{request.request_id} and {other[1].request_id} share block {block} "
                    "but differ there",
                )

    def _check_loading(self, step: int, written: Counter[int]) -> None:
        for request in self._state.queues.skipped():
            if request.status is not Status.WAITING_FOR_REMOTE_KVS:
                continue
            _require(request.slot < 0, 6, step, f"{request.request_id} loads and has a seat")
            first = request.num_local_hit // self._state.config.block_size
            clash = [block for block in request.table.blocks[first:] if block in written]
            _require(
                not clash, 6, step, f"rows write into {clash}, which {request.request_id} loads"
            )
