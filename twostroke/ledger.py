"""The wait ledger: where the time of one request went.

    arrived ─ frontend ─▶ sent ─ queue ─▶ scheduled ─ prefill ─▶ first token ─ decode ─▶ finished
                                              ▲                                  │         │
                                              └───── preempted ◀── preemption ◀──┘       egress
                                                                                           ▼
                                                                                        closed
Where prefill and decode run in different engines:

    sent ─ queue ─▶ P computes ─ prefill ─▶ ─ held ─▶ D has blocks ─ transfer ─▶ the KV is there
      ▲       ▲     with streaming D has its blocks before that, and `decode_queue` ▼   │
     held (no room: in the router, or on P)                         decode ◀─ scheduled ┘

Each boundary closes one interval and opens the next, so the intervals sum exactly to the request's
end-to-end latency, whatever the order of events. Times are kept in whole nanoseconds: sums of
floats would not be exact.
"""

from enum import IntEnum

from twostroke.messages import EventKind

# Added to the kinds of the events of a request's two legs, when it has two.
PREFILL_LEG = 64
DECODE_LEG = 128


class Interval(IntEnum):
    """What a request spends its time on."""

    FRONTEND = 0  # from arrival until it is sent to the engine: waiting for it to load, checks
    QUEUE = 1  # on its way to the engine and in the waiting queue
    PREFILL = 2  # from its first step to its first token
    HELD = 3  # waiting for room: in the router, on P, or with its prompt computed, until D has some
    TRANSFER = 4  # its KV is on the way from P to D
    DECODE_QUEUE = 5  # waiting for its turn on D
    DECODE = 6
    PREEMPTED = 7  # waiting again and, once it had tokens, computing again up to the next one
    EGRESS = 8  # finished; its last output is not taken yet


OF_TWO_ENGINES = frozenset({Interval.HELD, Interval.TRANSFER, Interval.DECODE_QUEUE})


class Boundary(IntEnum):
    """What ends an interval: the core's events under their own numbers, then the client's.

    Events of two legs are told apart by what is added to their kinds; those named here matter.
    """

    QUEUED = EventKind.QUEUED
    SCHEDULED = EventKind.SCHEDULED
    FIRST_TOKEN = EventKind.FIRST_TOKEN
    PREEMPTED = EventKind.PREEMPTED
    FINISHED = EventKind.FINISHED
    HELD = EventKind.HELD
    PREFILL_QUEUED = PREFILL_LEG + EventKind.QUEUED
    PREFILL_SCHEDULED = PREFILL_LEG + EventKind.SCHEDULED
    PREFILL_PREEMPTED = PREFILL_LEG + EventKind.PREEMPTED
    PREFILL_FINISHED = PREFILL_LEG + EventKind.FINISHED
    PREFILL_HELD = PREFILL_LEG + EventKind.HELD
    DECODE_QUEUED = DECODE_LEG + EventKind.QUEUED
    DECODE_SCHEDULED = DECODE_LEG + EventKind.SCHEDULED
    DECODE_FIRST_TOKEN = DECODE_LEG + EventKind.FIRST_TOKEN
    DECODE_PREEMPTED = DECODE_LEG + EventKind.PREEMPTED
    DECODE_FINISHED = DECODE_LEG + EventKind.FINISHED
    DECODE_LOADING = DECODE_LEG + EventKind.LOADING
    DECODE_LOADED = DECODE_LEG + EventKind.LOADED
    SENT = 200
    TOKEN = 201
    CLOSED = 202
    MOVED = 203  # it begins again, elsewhere


_SAME: dict[int, int] = {  # wherever it decodes
    Boundary.DECODE_FIRST_TOKEN: Boundary.FIRST_TOKEN,
    Boundary.DECODE_PREEMPTED: Boundary.PREEMPTED,
    Boundary.DECODE_FINISHED: Boundary.FINISHED,
    Boundary.PREFILL_PREEMPTED: Boundary.PREEMPTED,
    Boundary.PREFILL_QUEUED: Boundary.QUEUED,
    Boundary.PREFILL_SCHEDULED: Boundary.SCHEDULED,
    Boundary.PREFILL_HELD: Boundary.HELD,
}
_UNSENT = (Interval.FRONTEND, Interval.HELD)
_BEFORE_PREFILL = (*_UNSENT, Interval.QUEUE)
_DECODING = (Interval.DECODE, Interval.PREEMPTED)


