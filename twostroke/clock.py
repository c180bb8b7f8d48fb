"""The two clocks. Decisions are handed one and cannot tell which it is.

`WallClock` reads CLOCK_MONOTONIC, which all processes of a host share, so timestamps taken in
the API process and in the engine core can be subtracted. `VirtualClock` moves only when told.
"""

import time
from typing import Protocol


class Clock(Protocol):
    """A source of monotonic time."""

    def now(self) -> float:
        """Seconds since some fixed moment."""
        ...


class WallClock:
    """The host's monotonic clock."""

    now = staticmethod(time.monotonic)


class VirtualClock:
    """A clock that stands still until `advance_to` moves it forward."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        return self._now_s

    def advance_to(self, time_s: float) -> None:
        """Move to `time_s`; ValueError when that lies in the past."""
        if time_s < self._now_s:
            raise ValueError(f"clock cannot go back: at {self._now_s} s, asked for {time_s} s")
        self._now_s = time_s
