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
        piece = load.pieces.popleft()
        load.is_reading = True
        load.end.started_s = load.end.started_s or self.network.clock.now()
        first, last = piece.first_token, piece.ticket.num_tokens
        middle = (first + last) // 2
        half_s = self.network.slow_s if load.fault is Fault.SLOW else self.network.read_s

        def copy(start: int, stop: int) -> str:
            source = self.network.pool_of(piece.ticket.endpoint.engine_id)
            if source is None:
                return "nobody answers by that engine id"
            blocks = piece.ticket.block_ids.tolist()
            if not all(0 < block < len(source.kv) for block in blocks):
                return "the ticket names blocks that do not exist"
            kv = source.read(blocks, start, stop)
            self.pool.write(piece.block_ids.tolist(), start, kv)
            load.end.num_bytes += kv.nbytes
            load.end.num_messages += 1
            return ""

        def first_half() -> None:
            if self._is_gone(load):
                return
            if load.fault is Fault.STALL:
                return
            if error := copy(first, middle):
                self._piece_over(load, piece, error)
            else:
                self.network.after(half_s, second_half)

        def second_half() -> None:
            if self._is_gone(load):
                return
            error = "connection lost" if load.fault is Fault.ERROR else copy(middle, last)
            if error:
                self._piece_over(load, piece, error)
            else:
                self.network.after(self.network.read_s, look_at_word)

        def look_at_word() -> None:
            if self._is_gone(load):
                return
            source = self.network.pool_of(piece.ticket.endpoint.engine_id)
            if source is None:
                error = "connection lost"
            else:
                error = "" if source.honours(piece.ticket) else "the lease ended"
            self._piece_over(load, piece, error)

        self.network.after(half_s, first_half)

    def _is_gone(self, load: _Load) -> bool:
        return load.is_over or not self._is_open

    def _piece_over(self, load: _Load, piece: KvLoad, error: str) -> None:
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
