"""The decode stroke: prompts whose KV another engine has computed.

    WAITING ──blocks allocated──▶ LOADING ──the worker: it is over──▶ done
       │                             │
       └──▶ done                     └──abort, deadline──▶ GIVEN_UP ──the worker: it is over──▶ done

Blocks that a read may still write into stay reserved until the worker says that none is under way,
whatever became of the request. Every load yields one `KvReceived`, which lets its source go.
"""

import heapq
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from twostroke.clock import Clock
from twostroke.connector.base import KvRequest
from twostroke.connector.outbox import Outbox
from twostroke.cost import LinkCost, StepCost, StepWork
from twostroke.kv.manager import IntegrityError
from twostroke.kv_messages import (
    TRANSFER_ID_BYTES,
    KvEndpoint,
    KvLink,
    KvLoad,
    KvLoadEnd,
    KvReady,
    KvReceive,
    KvReceived,
    KvTicket,
)

_HELLO_S = 10.0  # that a handshake is waited for


class _State(IntEnum):
    WAITING = 0  # for blocks
    LOADING = 1
    GIVEN_UP = 2  # the request has ended; reads may be under way


@dataclass(slots=True)
class _Load:
    """One load; its id is never used again. `ticket` is the newest that is known."""

    load_id: int
    uid: int
    handle: int
    options: KvReceive
    deadline_s: float
    state: _State = _State.WAITING
    ticket: KvTicket | None = None
    is_complete: bool = False  # the ticket covers all that was asked for
    first_token: int = 0
    num_told: int = 0  # tokens that the worker was told to read up to; 0: it knows nothing of it
    last_plan: int = 0  # the last one that told of a piece; 0: none has
    is_told_all: bool = False
    block_ids: Sequence[int] = ()
    source: str = ""  # engine id of the last ticket that the worker was told of
    reason: str = ""
    error: str = ""
    num_reminders: int = 0


