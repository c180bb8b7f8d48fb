"""Where time went, moment by moment: requests by interval, and what held them up.

A request that waits waits for something. The interval says for what, and where several things can
be the reason (the queue of an engine: compute, seats or memory), the engines' gauges tell them
apart.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from twostroke.arrays import Float64s
from twostroke.ledger import Interval
from twostroke.twin.scenario import EngineResult, Result

_FULL = 0.95  # KV usage, or use of a link, from which on it binds
_LEAST_SHARE = 0.05  # of a request's time; waits below that bind nothing


@dataclass(frozen=True)
class Binding:
    """From `start_s` to `end_s` this held requests up, for that share of their time."""

    start_s: float
    end_s: float
    constraint: str
    share: float
    evidence: str


def edges_of(result: Result, buckets: int) -> Float64s:
    """[buckets + 1] Even cuts of the run."""
    start_s = float(np.nanmin(result.arrival_s)) if len(result.arrival_s) else 0.0
    edges: Float64s = np.linspace(start_s, start_s + max(result.duration_s, 1e-9), buckets + 1)
    return edges


def request_seconds(result: Result, edges: Float64s) -> Float64s:
    """[buckets, intervals] Seconds that requests spent in each interval, in each bucket."""
    requests, intervals, times = result.changes
    order = np.lexsort((np.arange(len(times)), requests))
    requests, intervals, times = requests[order], intervals[order], times[order]
    same = np.zeros(len(times), np.bool_)
    same[:-1] = requests[1:] == requests[:-1]
    ends = np.full(len(times), edges[-1])
    ends[:-1][same[:-1]] = times[1:][same[:-1]]
    table = np.zeros((len(edges) - 1, len(Interval)))
    for interval in Interval:
        chosen = intervals == interval
        before = _passed(times[chosen], edges) - _passed(ends[chosen], edges)
        table[:, interval] = np.diff(before)
    return table


def _passed(times_s: Float64s, edges: Float64s) -> Float64s:
    """[edges] Sum over times of how long ago each is at an edge, 0 for those to come."""
    ordered = np.sort(times_s)
    sums = np.concatenate(([0.0], np.cumsum(ordered)))
    count = np.searchsorted(ordered, edges, side="right")
    passed: Float64s = count * edges - sums[count]
    return passed


def gauge_means(engine: EngineResult, name: str, edges: Float64s) -> Float64s:
    """[buckets] Time-weighted mean of a gauge, which keeps its value until the next sample."""
    times, values = engine.timeline["time_s"], engine.timeline[name]
    if not len(times):
        return np.zeros(len(edges) - 1)
    areas = np.concatenate(([0.0, 0.0], np.cumsum(values[:-1] * np.diff(times))))
    place = np.searchsorted(times, edges, side="right")
    held = np.concatenate(([0.0], values))[place]
    since = edges - np.concatenate(([edges[0]], times))[place]
    area = areas[place] + held * since
    means: Float64s = np.diff(area) / np.diff(edges)
    return means


def link_shares(result: Result, edges: Float64s) -> dict[str, Float64s]:
    """[buckets] Share of each link's bandwidth that was used."""
    shares = {}
    for name, use in result.links.items():
        times, rates = np.array(use.times_s), np.array(use.rates)
        areas = np.concatenate(([0.0], np.cumsum(rates[:-1] * np.diff(times))))
        place = np.maximum(np.searchsorted(times, edges, side="right") - 1, 0)
        moved = np.diff(areas[place] + rates[place] * np.maximum(edges - times[place], 0.0))
        link = result.scenario.link
        curve = link.fabric if name == "fabric" and link.fabric is not None else link.bandwidth
        room = [curve.moved_bytes(a, b) for a, b in pairwise(edges.tolist())]
        shares[name] = moved / np.maximum(np.array(room), 1e-9)
    return shares


