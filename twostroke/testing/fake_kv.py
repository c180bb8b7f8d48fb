"""A model that reads its KV: what is wrong there changes every token that follows.

The KV of a position is a number that follows from the KV before it and from the token there; the
next token follows from the KV of all positions. So two schedules of the same prompt agree only if
every block of every position held the right content when it was read: blocks that were given to
another too early, loaded from the wrong place or not at all show up as other tokens.
"""

import numpy as np
from numpy.typing import NDArray

from twostroke.connector.base import KvConnectorWorker
from twostroke.kv_messages import TRANSFER_ID_BYTES, KvTicket
from twostroke.messages import StepPlan, StepResult
from twostroke.testing.fake_executor import FakeExecutor

UInt64s = NDArray[np.uint64]

_MASK = (1 << 64) - 1
_VOCAB_START, _VOCAB_RANGE = 100, 31_900
NO_LEASE = bytes(TRANSFER_ID_BYTES)


def _mixed(number: int) -> int:
    """splitmix64's finaliser."""
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK
    return number ^ (number >> 31)


def kv_after(before: int, token: int) -> int:
    """The KV of a token behind a position whose KV is `before` (0: the first)."""
    return _mixed((before * 3 + token + 0x9E3779B97F4A7C15) & _MASK)


def next_token(kv: UInt64s) -> int:
    """The token that follows positions with this KV, [positions]."""
    weights = np.arange(len(kv), dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    total = int((kv * weights).sum(dtype=np.uint64))
    return _VOCAB_START + _mixed(total) % _VOCAB_RANGE


def continuation(prompt: list[int], count: int) -> list[int]:
    """The `count` tokens that follow a prompt when nothing goes wrong."""
    kv: list[int] = []
    for token in prompt:
        kv.append(kv_after(kv[-1] if kv else 0, token))
    tokens: list[int] = []
    for _ in range(count):
        tokens.append(next_token(np.array(kv, np.uint64)))
        kv.append(kv_after(kv[-1], tokens[-1]))
    return tokens


class FakePool:
    """One engine's KV [blocks, block size] and its lease words."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.kv: UInt64s = np.zeros((num_blocks, block_size), np.uint64)
        self.leases = [NO_LEASE] * num_blocks

    def read(self, block_ids: list[int], first: int, last: int) -> UInt64s:
        """KV of tokens [first, last) of a sequence that has these blocks."""
        positions = np.arange(first, last)
        blocks = np.array(block_ids, np.int64)[positions // self.block_size]
        return self.kv[blocks, positions % self.block_size]

    def write(self, block_ids: list[int], first: int, kv: UInt64s) -> None:
        """Set the KV of the tokens from `first` on."""
        positions = np.arange(first, first + len(kv))
        blocks = np.array(block_ids, np.int64)[positions // self.block_size]
        self.kv[blocks, positions % self.block_size] = kv

    def set_leases(self, leases: list[tuple[int, bytes]]) -> None:
        for slot, word in leases:
            self.leases[slot] = word or NO_LEASE

    def honours(self, ticket: KvTicket) -> bool:
        """Whether the ticket's lease word is set."""
        slot = ticket.lease_slot
        return 0 <= slot < len(self.leases) and self.leases[slot] == ticket.transfer_id


class KvExecutor(FakeExecutor):
    """A `FakeExecutor` whose tokens come out of a `FakePool`, beside a connector's worker half."""

    def __init__(self, pool: FakePool, connector: KvConnectorWorker | None = None) -> None:
        super().__init__(block_size=pool.block_size, token=self._sampled)
        self.pool = pool
        self.connector = connector
        self._tokens: dict[int, list[int]] = {}  # by seat
        self._blocks: dict[int, list[int]] = {}
        self._next = 0
        self._last_started = -1

    def collect(self) -> StepResult:
        self.start()
        result = super().collect()
        if self.connector is not None:
            result.kv = self.connector.report()
        return result

    def start(self) -> None:
        """Begin the oldest plan: what it says of KV is done before its rows run."""
        plan = self._submitted[0]
        if self._last_started == plan.step:
            return
        self._last_started = plan.step
        if self.connector is not None and plan.kv is not None:
            self.connector.apply(plan.kv)

    def _sampled(self, request_id: str, position: int) -> int:
        return self._next

    def _change_seats(self, plan: StepPlan) -> None:
        super()._change_seats(plan)
        for slot in plan.freed_slots.tolist():
            del self._tokens[slot], self._blocks[slot]
        for new in plan.new:
            self._tokens[new.slot] = new.token_ids.tolist()
            self._blocks[new.slot] = new.block_ids.tolist()
        start = 0
        for slot, count in zip(plan.grown_slots.tolist(), plan.grown_counts.tolist(), strict=True):
            self._blocks[slot] += plan.grown_blocks[start : start + count].tolist()
            start += count

    def _run_row(self, plan: StepPlan, row: int) -> list[int]:
        slot, start = int(plan.slots[row]), int(plan.num_computed[row])
        end = start + int(plan.num_scheduled[row])
        blocks, tokens = self._blocks[slot], self._tokens[slot]
        before = int(self.pool.read(blocks, start - 1, start)[0]) if start else 0
        kv = []
        for token in tokens[start:end]:
            before = kv_after(before, token)
            kv.append(before)
        self.pool.write(blocks, start, np.array(kv, np.uint64))
        self._next = next_token(self.pool.read(blocks, 0, end))
        new = super()._run_row(plan, row)
        tokens += new
        return new
