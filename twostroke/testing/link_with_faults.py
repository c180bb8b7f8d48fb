"""A KV connector's worker half on a virtual clock, to which anything can happen.

    read of a piece    t0 ─ first half copied ─ second half copied ─ lease word looked at ─▶ over

Between any two of these moments engines run steps, clear words, reuse blocks and die. A reader that
went by the word alone, or a scheduler that freed too early, ends up with wrong KV, and `fake_kv`
makes that visible.
"""

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from twostroke.clock import VirtualClock
from twostroke.kv_messages import KvCommands, KvEndpoint, KvLink, KvLoad, KvLoadEnd, KvReport
from twostroke.testing.fake_kv import FakePool


class Fault(Enum):
    """What becomes of a load."""

    NONE = "none"
    SLOW = "slow"
    STALL = "stall"  # a read hangs until its source is destroyed
    ERROR = "error"  # the second half does not arrive
    LOST = "lost"  # all goes well, and the report is lost
    LATE = "late"  # and the report is late
    TWICE = "twice"  # and it is reported twice


class FakeNetwork:
    """Engines' pools by engine id, and everything that happens later.

    `read_s` is what half a piece takes; `fault` is asked once a load.
    """

    def __init__(
        self,
        clock: VirtualClock,
        *,
        read_s: float = 0.01,
        slow_s: float = 1.0,
        fault: Callable[[], Fault] = lambda: Fault.NONE,
    ) -> None:
        self.clock = clock
        self.read_s = read_s
        self.slow_s = slow_s
        self.fault = fault
        self._pools: dict[str, FakePool] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = 0

    def join(self, engine_id: str, pool: FakePool) -> None:
        self._pools[engine_id] = pool

    def leave(self, engine_id: str) -> None:
        """The engine is dead: reads from it fail from now on."""
        self._pools.pop(engine_id, None)

    def pool_of(self, engine_id: str) -> FakePool | None:
        return self._pools.get(engine_id)

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Call `action` then. Ties are kept in order."""
        self._num_events += 1
        heapq.heappush(self._events, (self.clock.now() + seconds, self._num_events, action))

    @property
    def next_event_s(self) -> float | None:
        return self._events[0][0] if self._events else None

    def run(self, until: Callable[[], bool], limit_s: float) -> bool:
        """Let time pass until a condition holds (True) or the limit is reached."""
        while not until():
            if not self._events or self._events[0][0] > limit_s:
                return False
            time_s, _, action = heapq.heappop(self._events)
            self.clock.advance_to(max(time_s, self.clock.now()))
            action()
        return True


@dataclass(eq=False)
class _Load:
    load_id: int
    source: str  # engine id
    fault: Fault
    end: KvLoadEnd
    pieces: deque[KvLoad] = field(default_factory=deque)
    is_reading: bool = False
    given_up: str = ""
    is_over: bool = False


@dataclass(eq=False)
class _Read:
    """One piece on its way."""

    link: "LinkWithFaults"
    load: _Load
    piece: KvLoad
    half_s: float

    @property
    def _source(self) -> FakePool | None:
        return self.link.network.pool_of(self.piece.ticket.endpoint.engine_id)

    def first_half(self) -> None:
        first, last = self.piece.first_token, self.piece.ticket.num_tokens
        if not self.link.is_gone(self.load):
            self._copy(first, (first + last) // 2, self.half_s, self.second_half)

    def second_half(self) -> None:
        first, last = self.piece.first_token, self.piece.ticket.num_tokens
        if self.link.is_gone(self.load):
            return
        if self.load.fault is Fault.ERROR:
            self._over("connection lost")
        else:
            self._copy((first + last) // 2, last, self.link.network.read_s, self.look_at_word)

    def look_at_word(self) -> None:
        if self.link.is_gone(self.load):
            return
        if self._source is None:
            self._over("connection lost")
        else:
            self._over("" if self._source.honours(self.piece.ticket) else "the lease ended")

    def _copy(self, start: int, stop: int, then_s: float, then: Callable[[], None]) -> None:
        blocks, source = self.piece.ticket.block_ids.tolist(), self._source
        if source is None:
            self._over("nobody answers by that engine id")
        elif not all(0 < block < len(source.kv) for block in blocks):
            self._over("the ticket names blocks that do not exist")
        else:
            kv = source.read(blocks, start, stop)
            self.link.pool.write(self.piece.block_ids.tolist(), start, kv)
            self.load.end.num_bytes += kv.nbytes
            self.load.end.num_messages += 1
            self.link.network.after(then_s, then)

    def _over(self, error: str) -> None:
        self.link.piece_over(self.load, self.piece, error)


class LinkWithFaults:
    """`KvConnectorWorker` of one engine over a `FakeNetwork`."""

    def __init__(self, network: FakeNetwork, endpoint: KvEndpoint, pool: FakePool) -> None:
        self.network = network
        self.pool = pool
        self._endpoint = endpoint
        self._loads: dict[int, _Load] = {}
        self._over: set[int] = set()
        self._report = KvReport()
        self._is_open = True
        self.on_report: Callable[[], None] = lambda: None
        network.join(endpoint.engine_id, pool)

    @property
    def endpoint(self) -> KvEndpoint:
        return self._endpoint

    def apply(self, commands: KvCommands) -> None:
        self.pool.set_leases(commands.leases)
        for piece in commands.loads:
            self._add(piece)
        for load_id in commands.given_up:
            self._give_up(load_id)
        for endpoint in commands.connects:
            self._connect(endpoint)
        for engine_id in commands.disconnects:
            for load in [load for load in self._loads.values() if load.source == engine_id]:
                self._end(load, "its engine was disconnected")

    def report(self) -> KvReport | None:
        if not (self._report.loads or self._report.links):
            return None
        report, self._report = self._report, KvReport()
        return report

    def wait(self, timeout_s: float) -> None:
        """Time passes for all alike, by the network's events."""

    def shutdown(self) -> None:
        """The engine is dead, with all that it was reading."""
        self._is_open = False
        self._loads.clear()
        self.network.leave(self._endpoint.engine_id)

    # ------------------------------------------------------------ loads

    def _add(self, piece: KvLoad) -> None:
        if piece.load_id in self._over:
            return
        load = self._loads.get(piece.load_id)
        if load is None:
            load = self._loads[piece.load_id] = _Load(
                piece.load_id,
                piece.ticket.endpoint.engine_id,
                self.network.fault(),
                KvLoadEnd(load_id=piece.load_id),
            )
        load.source = piece.ticket.endpoint.engine_id
        load.pieces.append(piece)
        if not load.is_reading:
            self._read_next(load)

    def _read_next(self, load: _Load) -> None:
        load.is_reading = True
        load.end.started_s = load.end.started_s or self.network.clock.now()
        half_s = self.network.slow_s if load.fault is Fault.SLOW else self.network.read_s
        read = _Read(self, load, load.pieces.popleft(), half_s)
        if load.fault is not Fault.STALL:
            self.network.after(half_s, read.first_half)

    def is_gone(self, load: _Load) -> bool:
        """Whether nobody waits for a read of it any more: it was ended, or this engine is dead."""
        return load.is_over or not self._is_open

    def piece_over(self, load: _Load, piece: KvLoad, error: str) -> None:
        """A read has ended."""
        load.is_reading = False
        if load.given_up or error or piece.is_last:
            self._end(load, load.given_up or error)
        elif load.pieces:
            self._read_next(load)

    def _give_up(self, load_id: int) -> None:
        load = self._loads.get(load_id)
        if load is None:
            self._say(KvLoadEnd(load_id=load_id, error="unknown, or over already"))
            return
        load.given_up = "given up"
        load.pieces.clear()
        if not load.is_reading:
            self._end(load, load.given_up)

    def _end(self, load: _Load, error: str) -> None:
        load.is_over = True
        del self._loads[load.load_id]
        self._over.add(load.load_id)
        load.end.error = error
        load.end.ended_s = self.network.clock.now()
        if load.fault is Fault.LOST:
            return
        if load.fault is Fault.LATE:
            self.network.after(self.network.slow_s * 3, lambda: self._say(load.end))
            return
        self._say(load.end)
        if load.fault is Fault.TWICE:
            self._say(load.end)

    def _say(self, end: KvLoadEnd) -> None:
        if self._is_open:
            self._report.loads.append(end)
            self.on_report()

    # ------------------------------------------------------------ links

    def _connect(self, endpoint: KvEndpoint) -> None:
        link = KvLink(engine_id=endpoint.engine_id)

        def answer() -> None:
            if self.network.pool_of(endpoint.engine_id) is None:
                link.error = "nobody answers by that engine id"
            else:
                link.base_s, link.message_s, link.bytes_per_s = 0.001, 0.0001, 1e9
            if self._is_open:
                self._report.links.append(link)
                self.on_report()

        self.network.after(self.network.read_s, answer)
