"""The prefill stroke: prompts that are computed for another engine, and held until it has them.

    blocks allocated          prompt computed             release, or the lease ends
      word set ──▶ (stream: tickets by chunk) ──▶ held, last ticket ──▶ word cleared, blocks freed

The lease word is set in the step that first writes into the blocks and cleared in a plan that is no
later than the first which may write into them for somebody else. So whoever still finds the word
has read this prompt.

Prompts that are held or on their way there take at most a share of the pool; others wait. A prompt
larger than the share passes when it is alone.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from twostroke.clock import Clock
from twostroke.connector.base import KvRequest
from twostroke.connector.outbox import Outbox, RecentIds
from twostroke.kv.manager import IntegrityError
from twostroke.kv_messages import KvEndpoint, KvReady, KvSend, KvTicket
from twostroke.messages import FinishReason

_CLEARED = b""


@dataclass(slots=True)
class _Send:
    """A prompt to hand over. It has an id, a slot and blocks from its allocation on.

    Once let in under the bound it stays so, also when it is preempted.
    """

    uid: int
    handle: int
    options: KvSend
    num_prompt: int
    most_blocks: int
    transfer_id: bytes = b""
    slot: int = -1
    is_let_in: bool = False
    blocks: list[int] = field(default_factory=list)  # those that are counted
    is_released: bool = False  # by the reader, before the prompt was complete
    lease_ends_s: float | None = None  # once it is held

    @property
    def promised(self) -> int:
        """Blocks that it will still take."""
        return max(0, self.most_blocks - len(self.blocks)) if self.is_let_in else 0


class Sends:
    """All prompts of one engine that another one is to fetch."""

    def __init__(
        self,
        clock: Clock,
        endpoint: KvEndpoint,
        outbox: Outbox,
        *,
        max_hold_share: float,
        new_transfer_id: Callable[[], bytes],
    ) -> None:
        self._clock = clock
        self._endpoint = endpoint
        self._block_size = endpoint.layout.block_size
        self._num_usable = endpoint.layout.num_blocks - 1
        self._most_held = int(max_hold_share * self._num_usable)
        self._new_transfer_id = new_transfer_id
        self._outbox = outbox
        self._sends: dict[int, _Send] = {}  # by uid
        self._by_transfer: dict[bytes, _Send] = {}
        self._ended = RecentIds()
        self._counted: Counter[int] = Counter()  # blocks of sends that were let in
        self._promised = 0  # blocks that those will still take
        self._free_slots: list[int] = []
        self._num_slots = 0
        self._leases: list[tuple[float, int]] = []  # heap; of a renewed lease also the old end
        self.num_holds = 0
        self.num_ended = 0
        self.num_expired = 0
        self.num_unknown = 0

    # ------------------------------------------------------------ the bound

    @property
    def num_blocks(self) -> int:
        """Blocks that are held or promised; one that several prompts share counts once."""
        return len(self._counted) + self._promised

    @property
    def hold_usage(self) -> float:
        return self.num_blocks / self._num_usable

    def new(self, request: KvRequest, options: KvSend) -> None:
        """A prompt to hand over has arrived."""
        most_tokens = request.num_prompt_tokens + request.max_tokens - 1
        self._sends[request.uid] = _Send(
            uid=request.uid,
            handle=request.handle,
            options=options,
            num_prompt=request.num_prompt_tokens,
            most_blocks=min(self._blocks_for(most_tokens), self._num_usable),
        )

    def may_start(self, uid: int, cached: Sequence[int], *, is_first: bool) -> bool:
        """Whether its blocks fit under the bound, or were let in before."""
        send = self._sends[uid]
        if send.is_let_in:
            return True
        if not is_first:
            return False
        before = self.num_blocks
        if before == 0 or before + send.most_blocks <= self._most_held:
            return True
        shared = sum(block in self._counted for block in cached)
        return before + send.most_blocks - shared <= self._most_held

    def allocated(self, uid: int, block_ids: Sequence[int]) -> None:
        """It got blocks, for the first time or again."""
        send = self._sends[uid]
        self._promised -= send.promised
        send.is_let_in = True
        self._promised += send.promised
        self._count(send, block_ids)
        if send.is_released or send.transfer_id:
            return
        send.transfer_id = self._new_transfer_id()
        send.slot = self._free_slots.pop() if self._free_slots else self._num_slots
        self._num_slots = max(self._num_slots, send.slot + 1)
        self._by_transfer[send.transfer_id] = send
        self._outbox.commands.leases.append((send.slot, send.transfer_id))

    def _count(self, send: _Send, block_ids: Sequence[int]) -> None:
        """Count these as its blocks; the rest of what it may take stays promised."""
        blocks, counted = list(block_ids), self._counted
        if blocks == send.blocks:
            return
        self._promised -= send.promised
        for block in send.blocks:
            left = counted[block] - 1
            if left:
                counted[block] = left
            else:
                counted.pop(block)  # several times as fast as `del`, which Counter defines anew
        counted.update(blocks)
        send.blocks = blocks
        self._promised += send.promised

    # ------------------------------------------------------------ tickets

    def lost(self, uid: int) -> None:
        """Preempted: its blocks are another's from the next plan on, so its word goes first."""
        send = self._sends[uid]
        self._end_lease(send)
        self._count(send, ())

    def chunk_computed(self, uid: int, block_ids: Sequence[int], num_tokens: int) -> None:
        """With streaming: a ticket for a part of the prompt."""
        send = self._sends[uid]
        if send.transfer_id and 0 < num_tokens < send.num_prompt:
            self._emit(send, block_ids, num_tokens, is_last=False)

    def finished(self, request: KvRequest, block_ids: Sequence[int]) -> bool:
        """The request has ended; True: its blocks are held from now on."""
        send = self._sends[request.uid]
        num_blocks = self._blocks_for(send.num_prompt)
        is_whole = len(block_ids) >= num_blocks and request.num_computed >= send.num_prompt
        wanted = request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        if not (wanted and is_whole and send.transfer_id):
            self._end(send)
            return False
        self._promised -= send.promised
        send.most_blocks = 0  # it takes no more than it has
        self._count(send, block_ids)
        self.num_holds += 1
        self._start_lease(send)
        self._emit(send, block_ids, send.num_prompt, is_last=True)
        return True

    def _emit(
        self, send: _Send, block_ids: Sequence[int], num_tokens: int, *, is_last: bool
    ) -> None:
        ticket = KvTicket(
            transfer_id=send.transfer_id,
            endpoint=self._endpoint,
            lease_slot=send.slot,
            num_tokens=num_tokens,
            block_ids=np.array(block_ids[: self._blocks_for(num_tokens)], np.int32),
        )
        self._outbox.outputs.ready.append(KvReady(send.handle, ticket, is_last))

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    # ------------------------------------------------------------ leases

    def release(self, transfer_ids: Sequence[bytes]) -> None:
        """Let go of what is held; a prompt under way is then computed for nobody."""
        for transfer_id in transfer_ids:
            send = self._by_transfer.get(transfer_id)
            if send is None:
                self.num_unknown += transfer_id not in self._ended
            elif send.lease_ends_s is not None:
                self._let_go(send)
            else:
                self._end_lease(send)
                send.is_released = True

    def renew(self, transfer_ids: Sequence[bytes]) -> None:
        """Begin their leases anew; those of prompts under way have not begun yet."""
        for transfer_id in transfer_ids:
            send = self._by_transfer.get(transfer_id)
            if send is None:
                self.num_unknown += transfer_id not in self._ended
            elif send.lease_ends_s is not None:
                self._start_lease(send)

    def expire(self, now: float) -> None:
        """Let go of what nobody has asked for in time."""
        while (first := self._first_lease()) is not None and first[0] <= now:
            self.num_expired += 1
            self._let_go(first[1])

    def next_deadline_s(self) -> float | None:
        """The first end of a lease."""
        first = self._first_lease()
        return None if first is None else first[0]

    def _first_lease(self) -> tuple[float, _Send] | None:
        """What ends first, behind the leases that were renewed or are over."""
        while self._leases:
            ends_s, uid = self._leases[0]
            send = self._sends.get(uid)
            if send is not None and send.lease_ends_s == ends_s:
                return ends_s, send
            heapq.heappop(self._leases)
        return None

    def _start_lease(self, send: _Send) -> None:
        send.lease_ends_s = self._clock.now() + send.options.lease_s
        heapq.heappush(self._leases, (send.lease_ends_s, send.uid))

    def _let_go(self, send: _Send) -> None:
        """The hold is over."""
        self.num_holds -= 1
        self._outbox.ends.freed.append(send.uid)
        self._end(send)

    def _end(self, send: _Send) -> None:
        self._end_lease(send)
        self._count(send, ())
        self._promised -= send.promised
        self.num_ended += 1
        del self._sends[send.uid]

    def _end_lease(self, send: _Send) -> None:
        """Clear the word and give up the id and the slot."""
        if send.transfer_id:
            self._outbox.commands.leases.append((send.slot, _CLEARED))
            del self._by_transfer[send.transfer_id]
            self._ended.add(send.transfer_id)
            self._free_slots.append(send.slot)
            send.transfer_id, send.slot = b"", -1

    # ------------------------------------------------------------ checks

    def held(self) -> set[int]:
        """Uids of the ended requests whose blocks are held."""
        return {send.uid for send in self._sends.values() if send.lease_ends_s is not None}

    def check_integrity(self, unfinished: Collection[int]) -> None:
        """Recount slots, ids and blocks; IntegrityError when they do not balance."""
        sends = self._sends.values()
        used = sorted(send.slot for send in sends if send.slot >= 0)
        if sorted((*used, *self._free_slots)) != list(range(self._num_slots)):
            raise IntegrityError(f"lease slots {used} and {self._free_slots} do not add up")
        if {send.transfer_id for send in sends if send.transfer_id} != set(self._by_transfer):
            raise IntegrityError("transfer ids and the sends that have one differ")
        counted = Counter(block for send in sends for block in send.blocks)
        promised = sum(send.promised for send in sends)
        if counted != self._counted or promised != self._promised:
            raise IntegrityError("blocks counted as held differ from those of the sends")
        strays = set(self._sends) - self.held() - set(unfinished)
        if strays or self.num_holds != len(self.held()):
            raise IntegrityError(f"sends of requests that are gone: {strays}; {self.num_holds}")
