"""An executor without a model: deterministic tokens, and a strict reading of the plan protocol.

The token at position p of a request is a fixed function of its id and p, so that any two schedules
of the same requests must produce the same text. Everything that a worker relies on is asserted: who
sits where, that positions run on, that block tables reach far enough.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from twostroke.messages import NewRequest, StepPlan, StepResult

_VOCAB_START = 100
_VOCAB_RANGE = 31_900


def fnv1a32(text: str) -> int:
    """FNV-1a, 32 bits, over the UTF-8 bytes of `text`."""
    value = 0x811C9DC5
    for byte in text.encode():
        value = ((value ^ byte) * 0x01000193) & 0xFFFFFFFF
    return value


def simulated_token(request_id: str, position: int) -> int:
    """The token that the simulated model puts at `position` (the prompt starts at 0)."""
    return _VOCAB_START + fnv1a32(f"{request_id}:{position}") % _VOCAB_RANGE


@dataclass
class _Seat:
    request_id: str
    num_known: int
    num_computed: int
    num_blocks: int
    num_rejected: int = 0  # drafts rejected since; a plan made before that counts them as computed


class FakeExecutor:
    """Runs plans in order, at once when collected.

    `token(request_id, position)` is the model. `accept(request_id, drafts)` says how many drafts of
    a verification it accepts. With `num_drafts` it proposes that many after each sampled token.
    `may_rewind` lets a row start before the end of the last one, as after a failed KV load.
    """

    def __init__(
        self,
        *,
        block_size: int = 16,
        num_drafts: int = 0,
        may_rewind: bool = False,
        token: Callable[[str, int], int] = simulated_token,
        accept: Callable[[str, int], int] = lambda request_id, drafts: drafts,
    ) -> None:
        self.plans: list[StepPlan] = []
        self._block_size = block_size
        self._num_drafts = num_drafts
        self._may_rewind = may_rewind
        self._token = token
        self._accept = accept
        self._seats: dict[int, _Seat] = {}
        self._submitted: deque[StepPlan] = deque()

    def submit(self, plan: StepPlan) -> None:
        assert len(self._submitted) < 2, "more than two plans in flight"
        self.plans.append(plan)
        self._submitted.append(plan)

    def recall(self) -> StepPlan:
        """Take back the plan that was submitted last."""
        self.plans.pop()
        return self._submitted.pop()

    def collect(self) -> StepResult:
        plan = self._submitted.popleft()
        self._change_seats(plan)
        num_sampled = np.zeros(len(plan.slots), np.int32)
        num_drafts = np.zeros(len(plan.slots), np.int32)
        tokens: list[int] = []
        drafts: list[int] = []
        for row in range(len(plan.slots)):
            new = self._run_row(plan, row)
            num_sampled[row] = len(new)
            tokens += new
            if new and self._num_drafts:
                seat = self._seats[int(plan.slots[row])]
                num_drafts[row] = self._num_drafts
                drafts += [
                    self._token(seat.request_id, seat.num_known + i)
                    for i in range(self._num_drafts)
                ]
        result = StepResult(
            step=plan.step, num_sampled=num_sampled, token_ids=np.array(tokens, np.int32)
        )
        result.num_verified = plan.num_drafts
        if self._num_drafts:
            result.num_drafts = num_drafts
            result.draft_token_ids = np.array(drafts, np.int32)
        return result

    def shutdown(self) -> None:
        self._submitted.clear()
        self._seats.clear()

    @property
    def num_seated(self) -> int:
        return len(self._seats)

    def _change_seats(self, plan: StepPlan) -> None:
        for slot in plan.freed_slots.tolist():
            assert slot in self._seats, f"seat {slot} is vacated but nobody sits there"
            del self._seats[slot]
        for new in plan.new:
            assert new.slot not in self._seats, f"seat {new.slot} is taken"
            self._seats[new.slot] = self._sit(plan, new)
        assert int(plan.grown_counts.sum()) == len(plan.grown_blocks), "grown blocks do not add up"
        for slot, count in zip(plan.grown_slots.tolist(), plan.grown_counts.tolist(), strict=True):
            self._seats[slot].num_blocks += count

    def _sit(self, plan: StepPlan, new: NewRequest) -> _Seat:
        rows = np.flatnonzero(plan.slots == new.slot)
        assert len(rows) == 1, f"new request {new.request_id} has {len(rows)} rows"
        assert 0 < new.num_prompt_tokens <= len(new.token_ids)
        return _Seat(
            request_id=new.request_id,
            num_known=len(new.token_ids),
            num_computed=int(plan.num_computed[rows[0]]),
            num_blocks=len(new.block_ids),
        )

    def _run_row(self, plan: StepPlan, row: int) -> list[int]:
        """Check one row against its seat and produce its tokens."""
        seat = self._seats[int(plan.slots[row])]
        count = int(plan.num_scheduled[row])
        drafts = int(plan.num_drafts[row]) if len(plan.num_drafts) else 0
        start = int(plan.num_computed[row])
        if self._may_rewind and start < seat.num_computed:
            seat.num_computed = start
            seat.num_known = start + count - drafts + (not plan.samples[row])
        assert 0 <= start - seat.num_computed <= seat.num_rejected, (
            f"row {row} starts at {start}; its seat has computed {seat.num_computed}"
        )
        end = seat.num_computed + count
        assert count > 0, f"row {row} runs nothing"
        assert start + count <= seat.num_blocks * self._block_size, f"row {row} lacks blocks"
        assert end - drafts <= seat.num_known, f"row {row} runs tokens that do not exist"
        assert bool(plan.samples[row]) == (end - drafts == seat.num_known), (
            f"row {row} ends at {end} of {seat.num_known} tokens; samples: {plan.samples[row]}"
        )
        seat.num_computed = end
        if not plan.samples[row]:
            return []
        accepted = min(self._accept(seat.request_id, drafts), drafts) if drafts else 0
        new = [self._token(seat.request_id, seat.num_known + i) for i in range(accepted + 1)]
        seat.num_known += len(new)
        seat.num_computed -= drafts - accepted
        seat.num_rejected += drafts - accepted
        return new
