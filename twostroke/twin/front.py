"""The front end of a server in the twin: the way between its clients and its router."""

import numpy as np

from twostroke.arrays import Float64s
from twostroke.cost import HostCost


class FrontEnd:
    """Delays on the way in and out; what comes of one engine reaches clients in its order."""

    def __init__(self, host: HostCost) -> None:
        self._host = host
        self._free_s = 0.0  # when it can look at the next request
        self._last_s: dict[int, float] = {}  # when clients had the last of each engine

    def received_s(self, sent_s: float, num_prompt_tokens: int) -> float:
        """When the router has what a client sends: requests are taken one after the other."""
        host = self._host
        begun_s = max(sent_s, self._free_s)
        self._free_s = begun_s + host.frontend_busy_s
        return begun_s + (host.frontend_s + host.frontend_token_s * num_prompt_tokens)

    def delivered_s(self, engine: int, time_s: float, rows: int) -> float:
        """When clients have what the router has of an engine at `time_s`, of so many requests."""
        out_s = time_s + (self._host.deliver_s + self._host.deliver_row_s * rows)
        out_s = self._last_s[engine] = max(out_s, self._last_s.get(engine, 0.0))
        return out_s

    def delivered_many(self, engine: int, times_s: Float64s, rows: int) -> Float64s:
        """The same for many steps in a row."""
        out_s = times_s + (self._host.deliver_s + self._host.deliver_row_s * rows)
        np.maximum(out_s, self._last_s.get(engine, 0.0), out=out_s)
        self._last_s[engine] = float(out_s[-1])
        return out_s
