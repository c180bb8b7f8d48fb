"""The wait ledger: where the time of one request went.

    arrived ─ frontend ─▶ sent ─ queue ─▶ scheduled ─ prefill ─▶ first token ─ decode ─▶ finished
                                              ▲                                  │         │
                                              └───── preempted ◀── preemption ◀──┘       egress
                                                                                           ▼
                                                                                        closed

Each boundary closes one interval and opens the next, so the intervals sum exactly to the request's
end-to-end latency, whatever the order of events. Times are kept in whole nanoseconds: sums of
floats would not be exact.
"""

from enum import IntEnum

from twostroke.messages import EventKind


class Interval(IntEnum):
    """What a request spends its time on."""

    FRONTEND = 0  # from arrival until it is sent to the engine: waiting for it to load, checks
    QUEUE = 1  # on its way to the engine and in the waiting queue
    PREFILL = 2  # from its first step to its first token
    DECODE = 3
    PREEMPTED = 4  # waiting again and, once it had tokens, computing again up to the next one
    EGRESS = 5  # finished; its last output is not taken yet


class Boundary(IntEnum):
    """What ends an interval: the core's events under their own numbers, then the client's."""

    QUEUED = EventKind.QUEUED
    SCHEDULED = EventKind.SCHEDULED
    FIRST_TOKEN = EventKind.FIRST_TOKEN
    PREEMPTED = EventKind.PREEMPTED
    FINISHED = EventKind.FINISHED
    SENT = 100
    TOKEN = 101
    CLOSED = 102


_BEFORE_PREFILL = (Interval.FRONTEND, Interval.QUEUE)


class RequestLedger:
    """The ledger of one sample. Mark boundaries in the order in which they become known.

    A boundary that makes no sense where the request is (a second QUEUED, anything after CLOSED)
    changes nothing; a time before the last one counts as the last one.
    """

    __slots__ = (
        "_closed",
        "_interval",
        "_last_ns",
        "_resumed",
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
        match boundary:
            case Boundary.SENT | Boundary.QUEUED if now == Interval.FRONTEND:
                return Interval.QUEUE
            case Boundary.SCHEDULED if now in _BEFORE_PREFILL:
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
        return now

    def seconds(self, interval: Interval) -> float:
        """Time spent in `interval` up to the last boundary."""
        return self.spent_ns[interval] / 1e9

    @property
    def total_ns(self) -> int:
        """From arrival to the last boundary; always the sum of `spent_ns`."""
        return self._last_ns - self.arrived_ns
