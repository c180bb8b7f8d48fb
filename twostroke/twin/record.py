"""What happened in a run, in columns: requests, gaps between tokens, and engines over time.

Kept compact, because a run may have a hundred million tokens: a request keeps the times of its
first and last token only, and gaps are counted by value where a step gives all rows the same one.
"""

from array import array
from itertools import pairwise

import numpy as np

from twostroke.arrays import Float64s, Int32s, Int64s
from twostroke.ledger import Interval, RequestLedger
from twostroke.messages import EngineStats

NEVER = -1.0


class IntervalLog:
    """Every change of interval of every request."""

    def __init__(self) -> None:
        self._requests = array("i")
        self._intervals = array("b")
        self._times_s = array("d")

    def note(self, request: int, interval: int, time_s: float) -> None:
        """A request enters an interval; -1: it is over."""
        self._requests.append(request)
        self._intervals.append(interval)
        self._times_s.append(time_s)

    def columns(self) -> tuple[Int32s, Int32s, Float64s]:
        """Requests, intervals entered and times, in order of time and then of requests."""
        requests = np.frombuffer(self._requests, np.int32)
        times_s = np.frombuffer(self._times_s, np.float64)
        order = np.lexsort((np.arange(len(times_s)), requests, times_s))
        intervals = np.frombuffer(self._intervals, np.int8).astype(np.int32)
        return requests[order], intervals[order], times_s[order]


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
        self._counts = array("q")

    def add(self, gaps: Float64s) -> None:
        """One gap of each of some requests."""
        if len(gaps) and np.count_nonzero(gaps == gaps[0]) == len(gaps):
            self._values.append(gaps[0])
            self._counts.append(len(gaps))
        else:
            self._values.frombytes(gaps.tobytes())
            self._counts.frombytes(np.ones(len(gaps), np.int64).tobytes())

    def add_many(self, gaps: Float64s, requests: int) -> None:
        """Each of these gaps in each of so many requests."""
        self._values.frombytes(np.ascontiguousarray(gaps).tobytes())
        self._counts.frombytes(np.full(len(gaps), requests, np.int64).tobytes())

    def columns(self) -> tuple[Float64s, Int64s]:
        """Values and counts."""
        return np.frombuffer(self._values, np.float64), np.frombuffer(self._counts, np.int64)


class Requests:
    """n requests of a run, by the index that they have in the workload."""

    def __init__(self, count: int) -> None:
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
        """Each of these got one token."""
        before = self.last_s[handles]
        self.last_s[handles] = time_s
        self.num_tokens[handles] += 1
        second = int(time_s)
        self._per_second[second] = self._per_second.get(second, 0) + len(handles)
        if np.count_nonzero(new := before < 0):
            self.first_s[handles[new]] = time_s
            before = before[~new]
        if len(before):
            self.gaps.add(time_s - before)

    def tokens_many(self, handles: Int64s, times_s: Float64s) -> None:
        """Each of these got one token at each of these times, and had some before."""
        rows = len(handles)
        self.gaps.add(times_s[0] - self.last_s[handles])
        if len(times_s) > 1:
            self.gaps.add_many(times_s[1:] - times_s[:-1], rows)
        self.last_s[handles] = times_s[-1]
        self.num_tokens[handles] += len(times_s)
        first = int(times_s[0])
        ends = times_s.searchsorted(np.arange(first + 1, int(times_s[-1]) + 2)).tolist()
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


class Timeline:
    """One engine's gauges, at the end of its steps (of skipped ones: of the last)."""

    def __init__(self) -> None:
        self._times_s = array("d")
        self._values = {name: array("f") for name in _GAUGES}

    def note(self, time_s: float, stats: EngineStats) -> None:
        self._times_s.append(time_s)
        values = self._values
        values["running"].append(stats.num_running)
        values["waiting"].append(stats.num_waiting)
        values["loading"].append(stats.num_loading)
        values["kv_usage"].append(stats.kv_usage)
        values["hold_usage"].append(stats.hold_usage)

    def columns(self) -> dict[str, Float64s]:
        """`time_s` and each gauge."""
        columns = {"time_s": np.frombuffer(self._times_s, np.float64)}
        for name, values in self._values.items():
            columns[name] = np.frombuffer(values, np.float32).astype(np.float64)
        return columns