def binding_over_time(result: Result, buckets: int = 60) -> list[Binding]:
    """What binds from when to when; neighbours with the same constraint are one."""
    edges = edges_of(result, buckets)
    seconds = request_seconds(result, edges)
    gauges = _Gauges(result, edges)
    found: list[Binding] = []
    for bucket in range(buckets):
        total = float(seconds[bucket].sum())
        waits = {it: float(seconds[bucket, it]) for it in _WAITS}
        # A transfer takes its time on an idle link too.
        if gauges.link[bucket] < _FULL:
            waits[Interval.TRANSFER] = 0.0
        worst = max(waits, key=waits.__getitem__)
        share = waits[worst] / total if total else 0.0
        if share < _LEAST_SHARE:
            constraint, evidence = ("none" if total else "no load"), ""
        else:
            constraint, evidence = gauges.reason(worst, bucket)
        start_s, end_s = float(edges[bucket]), float(edges[bucket + 1])
        if found and found[-1].constraint == constraint:
            last = found.pop()
            length_s = last.end_s - last.start_s
            share = (last.share * length_s + share * (end_s - start_s)) / (end_s - last.start_s)
            start_s, evidence = last.start_s, last.evidence or evidence
        found.append(Binding(start_s, end_s, constraint, share, evidence))
    return found


_WAITS = (
    Interval.QUEUE,
    Interval.HELD,
    Interval.TRANSFER,
    Interval.DECODE_QUEUE,
    Interval.PREEMPTED,
)


class _Gauges:
    """The engines' and links' gauges by bucket, to tell reasons apart."""

    def __init__(self, result: Result, edges: Float64s) -> None:
        self._engines = result.engines
        self._kv = [gauge_means(it, "kv_usage", edges) for it in result.engines]
        self._held = [gauge_means(it, "hold_usage", edges) for it in result.engines]
        self._running = [gauge_means(it, "running", edges) for it in result.engines]
        seats = {g.role: g.config.max_num_seqs for g in result.scenario.engines}
        self._seats = [seats[it.role] for it in result.engines]
        shares = list(link_shares(result, edges).values())
        self.link = np.max(shares, axis=0) if shares else np.zeros(len(edges) - 1)
        self._hold_share = max(g.max_hold_share for g in result.scenario.engines)

    def _most(self, values: list[Float64s], bucket: int, *roles: str) -> float:
        chosen = [
            float(column[bucket])
            for column, engine in zip(values, self._engines, strict=True)
            if engine.role in roles
        ]
        return max(chosen, default=0.0)

    def reason(self, interval: Interval, bucket: int) -> tuple[str, str]:
        """The constraint behind waits in an interval, and the figure that says so."""
        kv = self._most(self._kv, bucket, "decode", "both")
        if interval is Interval.TRANSFER:
            return "link", f"{self.link[bucket]:.0%} of its bandwidth used"
        if interval is Interval.PREEMPTED:
            return "KV on D", f"{kv:.0%} used, requests lose their blocks"
        if interval is Interval.HELD:
            held = self._most(self._held, bucket, "prefill", "both")
            if held >= _FULL * self._hold_share and kv < _FULL:
                if self.link[bucket] >= _FULL:  # they are held because they cannot leave
                    return self.reason(Interval.TRANSFER, bucket)
                return "held KV on P", f"{held:.0%} of its pool waits to be fetched"
            return "KV on D", f"{kv:.0%} used"
        roles = ("prefill", "both") if interval is Interval.QUEUE else ("decode", "both")
        where = {"prefill": "P", "decode": "D"}.get(roles[0], "")
        if not any(engine.role == roles[0] for engine in self._engines):
            where = "the engines"
        kv = self._most(self._kv, bucket, *roles)
        full = [
            running[bucket] >= _FULL * seats
            for running, seats, engine in zip(
                self._running, self._seats, self._engines, strict=True
            )
            if engine.role in roles
        ]
        if any(full):
            return f"seats on {where}", "max_num_seqs requests run"
        if kv >= _FULL - 0.05:
            return f"KV on {where}", f"{kv:.0%} used"
        return f"compute on {where}", "neither seats nor KV are short"
