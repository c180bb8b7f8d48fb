"""Links on a virtual clock: transfers in flight share what bandwidth there is, exactly.

    engine 0 ──egress──┐                       ┌──ingress── engine 4
    engine 1 ──egress──┼──── fabric (if any) ──┼──ingress── engine 5
    engine 2 ──egress──┘                       └──ingress── engine 6

A transfer begins with a latency (base and, unless pipelined, so much for each message) and then
moves its bytes over every link on its path at once. At any moment the links are shared max-min
fairly: no transfer could be faster without making a slower one slower still. On one link that is
processor sharing. Bandwidth may change over time in steps, so between two events all rates are
constant, and the next event is computed, not searched for.
"""

import math
from bisect import bisect_right
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from twostroke.cost import BandwidthCurve


def next_change_s(curve: BandwidthCurve, time_s: float) -> float:
    """When the bandwidth changes next, after `time_s`; inf if it never does."""
    if len(curve.times_s) == 1 and curve.period_s is None:
        return math.inf
    start_s = 0.0
    if curve.period_s is not None:
        start_s = math.floor(time_s / curve.period_s) * curve.period_s
    index = bisect_right(curve.times_s, time_s - start_s)
    # What is before the first time has the first rate: no change there.
    while True:
        if index < len(curve.times_s):
            change_s = start_s + curve.times_s[index]
        elif curve.period_s is None:
            return math.inf
        else:
            start_s, index = start_s + curve.period_s, 0
            continue
        if change_s > time_s:
            return change_s
        index += 1


@dataclass(slots=True)
class Flow:
    """A transfer under way. It moves bytes from `starts_s` on, at most `limit` a second."""

    path: tuple[Hashable, ...]
    num_bytes: float
    starts_s: float
    begun_s: float
    limit: float = math.inf
    left: float = 0.0
    rate: float = 0.0


@dataclass
class LinkUse:
    """What a link did, for the report: from times_s[i] on it moved rates[i] bytes a second."""

    times_s: list[float] = field(default_factory=lambda: [0.0])
    rates: list[float] = field(default_factory=lambda: [0.0])

    def note(self, time_s: float, rate: float) -> None:
        if rate == self.rates[-1]:
            return
        if time_s == self.times_s[-1]:
            self.rates[-1] = rate
        else:
            self.times_s.append(time_s)
            self.rates.append(rate)


