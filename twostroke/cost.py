"""What a step and a transfer cost in seconds: the one model behind routing, planning and the twin.

    step      `StepCost.step_s(work)`            a roofline, a fit, or measured kernels
    transfer  `LinkCost.transfer_s(messages, bytes)` = base + messages * each + bytes / rate

A step's cost follows from a few sums over its rows (`StepWork`), so it can be measured anywhere and
fitted by least squares.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol


class StepWork(NamedTuple):
    """What a step does. A row of n tokens after c tokens in place adds n to `num_tokens`, c to
    `context_tokens` (KV read) and n * (c + n / 2) to `attended_tokens` (query-key products)."""

    num_tokens: float
    num_rows: float
    num_sampled: float  # rows that yield a token: the LM head runs for these
    context_tokens: float
    attended_tokens: float


class StepCost(Protocol):
    """Predicts how long a step takes on the device."""

    def step_s(self, work: StepWork) -> float: ...


@dataclass(frozen=True, kw_only=True)
class LinkCost:
    """T = base + messages * each + bytes / rate, as measured between two engines."""

    base_s: float = 0.0
    message_s: float = 0.0
    bytes_per_s: float

    def transfer_s(self, num_messages: int, num_bytes: int) -> float:
        """Seconds until `num_bytes` in `num_messages` pieces have arrived, on an idle link."""
        return self.base_s + num_messages * self.message_s + num_bytes / self.bytes_per_s
