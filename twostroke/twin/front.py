"""The front end of a server in the twin: the way between its clients and its router.

One process does all of it, a bit of each request in turn: what it is busy with is shared by those
that have come meanwhile, so of a burst all are late. The rest of the way takes its time beside.
"""

import math
from collections import deque

import numpy as np

from twostroke.arrays import Float64s
from twostroke.cost import HostCost
from twostroke.messages import AddRequest


class FrontEnd:
    """Delays on the way in and out; what comes of one engine reaches clients in its order."""

    def __init__(self, host: HostCost) -> None:
        self._host = host
        self._open: deque[tuple[float, AddRequest]] = deque()  # and how much each is to be given
        self._given_s = 0.0  # of its time, to each that was open all along
        self._now_s = 0.0
        self._last_s: dict[int, float] = {}  # when clients had the last of each engine

    # ------------------------------------------------------------ in

    @property
    def takes_time(self) -> bool:
        """Whether the way in takes any."""
        host = self._host
        return host.frontend_s + host.frontend_token_s + host.frontend_busy_s > 0

    def send(self, request: AddRequest, now: float) -> None:
        """A client sends a request."""
        self._advance(now)
        self._open.append((self._given_s + self._host.frontend_busy_s, request))

    @property
    def next_s(self) -> float:
        """When it is done with the next request, if no other comes; inf: there is none."""
        if not self._open:
            return math.inf
        return self._now_s + max(0.0, self._open[0][0] - self._given_s) * len(self._open)

    def done(self, now: float) -> list[tuple[float, AddRequest]]:
        """Those that it is done with at `next_s`, each with when the router has it."""
        due_s = self._open[0][0] if self._open else math.inf
        self._advance(now)
        host, ready = self._host, []
        while self._open and self._open[0][0] <= due_s:
            _, request = self._open.popleft()
            rest_s = max(0.0, host.frontend_s - host.frontend_busy_s)
            rest_s += host.frontend_token_s * len(request.prompt_token_ids)
            ready.append((now + rest_s, request))
        self._given_s = max(self._given_s, due_s) if ready else self._given_s
        return ready

    def _advance(self, now: float) -> None:
        if self._open:
            self._given_s += (now - self._now_s) / len(self._open)
        self._now_s = now

    # ------------------------------------------------------------ out

    def delivered_s(self, engine: int, time_s: float, rows: int) -> float:
        """When clients have what the router has of an engine at `time_s`, of so many requests."""
        out_s = time_s + (self._host.deliver_s + self._host.deliver_row_s * rows)
        out_s = self._last_s[engine] = max(out_s, self._last_s.get(engine, 0.0))
        return out_s

    def delivered_many(self, engine: int, times_s: Float64s, rows: int) -> Float64s:
        """The same for many steps in a row."""
        delay_s = self._host.deliver_s + self._host.deliver_row_s * rows
        out_s = delayed(times_s, delay_s, self._last_s.get(engine, 0.0))
        self._last_s[engine] = out_s.item(-1)
        return out_s


def delayed(times_s: Float64s, delay_s: float, least_s: float) -> Float64s:
    """Times that do not fall, at least one, so much later, but not before `least_s`."""
    later_s = times_s + delay_s if delay_s else times_s
    return later_s if later_s[0] >= least_s else np.maximum(later_s, least_s)