def ticket_problem(ticket: KvTicket, num_tokens: int, *, is_last: bool) -> str | None:
    """Why a ticket cannot serve a load of a prompt's first `num_tokens` tokens, or None."""
    needed = -(-ticket.num_tokens // ticket.endpoint.layout.block_size)
    fits = ticket.num_tokens == num_tokens if is_last else 0 < ticket.num_tokens <= num_tokens
    if not fits or len(ticket.block_ids) < needed or len(ticket.transfer_id) != TRANSFER_ID_BYTES:
        return (
            f"KV transfer failed: a ticket of {len(ticket.block_ids)} blocks for "
            f"{ticket.num_tokens:,} tokens does not serve a prompt of {num_tokens:,}; try again"
        )
    return None


class Loads:
    """All loads of one engine, from the arrival of their requests to the end of the last read.

    A load given up whose end is not reported within `quarantine_s` is given up once more, in case
    the report was lost; and if that does not help, its source is disconnected, which ends all reads
    from there.
    """

    def __init__(
        self,
        clock: Clock,
        outbox: Outbox,
        *,
        step_cost: StepCost | None,
        bytes_per_token: int,
        quarantine_s: float,
    ) -> None:
        self._clock = clock
        self._outbox = outbox
        self._step_cost = step_cost
        self._bytes_per_token = bytes_per_token
        self._quarantine_s = quarantine_s
        self._loads: dict[int, _Load] = {}  # by load id
        self._by_uid: dict[int, _Load] = {}
        self._by_handle: dict[int, _Load] = {}  # of live requests
        self._awaited: set[int] = set()  # load ids of which the worker will report the end
        self._met: set[str] = set()  # engines that the worker was told of
        self._connecting: dict[str, float] = {}  # since when; the worker will say how it went
        self._links: dict[str, LinkCost] = {}
        self._deadlines: list[tuple[float, int]] = []  # heap of (time, load id)
        self._next_id = 0
        self.num_failed = 0
        self.num_unknown = 0

    @property
    def awaits_report(self) -> bool:
        """Whether the worker will have something to say without being told anything."""
        return bool(self._awaited or self._connecting)

    # ------------------------------------------------------------ before the load

    def new(self, request: KvRequest, options: KvReceive) -> None:
        """A request whose prompt comes from elsewhere has arrived."""
        self._next_id += 1
        load = _Load(
            load_id=self._next_id,
            uid=request.uid,
            handle=request.handle,
            options=options,
            deadline_s=self._clock.now() + options.timeout_s,
            ticket=options.ticket,
            is_complete=options.ticket is not None,
        )
        self._loads[load.load_id] = load
        self._by_uid[load.uid] = load
        self._by_handle[load.handle] = load
        heapq.heappush(self._deadlines, (load.deadline_s, load.load_id))

    def missing_tokens(self, request: KvRequest, num_cached: int) -> int:
        """How many tokens behind a prefix hit are to be loaded; 0 if the request runs as it is."""
        load = self._by_uid.get(request.uid)
        if load is None:
            return 0
        missing = load.options.num_tokens - num_cached
        # The last token of a prompt is computed here in any case, to sample the next.
        if num_cached >= min(load.options.num_tokens, request.num_prompt_tokens - 1):
            load.reason = "cached"
        elif self._is_cheaper_here(load, num_cached, missing):
            load.reason = "recompute"
        else:
            return missing
        return 0

    def _is_cheaper_here(self, load: _Load, num_cached: int, missing: int) -> bool:
        """Whether computing takes no longer than reading would, as far as both are known."""
        if self._step_cost is None or load.ticket is None:
            return False
        link = self._links.get(load.ticket.endpoint.engine_id)
        if link is None:
            return False
        layout = load.ticket.endpoint.layout
        num_messages = -(-missing // layout.block_size) * layout.tensor_parallel_size
        move_s = link.transfer_s(num_messages, missing * self._bytes_per_token)
        work = StepWork(missing, 1, 1, num_cached, missing * (num_cached + missing / 2))
        return self._step_cost.step_s(work) <= move_s

    # ------------------------------------------------------------ the load

    def allocated(self, uid: int, block_ids: Sequence[int], num_external: int) -> None:
        """The request got its blocks: the load begins, unless there is nothing to load."""
        load = self._by_uid.get(uid)
        if load is None or load.state is not _State.WAITING:
            return
        if num_external == 0:
            self._end(load, KvReceived(handle=load.handle, reason=load.reason))
            return
        load.state = _State.LOADING
        load.first_token = load.num_told = load.options.num_tokens - num_external
        load.block_ids = list(block_ids)
        self._tell(load)

    def ready(self, message: KvReady) -> None:
        """A newer ticket for a load that streams."""
        load = self._by_handle.get(message.handle)
        if load is None or load.is_complete:
            self.num_unknown += 1
            return
        asked = load.options.num_tokens
        if problem := ticket_problem(message.ticket, asked, is_last=message.is_last):
            self.fail(load, problem, "bad_ticket")
            return
        load.ticket, load.is_complete = message.ticket, message.is_last
        if load.state is _State.LOADING:
            self._tell(load)

    def _tell(self, load: _Load) -> None:
        """Tell the worker what it can read by now."""
        ticket = load.ticket
        if ticket is None or (ticket.num_tokens <= load.num_told and not load.is_complete):
            return
        self._outbox.commands.loads.append(
            KvLoad(
                load_id=load.load_id,
                ticket=ticket,
                first_token=load.num_told,
                block_ids=np.array(load.block_ids, np.int32),
                is_last=load.is_complete,
            )
        )
        load.source = ticket.endpoint.engine_id
        self._met.add(load.source)
        load.num_told = ticket.num_tokens
        if load.is_complete:
            load.is_told_all = True
            self._awaited.add(load.load_id)

    def left_with(self, plan: int) -> None:
        """What the worker is told now travels with that plan (they count from 1)."""
        for piece in self._outbox.commands.loads:
            if (load := self._loads.get(piece.load_id)) is not None:
                load.last_plan = plan

    def take_pieces(self, num_run: int) -> list[KvLoad]:
        """Pieces of streams that the worker may read at once, given how many plans it has run.

        A first piece waits for its plan: steps before it may still write into its blocks, of those
        who had them before. Later ones only have to come behind the pieces before them.
        """
        taken, left = list[KvLoad](), list[KvLoad]()
        for piece in self._outbox.commands.loads:
            load = self._loads.get(piece.load_id)
            may_go = load is not None and 0 < load.last_plan <= num_run
            (taken if may_go else left).append(piece)
        if taken:
            self._outbox.commands.loads = left
        return taken

    def report(self, end: KvLoadEnd) -> None:
        """The worker: no read of this load is under way any more."""
        load = self._loads.get(end.load_id)
        if load is None or not load.source or not (end.error or load.is_told_all):
            self.num_unknown += 1
            return
        if load.state is _State.GIVEN_UP:
            self._outbox.ends.freed.append(load.uid)
            self._forget(load)
            return
        received = KvReceived(
            handle=load.handle,
            num_bytes=end.num_bytes,
            num_messages=end.num_messages,
            started_s=end.started_s,
            ended_s=end.ended_s,
            read_s=_covered_s(end.reads),
            error=end.error,
        )
        if end.error:
            self.num_failed += 1
            self._outbox.ends.failed.append((load.uid, end.error))
        else:
            received.num_tokens = load.options.num_tokens - load.first_token
            self._outbox.ends.loaded.append(load.uid)
        self._end(load, received)

    # ------------------------------------------------------------ other ends

    def finished(self, request: KvRequest) -> bool:
        """The request has ended, in whatever way; True: a read may still write into its blocks.

        Its source is let go of in either case: what is yet read is thrown away.
        """
        load = self._by_uid.get(request.uid)
        if load is None:
            return False
        if not load.error and request.finish_reason is not None:
            load.reason = request.finish_reason.name.lower()
        received = KvReceived(handle=load.handle, error=load.error, reason=load.reason)
        self._outbox.outputs.received.append(received)
        if not self._is_known_to_worker(load):
            self._forget(load)
            return False
        load.state = _State.GIVEN_UP
        del self._by_handle[load.handle]
        self._awaited.add(load.load_id)
        self._outbox.commands.given_up.append(load.load_id)
        load.deadline_s = self._clock.now() + self._quarantine_s
        heapq.heappush(self._deadlines, (load.deadline_s, load.load_id))
        return True

    def _is_known_to_worker(self, load: _Load) -> bool:
        """Whether a piece of it has left with a plan; those that have not are taken back."""
        pieces = self._outbox.commands.loads
        unheard = [piece for piece in pieces if piece.load_id == load.load_id]
        if not unheard:
            return bool(load.source)
        self._outbox.commands.loads = [p for p in pieces if p.load_id != load.load_id]
        return unheard[0].first_token > load.first_token

    def _end(self, load: _Load, received: KvReceived) -> None:
        """The load is over: its source can be let go of."""
        self._outbox.outputs.received.append(received)
        self._forget(load)

    def _forget(self, load: _Load) -> None:
        del self._loads[load.load_id], self._by_uid[load.uid]
        if self._by_handle.get(load.handle) is load:
            del self._by_handle[load.handle]
        self._awaited.discard(load.load_id)

    def expire(self, now: float) -> None:
        """Fail loads that are late, and remind the worker of those given up."""
        if self._connecting:  # steps are run to hear of these: not for ever
            late = [name for name, start_s in self._connecting.items() if start_s + _HELLO_S <= now]
            for name in late:
                del self._connecting[name]
        while (load := self._first_due()) is not None and load.deadline_s <= now:
            heapq.heappop(self._deadlines)
            if load.state is _State.GIVEN_UP:
                self._remind(load, now)
                continue
            what = "no blocks became free" if load.state is _State.WAITING else "it did not arrive"
            limit = f"limit: {load.options.timeout_s:g} s; try again"
            self.fail(load, f"KV transfer timed out: {what}; {limit}", "late")

    def fail(self, load: _Load, error: str, reason: str) -> None:
        """End its request by an error, the first there is; `finished` then sees to the rest."""
        if load.error:
            return
        self.num_failed += 1
        load.error, load.reason, load.deadline_s = error, reason, math.inf
        self._outbox.ends.failed.append((load.uid, error))

    def _remind(self, load: _Load, now: float) -> None:
        self._outbox.commands.given_up.append(load.load_id)
        if load.num_reminders:
            self.disconnect(load.source)
        load.num_reminders += 1
        load.deadline_s = now + self._quarantine_s
        heapq.heappush(self._deadlines, (load.deadline_s, load.load_id))

    def next_deadline_s(self) -> float | None:
        """When `expire` has something to do."""
        load = self._first_due()
        return None if load is None else load.deadline_s

    def _first_due(self) -> _Load | None:
        """The load whose deadline is next, behind those that are over or have another by now."""
        while self._deadlines:
            deadline_s, load_id = self._deadlines[0]
            load = self._loads.get(load_id)
            if load is not None and load.deadline_s == deadline_s:
                return load
            heapq.heappop(self._deadlines)
        return None

    # ------------------------------------------------------------ peers

    def connect(self, endpoint: KvEndpoint) -> None:
        """Shake hands with an engine ahead of need; once is enough."""
        if endpoint.engine_id not in self._met:
            self._met.add(endpoint.engine_id)
            self._connecting[endpoint.engine_id] = self._clock.now()
            self._outbox.commands.connects.append(endpoint)

    def disconnect(self, engine_id: str) -> None:
        """An engine is gone: nothing more is read from it."""
        self._met.discard(engine_id)
        self._connecting.pop(engine_id, None)
        self._links.pop(engine_id, None)
        self._outbox.commands.disconnects.append(engine_id)
        for load in list(self._loads.values()):
            ticket = load.ticket
            if load.state is _State.WAITING and ticket and ticket.endpoint.engine_id == engine_id:
                error = "KV transfer failed: the engine that holds the prompt is gone; try again"
                self.fail(load, error, "source_gone")

    def link(self, link: KvLink) -> None:
        """The worker has measured a link, or could not."""
        self._connecting.pop(link.engine_id, None)
        if not link.error and link.bytes_per_s > 0:
            self._links[link.engine_id] = LinkCost(
                base_s=link.base_s,
                message_s=link.message_s,
                bytes_per_s=link.bytes_per_s,
                pipelined=link.pipelined,
            )
        self._outbox.outputs.links.append(link)

    # ------------------------------------------------------------ checks

    def held(self) -> set[int]:
        """Uids of ended requests whose blocks a read may still write into."""
        return {load.uid for load in self._loads.values() if load.state is _State.GIVEN_UP}

    def check_integrity(self, unfinished: Collection[int]) -> None:
        """Raise IntegrityError unless each load has a live request or waits for its end."""
        uids = {load.uid for load in self._loads.values()}
        strays = uids - self.held() - set(unfinished)
        if strays or uids != set(self._by_uid) or not self._awaited <= set(self._loads):
            raise IntegrityError(f"loads of requests that are gone: {strays}")


def _covered_s(reads: list[tuple[float, float, int]]) -> float:
    """Seconds in which one of these reads, which come in order of their starts, was under way."""
    covered_s, until_s = 0.0, 0.0
    for start_s, end_s, _ in reads:  # several ranks read side by side
        covered_s += max(0.0, end_s - max(start_s, until_s))
        until_s = max(until_s, end_s)
    return covered_s
