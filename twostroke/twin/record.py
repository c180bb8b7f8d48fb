"""What happened in a run, in columns: requests, gaps between tokens, and engines over time.

Kept compact, because a run may have a hundred million tokens: a request keeps the times of its
first and last token only, and gaps are counted by value where a step gives all rows the same one.
"""

import struct
from array import array
from itertools import pairwise

import numpy as np

from twostroke.arrays import ONE, Float64s, Int32s, Int64s
from twostroke.ledger import Interval, RequestLedger
from twostroke.messages import EngineStats

NEVER = -1.0

_CHANGE = struct.Struct("<ibd")
_CHANGES = np.dtype([("request", "<i4"), ("interval", "i1"), ("time_s", "<f8")])


class IntervalLog:
    """Every change of interval of every request."""

    def __init__(self) -> None:
        self._rows = bytearray()

    def note(self, request: int, interval: int, time_s: float) -> None:
        """A request enters an interval; -1: it is over."""
        self._rows += _CHANGE.pack(request, interval, time_s)

    def columns(self) -> tuple[Int32s, Int32s, Float64s]:
        """Requests, intervals entered and times, in order of time and then of requests."""
        rows = np.frombuffer(self._rows, _CHANGES)
        requests, times_s = rows["request"], rows["time_s"]
        order = np.lexsort((np.arange(len(times_s)), requests, times_s))
        return requests[order], rows["interval"].astype(np.int32)[order], times_s[order]


class TwinLedger(RequestLedger):
    """The ledger of one request, which also tells the log when an interval begins."""

    __slots__ = ("_index", "_log")

    def __init__(self, arrived_s: float, index: int, log: IntervalLog) -> None:
        super().__init__(arrived_s)
        self._index, self._log = index, log
        log.note(index, Interval.FRONTEND, self.arrived_ns / 1e9)

    def mark(self, boundary: int, time_s: float) -> None:
        before = self._interval
        super().mark(boundary, time_s)
        if self._closed:
            self._log.note(self._index, -1, self._last_ns / 1e9)
        elif self._interval != before:
            self._log.note(self._index, self._interval, self._last_ns / 1e9)

    @property
    def awaits_token(self) -> bool:
        """Whether its next token ends an interval: it was preempted before it."""
        return self._interval == Interval.PREEMPTED


class Gaps:
    """Times between tokens of one request, of all requests: values and how often each came."""

    def __init__(self) -> None:
        self._values = array("d")
        self._runs = array("q")  # of values: how many, and how often each of them came

    def add(self, gaps: list[float]) -> None:
        """One gap of each of some requests."""
        count = len(gaps)
        if gaps.count(gaps[0]) == count:
            self._values.append(gaps[0])
            self._runs.extend((1, count))
        else:
            self._values.extend(gaps)
            self._runs.extend((count, 1))

    def add_many(self, gaps: Float64s, requests: int) -> None:
        """Each of these gaps in each of so many requests."""
        self._values.frombytes(gaps.tobytes())
        self._runs.extend((len(gaps), requests))

    def columns(self) -> tuple[Float64s, Int64s]:
        """Values and counts."""
        lengths, counts = np.frombuffer(self._runs, np.int64).reshape(-1, 2).T
        return np.frombuffer(self._values, np.float64), counts.repeat(lengths)


class Requests:
    """n requests of a run, by the index that they have in the workload."""

    def __init__(self, count: int, first_later_s: float = 0.0) -> None:
        """`first_later_s`: what the first token of an answer takes longer to its client."""
        self._first_later_s = first_later_s
        self.arrival_s = np.full(count, NEVER)
        self.first_s = np.full(count, NEVER)
        self.last_s = np.full(count, NEVER)
        self.end_s = np.full(count, NEVER)
        self.num_tokens: Int32s = np.zeros(count, np.int32)
        self.cached_tokens: Int32s = np.zeros(count, np.int32)
        self.gaps = Gaps()
        self.log = IntervalLog()
        self.ledgers: list[TwinLedger | None] = [None] * count
        self.errors: dict[int, str] = {}
        self._per_second: dict[int, int] = {}

    def arrived(self, index: int, time_s: float) -> TwinLedger:
        self.arrival_s[index] = time_s
        ledger = self.ledgers[index] = TwinLedger(time_s, index, self.log)
        return ledger

    def tokens(self, handles: Int64s, time_s: float) -> None:
        """Each of these, at least one, got one token."""
        before = self.last_s[handles].tolist()
        # What follows a first token reaches its client no sooner.
        is_late = bool(self._first_later_s)
        self.last_s[handles] = [max(it, time_s) for it in before] if is_late else time_s
        self.num_tokens[handles] += ONE
        second = int(time_s)
        self._per_second[second] = self._per_second.get(second, 0) + len(before)
        if NEVER in before:
            new = handles[self.first_s[handles] == NEVER]
            self.first_s[new] = self.last_s[new] = time_s + self._first_later_s
        if gaps := [max(time_s - it, 0.0) for it in before if it != NEVER]:
            self.gaps.add(gaps)

    def tokens_many(self, handles: Int64s, times_s: Float64s) -> None:
        """Each of these got one token at each of these times, and had some before."""
        rows, start_s, end_s = len(handles), times_s.item(0), times_s.item(-1)
        before = self.last_s[handles].tolist()
        if self._first_later_s and max(before) > start_s:
            for time_s in times_s.tolist():
                self.tokens(handles, time_s)
            return
        self.gaps.add([start_s - it for it in before])
        if len(times_s) > 1:
            self.gaps.add_many(times_s[1:] - times_s[:-1], rows)
        self.last_s[handles] = end_s
        self.num_tokens[handles] += len(times_s)
        first, last = int(start_s), int(end_s)
        if first == last:
            ends = [len(times_s)]
        else:
            ends = times_s.searchsorted(np.arange(first + 1, last + 2)).tolist()
        for second, (start, end) in enumerate(pairwise([0, *ends]), first):
            self._per_second[second] = self._per_second.get(second, 0) + (end - start) * rows

    @property
    def peak_tokens_per_s(self) -> int:
        return max(self._per_second.values(), default=0)

    def intervals_s(self) -> Float64s:
        """[requests, intervals] Seconds spent in each."""
        spent = [
            ledger.spent_ns if ledger is not None else [0] * len(Interval)
            for ledger in self.ledgers
        ]
        table: Float64s = np.array(spent, np.float64).reshape(len(spent), len(Interval)) / 1e9
        return table

    def num_preemptions(self) -> Int32s:
        return np.array(
            [ledger.num_preemptions if ledger is not None else 0 for ledger in self.ledgers],
            np.int32,
        )


_GAUGES = ("running", "waiting", "loading", "kv_usage", "hold_usage")
_GAUGE_ROW = struct.Struct("<d5f")
_GAUGE_ROWS = np.dtype([("time_s", "<f8"), *((name, "<f4") for name in _GAUGES)])


class Timeline:
    """One engine's gauges, at the end of its steps (of skipped ones: of the last)."""

    def __init__(self) -> None:
        self._rows = bytearray()

    def note(self, time_s: float, stats: EngineStats) -> None:
        self._rows += _GAUGE_ROW.pack(
            time_s,
            stats.num_running,
            stats.num_waiting,
            stats.num_loading,
            stats.kv_usage,
            stats.hold_usage,
        )

    def columns(self) -> dict[str, Float64s]:
        """`time_s` and each gauge."""
        rows = np.frombuffer(self._rows, _GAUGE_ROWS)
        return {name: rows[name].astype(np.float64) for name in ("time_s", *_GAUGES)}
