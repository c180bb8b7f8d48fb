"""Where a step's time goes, as a table: parts with what they read and compute, and the limit."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec


class Ceilings(msgspec.Struct, frozen=True, kw_only=True):
    """What the machine can do at best, measured beside the step."""

    read_gb_per_s: float  # of memory, by all threads
    gflop_per_s: float  # of large matrix products in the model's type
    int8_gflop_per_s: float = 0.0  # and of those in 8 bits, where the model has some


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of work over all layers of a step, measured within it."""

    name: str
    calls: int
    seconds: float
    bytes_read: int
    flops: int
    int8_flops: int = 0  # of these, those in 8 bits

    def limit_s(self, ceilings: Ceilings) -> float:
        """No machine with these ceilings does it faster."""
        computing = (self.flops - self.int8_flops) / ceilings.gflop_per_s
        if self.int8_flops:
            computing += self.int8_flops / ceilings.int8_gflop_per_s
        return max(self.bytes_read / ceilings.read_gb_per_s, computing) / 1e9


@dataclass(frozen=True)
class StepTimes:
    """A step of `rows` requests, each of `tokens` tokens after `context` that are in place."""

    rows: int
    tokens: int
    context: int
    seconds: float  # the whole step, median
    parts: list[Part]

    @property
    def host_s(self) -> float:
        """What is left: planning inputs, copying, Python between the kernels, waking threads."""
        return self.seconds - sum(part.seconds for part in self.parts)


def table_of(step: StepTimes, ceilings: Ceilings) -> str:
    """At most 80 columns; the whole step first."""
    limit_s = sum(part.limit_s(ceilings) for part in step.parts)
    each = f"{step.rows} requests" if step.rows > 1 else "1 request"
    each += f" of {step.tokens} token{'s' if step.tokens > 1 else ''} after {step.context:,}"
    lines = [
        f"{each}: {step.seconds * 1e3:.2f} ms a step; the limit is {limit_s * 1e3:.2f} ms "
        f"({limit_s / step.seconds:.0%})",
        f"{'part':<14}{'calls':>6}{'us':>9}{'share':>7}{'MB read':>9}{'GB/s':>7}{'GFLOP/s':>9}"
        f"{'limit us':>10}{'reached':>9}",
    ]
    for part in step.parts:
        limit = part.limit_s(ceilings)
        lines.append(
            f"{part.name:<14}{part.calls:>6}{part.seconds * 1e6:>9,.0f}"
            f"{part.seconds / step.seconds:>7.0%}{part.bytes_read / 1e6:>9.1f}"
            f"{part.bytes_read / part.seconds / 1e9:>7.1f}{part.flops / part.seconds / 1e9:>9.1f}"
            f"{limit * 1e6:>10,.0f}{limit / part.seconds:>9.0%}"
        )
    lines.append(f"{'host':<14}{'':>6}{step.host_s * 1e6:>9,.0f}{step.host_s / step.seconds:>7.0%}")
    return "\n".join(lines)


def result_of(steps: Sequence[StepTimes], ceilings: Ceilings) -> dict[str, object]:
    """For one line of JSON."""
    return {
        "ceilings": msgspec.to_builtins(ceilings),
        "steps": [
            {
                "rows": step.rows,
                "tokens": step.tokens,
                "context": step.context,
                "seconds": step.seconds,
                "host_s": step.host_s,
                "parts": [
                    msgspec.to_builtins(part) | {"limit_s": part.limit_s(ceilings)}
                    for part in step.parts
                ],
            }
            for step in steps
        ],
    }