class Network:
    """Links by name, and the transfers on them. Time moves only by `advance`, never back."""

    def __init__(self, links: Mapping[Hashable, BandwidthCurve], *, record: bool = True) -> None:
        self.links = dict(links)
        self.use = {name: LinkUse() for name in self.links} if record else {}
        self.bytes_moved = dict.fromkeys(self.links, 0.0)
        self.busy_s = dict.fromkeys(self.links, 0.0)
        self._flows: dict[Hashable, Flow] = {}
        self._used: list[Hashable] = []
        self._now_s = 0.0
        self._next_s = math.inf

    def __len__(self) -> int:
        return len(self._flows)

    def start(
        self,
        key: Hashable,
        path: Sequence[Hashable],
        num_bytes: float,
        *,
        now_s: float,
        latency_s: float = 0.0,
        limit: float = math.inf,
    ) -> None:
        """A transfer begins at `now_s`: after `latency_s` its bytes move over all links of `path`.

        `limit` bounds its own rate, in bytes per second.
        """
        if key in self._flows:
            raise ValueError(f"transfer {key} is under way already")
        if not path:
            raise ValueError(f"transfer {key} has no link to move over")
        self._progress(now_s)
        self._flows[key] = Flow(
            tuple(path),
            num_bytes,
            self._now_s + latency_s,
            self._now_s,
            limit,
            left=float(num_bytes),
        )
        self._share()

    def cancel(self, key: Hashable, *, now_s: float) -> float:
        """End a transfer; returns the bytes that were left. Unknown ones: 0."""
        self._progress(now_s)
        flow = self._flows.pop(key, None)
        if flow is None:
            return 0.0
        self._share()
        return flow.left

    def next_event_s(self) -> float:
        """When something ends, begins to move, or a bandwidth changes; inf if nothing will."""
        return self._next_s

    def advance(self, time_s: float) -> list[tuple[Hashable, Flow]]:
        """Move to `time_s`, at most to the next event; what ended by then, in order."""
        self._progress(time_s)
        ended = [
            (key, flow)
            for key, flow in self._flows.items()
            if flow.left <= 0 and flow.starts_s <= time_s
        ]
        for key, _ in ended:
            del self._flows[key]
        if ended or time_s == self._next_s:
            self._share()
        return ended

    def _progress(self, time_s: float) -> None:
        """Bytes move on to `time_s`, at the rates that hold until then."""
        if time_s > self._next_s or time_s < self._now_s:
            raise ValueError(f"at {self._now_s} s, next event {self._next_s} s: not {time_s} s")
        passed_s = time_s - self._now_s
        if passed_s > 0:
            for name in self._used:
                self.busy_s[name] += passed_s
        for flow in self._flows.values():
            if flow.rate > 0:
                # Those whose end this is are at their end, whatever was rounded: also those with so
                # little left that the time for it does not move the clock.
                is_done = self._now_s + flow.left / flow.rate <= time_s
                moved = flow.left if is_done else min(flow.rate * passed_s, flow.left)
                flow.left -= moved
                for name in flow.path:
                    self.bytes_moved[name] += moved
        self._now_s = time_s

    def _share(self) -> None:
        """Rates from now on (max-min fair, by filling up), and the next event."""
        moving: dict[Hashable, Flow] = {}
        upcoming_s = math.inf
        for key, flow in self._flows.items():
            if flow.starts_s > self._now_s:
                upcoming_s = min(upcoming_s, flow.starts_s)
                flow.rate = 0.0
            else:
                moving[key] = flow
        room = {name: curve.rate_at(self._now_s) for name, curve in self.links.items()}
        self._used = self._fill(moving, room)
        for name in self._used:
            upcoming_s = min(upcoming_s, next_change_s(self.links[name], self._now_s))
        for flow in moving.values():
            if flow.left <= 0:
                upcoming_s = self._now_s
            elif flow.rate > 0:
                upcoming_s = min(upcoming_s, self._now_s + flow.left / flow.rate)
        self._next_s = upcoming_s

    def _fill(self, moving: Mapping[Hashable, Flow], room: dict[Hashable, float]) -> list[Hashable]:
        """Give each flow its rate; returns the links in use."""
        on_link: dict[Hashable, dict[Hashable, Flow]] = {}
        limited: list[tuple[float, Hashable]] = []
        for key, flow in moving.items():
            for name in flow.path:
                on_link.setdefault(name, {})[key] = flow
            if flow.limit < math.inf:
                limited.append((flow.limit, key))
        limited.sort(key=lambda item: item[0], reverse=True)
        used = dict.fromkeys(on_link, 0.0)

        def settle(key: Hashable, rate: float) -> None:
            flow = moving[key]
            flow.rate = rate
            for name in flow.path:
                room[name] = max(room[name] - rate, 0.0)
                used[name] += rate
                del on_link[name][key]
                if not on_link[name]:
                    del on_link[name]

        unset = set(moving)
        while on_link:
            tightest = min(on_link, key=lambda name: room[name] / len(on_link[name]))
            share = room[tightest] / len(on_link[tightest])
            while limited and limited[-1][1] not in unset:
                limited.pop()
            if limited and limited[-1][0] <= share:
                key = limited.pop()[1]
                unset.discard(key)
                settle(key, moving[key].limit)
                continue
            for key in list(on_link[tightest]):
                unset.discard(key)
                settle(key, share)
        for name, use in self.use.items():
            use.note(self._now_s, used.get(name, 0.0))
        return list(used)