class RequestLedger:
    """The ledger of one sample. Mark boundaries in the order in which they become known.

    A boundary that makes no sense where the request is (a second QUEUED, anything after CLOSED)
    changes nothing; a time before the last one counts as the last one.
    """

    __slots__ = (
        "_closed",
        "_interval",
        "_last_ns",
        "_prefilled",
        "_resumed",
        "_streams",
        "arrived_ns",
        "finished_ns",
        "first_token_ns",
        "num_preemptions",
        "spent_ns",
    )

    def __init__(self, arrived_s: float) -> None:
        self.arrived_ns = self._last_ns = round(arrived_s * 1e9)
        self.first_token_ns: int | None = None
        self.finished_ns: int | None = None
        self.num_preemptions = 0
        self.spent_ns = [0] * len(Interval)
        self._interval = Interval.FRONTEND
        self._prefilled = False  # on P
        self._streams = False  # D had its blocks before that
        self._resumed = False  # scheduled again since the last preemption
        self._closed = False

    def mark(self, boundary: int, time_s: float) -> None:
        """The request passed `boundary` (a Boundary or an EventKind) at `time_s`."""
        if self._closed:
            return
        now_ns = max(round(time_s * 1e9), self._last_ns)
        self.spent_ns[self._interval] += now_ns - self._last_ns
        self._last_ns = now_ns
        if boundary == Boundary.CLOSED:
            self._closed = True
        elif self._interval != Interval.EGRESS:
            self._interval = self._next(boundary)

    def _next(self, boundary: int) -> Interval:
        """The interval that begins; only called before the request has finished."""
        now = self._interval
        match _SAME.get(boundary, boundary):
            case Boundary.SENT | Boundary.QUEUED if now in _UNSENT and not self._prefilled:
                return Interval.QUEUE
            case Boundary.HELD if now in _BEFORE_PREFILL:
                return Interval.HELD
            case Boundary.SCHEDULED if now in _BEFORE_PREFILL and not self._prefilled:
                return Interval.PREFILL
            case Boundary.SCHEDULED if now == Interval.PREEMPTED:
                self._resumed = True
                return Interval.PREFILL if self.first_token_ns is None else now
            case Boundary.FIRST_TOKEN if self.first_token_ns is None:
                self.first_token_ns = self._last_ns
                return Interval.DECODE
            case Boundary.TOKEN if now == Interval.PREEMPTED and self._resumed:
                return Interval.DECODE
            case Boundary.PREEMPTED:
                self.num_preemptions += 1
                self._resumed = False
                return Interval.PREEMPTED
            case Boundary.FINISHED:
                self.finished_ns = self._last_ns
                return Interval.EGRESS
        return self._next_of_two(boundary)

    def _next_of_two(self, boundary: int) -> Interval:
        """Likewise, for what only happens to a request that two engines serve, or a second one."""
        now = self._interval
        match boundary:
            case Boundary.PREFILL_FINISHED if now not in _DECODING or self.first_token_ns is None:
                self._prefilled = True
                return Interval.TRANSFER if self._streams else Interval.HELD
            case Boundary.DECODE_QUEUED if now in _BEFORE_PREFILL and not self._prefilled:
                return Interval.DECODE_QUEUE
            case Boundary.DECODE_LOADING if now not in _DECODING:
                self._streams = not self._prefilled
                return Interval.QUEUE if self._streams else Interval.TRANSFER
            case Boundary.DECODE_LOADED if now not in _DECODING:
                return Interval.DECODE_QUEUE
            case Boundary.DECODE_SCHEDULED if now == Interval.PREEMPTED:
                self._resumed = True
                return Interval.DECODE if self.first_token_ns is None else now
            case Boundary.DECODE_SCHEDULED:
                return Interval.DECODE
            case Boundary.MOVED if self.first_token_ns is None:
                self._prefilled = self._streams = False
                return Interval.HELD
        return now

    def seconds(self, interval: Interval) -> float:
        """Time spent in `interval` up to the last boundary."""
        return self.spent_ns[interval] / 1e9

    def spent(self) -> dict[str, float]:
        """Seconds up to the last boundary by interval, in lower case."""
        return {it.name.lower(): self.spent_ns[it] / 1e9 for it in Interval}

    @property
    def total_ns(self) -> int:
        """From arrival to the last boundary; always the sum of `spent_ns`."""
        return self._last_ns - self.arrived_ns


class LedgerWithTimes(RequestLedger):
    """A ledger that also remembers when each interval began, for a trace."""

    __slots__ = ("_entered",)

    def __init__(self, arrived_s: float) -> None:
        super().__init__(arrived_s)
        self._entered = [(Interval.FRONTEND, self.arrived_ns)]

    def mark(self, boundary: int, time_s: float) -> None:
        before = self._interval
        super().mark(boundary, time_s)
        if self._interval != before:
            self._entered.append((self._interval, self._last_ns))

    def spans(self) -> list[tuple[Interval, float, float]]:
        """Intervals with start and end in seconds, in order, up to the last boundary."""
        ends_ns = [*(start_ns for _, start_ns in self._entered[1:]), self._last_ns]
        return [
            (interval, start_ns / 1e9, end_ns / 1e9)
            for (interval, start_ns), end_ns in zip(self._entered, ends_ns, strict=True)
        ]
