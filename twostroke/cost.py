"""What a step and a transfer cost in seconds: the one model behind routing, planning and the twin.

    step      `StepCost.step_s(work)`            a roofline, a fit, or measured kernels
    transfer  `LinkCost.transfer_s(messages, bytes)`
    host      `HostCost`: what the processes around the device add
    B(t)      `BandwidthCurve`: a link's bandwidth over time

A step's cost follows from a few sums over its rows (`StepWork`), so it can be measured anywhere and
fitted by least squares (`cost_fit`) and kept in a file (`cost_profile`).
"""

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from operator import mul
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from twostroke.arrays import Float64s, Int32s
from twostroke.cost_spread import StepSpread
from twostroke.errors import ConfigError

_T = TypeVar("_T", float, Float64s)
_FEW_ROWS = 32  # for which Python's sums are faster than NumPy's

# ---------------------------------------------------------------- steps


class StepWork(NamedTuple):
    """What a step does. A row of n tokens after c tokens in place adds n to `num_tokens`, c to
    `context_tokens` (KV read) and n * (c + n / 2) to `attended_tokens` (query-key products)."""

    num_tokens: float
    num_rows: float
    num_sampled: float  # rows that yield a token: the LM head runs for these
    context_tokens: float
    attended_tokens: float

    @classmethod
    def of_rows(cls, num_computed: Int32s, num_scheduled: Int32s, num_sampled: int) -> "StepWork":
        """The work of a plan's columns: tokens in place, and tokens to run, by row."""
        if len(num_scheduled) <= _FEW_ROWS:
            contexts, tokens = num_computed.tolist(), num_scheduled.tolist()
            products = sum(map(mul, tokens, contexts)) + sum(map(mul, tokens, tokens)) / 2
            return cls(sum(tokens), len(tokens), num_sampled, sum(contexts), products)
        computed = num_computed.astype(np.float64)
        scheduled = num_scheduled.astype(np.float64)
        num_tokens = float(np.add.reduce(scheduled))
        # Sums of whole numbers and halves are exact, in whatever order.
        attended = float(np.dot(scheduled, computed)) + float(np.dot(scheduled, scheduled)) / 2
        context = float(np.add.reduce(computed))
        return cls(num_tokens, len(num_scheduled), num_sampled, context, attended)

    def decodes_on(self, before: "StepWork") -> bool:
        """Whether it runs the rows of the one before, as many tokens, and each sampled in both: a
        token of each, or with drafts some more, of which not all may have been accepted."""
        return (
            self.num_rows == self.num_sampled == before.num_rows == before.num_sampled
            and self.num_tokens == before.num_tokens
            and self.num_rows <= self.context_tokens - before.context_tokens <= before.num_tokens
        )

    def joins_decodes(self, before: "StepWork") -> bool:
        """Whether both only decode, and a row is new whose prompt another engine has computed."""
        return (
            self.num_tokens == self.num_rows == self.num_sampled
            and before.num_tokens == before.num_rows == before.num_sampled
            and self.num_rows >= before.num_rows
            and not self.decodes_on(before)
        )


class StepColumns(NamedTuple):
    """`StepWork` of many steps that differ in their contexts only: those in columns, by step."""

    num_tokens: float
    num_rows: float
    num_sampled: float
    context_tokens: Float64s
    attended_tokens: Float64s

    @classmethod
    def of_decodes(cls, num_rows: int, context_tokens: int, num_steps: int) -> "StepColumns":
        """`num_steps` steps in a row in which each of `num_rows` rows decodes one token.

        `context_tokens` is the sum over rows before the first step; each step adds `num_rows`.
        """
        context = context_tokens + num_rows * np.arange(num_steps, dtype=np.float64)
        return cls(num_rows, num_rows, num_rows, context, context + num_rows / 2)

    def work(self, index: int) -> StepWork:
        """Of one of them."""
        contexts = float(self.context_tokens[index]), float(self.attended_tokens[index])
        return StepWork(self.num_tokens, self.num_rows, self.num_sampled, *contexts)


class StepCost(Protocol):
    """Predicts how long a step takes on the device."""

    def step_s(self, work: StepWork) -> float: ...

    def step_s_many(self, works: StepColumns) -> Float64s:
        """[steps] The same as `step_s` of each, to the last bit."""
        ...


@dataclass(frozen=True)
class Regime:
    """What steps of more than `beyond` tokens cost more than one of so many: `jump_s`, because
    other kernels run, and `token_s` for each token beyond."""

    beyond: float
    jump_s: float
    token_s: float


@dataclass(frozen=True, kw_only=True)
class LinearStepCost:
    """Seconds as a sum over what a step does, each share measured; none is negative.

    In its tokens the sum is piecewise linear, and without context never falls. Weights are read
    once however few tokens there are, so the first tokens may be all but free (memory-bound) and
    those beyond cost arithmetic; and few tokens may run by kernels of their own. `regimes` (by
    `beyond`) say from where on which `token_s` holds in place of the first one.

    Up to the first of them each context token costs `few_context_s` more: one or two rows have too
    few heads for all threads of a device to read their KV at once.
    """

    base_s: float
    token_s: float = 0.0
    row_s: float = 0.0
    sampled_s: float = 0.0
    context_s: float = 0.0
    attended_s: float = 0.0
    few_context_s: float = 0.0
    regimes: tuple[Regime, ...] = ()

    def __post_init__(self) -> None:
        shares = (self.base_s, self.token_s, self.row_s, self.sampled_s, self.context_s)
        check_numbers("step cost", *shares, self.attended_s, self.few_context_s)
        for it in self.regimes:
            check_numbers("step cost", it.beyond, it.jump_s, it.token_s)
        if any(after.beyond <= before.beyond for before, after in pairwise(self.regimes)):
            raise ConfigError("the regimes of a step cost do not grow; sort them by tokens")

    @cached_property
    def _lines(self) -> tuple[list[float], list[float], list[float], list[float]]:
        """Where regimes begin; and of each, the first included: tokens and seconds at its begin,
        and seconds a token."""
        ends = [it.beyond for it in self.regimes]
        starts, floors, slopes = [0.0], [self.base_s], [self.token_s]
        for it in self.regimes:
            floors.append(floors[-1] + (it.beyond - starts[-1]) * slopes[-1] + it.jump_s)
            starts.append(it.beyond)
            slopes.append(it.token_s)
        return ends, starts, floors, slopes

    def step_s(self, work: StepWork) -> float:
        """Seconds of one step."""
        return self._with_contexts(work, work.context_tokens, work.attended_tokens)

    def step_s_many(self, works: StepColumns) -> Float64s:
        """Seconds of many steps: the same operations in the same order as `step_s`."""
        return self._with_contexts(works, works.context_tokens, works.attended_tokens)

    def _with_contexts(self, work: StepWork | StepColumns, context: _T, attended: _T) -> _T:
        ends, starts, floors, slopes = self._lines
        at = bisect_left(ends, work.num_tokens)
        seconds = floors[at] + (work.num_tokens - starts[at]) * slopes[at]
        seconds += work.num_rows * self.row_s + work.num_sampled * self.sampled_s
        context_s = self.context_s if at else self.context_s + self.few_context_s
        return seconds + context * context_s + attended * self.attended_s


COLD_AFTER_S, COLD_SHARE = 0.1, 0.25
CHANGE_FADES = 0.6  # of what a change costs a step, its share that the next one pays


@dataclass(frozen=True, kw_only=True)
class HostCost:
    """What the processes around the device add, in seconds.

    client ─ frontend ─▶ router ─ ingress ─▶ engine: step ─ gap ─ step
    client ◀─ deliver ── router ◀─ egress ── engine
    P ─ egress ─▶ router ─ ingress, handoff ─▶ D: transfer, step

    `beside_s`, `interrupted_s`: what engines of one host take from each other, memory, caches and
    processors' time. A step that begins while another engine computes takes `beside_s` longer; one
    that computes, `interrupted_s` for each of another's steps that begins meanwhile, with the work
    that it makes for scheduler, router and client.

    `changed_s`: how much longer a step takes that does not only decode on with the rows of the one
    before; the next one takes `CHANGE_FADES` of that longer, and so on. What has begun or ended is
    told to clients meanwhile, and prompts leave caches without the weights: where the device is the
    host's processors, this takes time from the steps. A row whose prompt another engine has
    computed changes two steps: that in which it joins, and the next, while its first token is told.

    `arrival_s`: how much longer a step takes during which a request reaches its engine, and
    `arrivals_s` each further one of the same step: the front end reads them on the host's
    processors. Who comes waits for that step, so late ones are those that newcomers wait for.

    `cold_s`: how much longer a step takes after a pause of `COLD_AFTER_S`, but at most `COLD_SHARE`
    of it: processors that have slept, and the host under them, are slow to begin.
    """

    gap_s: float = 0.0  # the device waits this long between two steps
    gap_row_s: float = 0.0  # and this much longer for each row
    frontend_s: float = 0.0
    frontend_token_s: float = 0.0  # for each prompt token
    frontend_busy_s: float = 0.0  # of its process's time, which requests that come together share
    ingress_s: float = 0.0
    ingress_token_s: float = 0.0
    egress_s: float = 0.0
    egress_row_s: float = 0.0  # for each row of the step
    deliver_s: float = 0.0
    deliver_row_s: float = 0.0
    deliver_first_s: float = 0.0  # and so much longer the first piece of an answer
    handoff_s: float = 0.0  # a prompt that P has computed waits, beside transfer and relays
    beside_s: float = 0.0
    interrupted_s: float = 0.0
    changed_s: float = 0.0
    arrival_s: float = 0.0
    arrivals_s: float = 0.0
    cold_s: float = 0.0
    spread: StepSpread = StepSpread()  # of steps around what they take by all of this

    def __post_init__(self) -> None:
        check_numbers("host cost", self.gap_s, self.gap_row_s, self.ingress_s, self.ingress_token_s)
        check_numbers("host cost", self.frontend_s, self.frontend_token_s, self.frontend_busy_s)
        check_numbers("host cost", self.egress_s, self.egress_row_s, self.cold_s)
        check_numbers("host cost", self.beside_s, self.interrupted_s, self.changed_s)
        check_numbers("host cost", self.deliver_s, self.deliver_row_s, self.handoff_s)
        check_numbers("host cost", self.deliver_first_s, self.arrival_s, self.arrivals_s)

    def changes_s(self, share: float) -> float:
        """How much longer steps take, on average, of which such a share has a change of its own."""
        return self.changed_s * share / (1 - CHANGE_FADES)

    def after_pause_s(self, pause_s: float, step_s: float) -> float:
        """How much longer a step takes that begins after such a pause of its engine."""
        return min(self.cold_s, COLD_SHARE * step_s) if pause_s > COLD_AFTER_S else 0.0


# ---------------------------------------------------------------- transfers


@dataclass(frozen=True, kw_only=True)
class LinkCost:
    """T = base + messages * each + bytes / rate, as measured between two engines.

    `pipelined`: while one message's bytes move the next is being issued, as network cards do, so
    the slower of the two counts: T = base + max(messages * each, bytes / rate).
    """

    base_s: float = 0.0
    message_s: float = 0.0
    bytes_per_s: float
    pipelined: bool = False

    def __post_init__(self) -> None:
        check_numbers("link cost", self.base_s, self.message_s)
        if not 0 < self.bytes_per_s < math.inf:
            raise ConfigError(f"a link's rate is {self.bytes_per_s} bytes/s; it must be over 0")

    def transfer_s(self, num_messages: int, num_bytes: int) -> float:
        """Seconds until `num_bytes` in `num_messages` pieces have arrived, on an idle link."""
        issue_s, move_s = num_messages * self.message_s, num_bytes / self.bytes_per_s
        return self.base_s + (max(issue_s, move_s) if self.pipelined else issue_s + move_s)


@dataclass(frozen=True)
class BandwidthCurve:
    """A link's bandwidth over time: `bytes_per_s[i]` holds from `times_s[i]` to the next.

    The first holds before its time too, the last for ever, unless there is a `period_s`, after
    which it all begins anew.
    """

    times_s: tuple[float, ...]
    bytes_per_s: tuple[float, ...]
    period_s: float | None = None
    _moved: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        times, rates = self.times_s, self.bytes_per_s
        if not times or len(times) != len(rates):
            raise ConfigError(
                f"a bandwidth curve has {len(times)} times and {len(rates)} rates; "
                "it must have as many of each, and at least one"
            )
        check_numbers("bandwidth curve", *rates, *times)
        if any(after <= before for before, after in pairwise(times)):
            raise ConfigError("the times of a bandwidth curve do not grow; sort them")
        if self.period_s is not None:
            if not times[-1] < self.period_s < math.inf or times[0] != 0:
                raise ConfigError(
                    f"a bandwidth curve's period is {self.period_s} s; its times must begin at 0 "
                    f"and end before it, and the last is {times[-1]} s"
                )
            times = (*times, self.period_s)
        spans = [after - before for before, after in pairwise(times)]
        moved = accumulate((r * s for r, s in zip(rates, spans, strict=False)), initial=0.0)
        object.__setattr__(self, "_moved", tuple(moved))

    def rate_at(self, time_s: float) -> float:
        """Bytes per second at `time_s`."""
        if self.period_s is not None:
            time_s %= self.period_s
        return self.bytes_per_s[max(bisect_right(self.times_s, time_s) - 1, 0)]

    def moved_bytes(self, start_s: float, end_s: float) -> float:
        """What moves from `start_s` to `end_s` when nothing else does: the integral of B."""
        return self._since_zero(end_s) - self._since_zero(start_s)

    def end_s(self, start_s: float, num_bytes: float) -> float:
        """When `num_bytes` that begin to move at `start_s` have moved; inf if never."""
        if num_bytes <= 0:
            return start_s
        return max(start_s, self._inverse(self._since_zero(start_s) + num_bytes))

    def _since_zero(self, time_s: float) -> float:
        """The integral of B from the first time on (negative before it)."""
        whole = 0.0
        if self.period_s is not None:
            periods, time_s = divmod(time_s, self.period_s)
            whole = periods * self._moved[-1]
        i = max(bisect_right(self.times_s, time_s) - 1, 0)
        return whole + self._moved[i] + self.bytes_per_s[i] * (time_s - self.times_s[i])

    def _inverse(self, moved: float) -> float:
        """The first time at which that much has moved."""
        offset_s = 0.0
        if self.period_s is not None:
            if self._moved[-1] <= 0:
                return math.inf
            periods = math.ceil(moved / self._moved[-1]) - 1
            offset_s, moved = periods * self.period_s, moved - periods * self._moved[-1]
        # The last stretch that had moved less when it began: stretches without bandwidth end later.
        i = max(
            bisect_right(self._moved[: len(self.times_s)], math.nextafter(moved, -math.inf)) - 1, 0
        )
        rate = self.bytes_per_s[i]
        if rate <= 0:
            return math.inf
        return offset_s + self.times_s[i] + (moved - self._moved[i]) / rate

    @classmethod
    def from_file(cls, path: Path, period_s: float | None = None) -> "BandwidthCurve":
        """Read `seconds,bytes per second` lines; a first line of names is passed over.

        Raises ConfigError for a file that cannot be read, or a line that is no such pair.
        """
        try:
            lines = path.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the bandwidth curve {path}: {error}") from None
        pairs: list[tuple[float, float]] = []
        for number, line in enumerate(lines, 1):
            cells = line.split("#")[0].split(",")
            if not any(cell.strip() for cell in cells):
                continue
            try:
                time_s, rate = map(float, cells)
            except ValueError:
                if not pairs and number == 1:
                    continue
                raise ConfigError(
                    f"line {number} of {path} is {line[:60]!r}; it must be a time in seconds and a "
                    "rate in bytes per second: 0.5,25e9"
                ) from None
            pairs.append((time_s, rate))
        if not pairs:
            raise ConfigError(f"the bandwidth curve {path} has no line")
        times_s, rates = zip(*pairs, strict=True)
        return cls(times_s, rates, period_s)


def check_numbers(name: str, *values: float, least: float = 0.0) -> None:
    """ConfigError unless all are finite and not below `least`."""
    for value in values:
        if not least <= value < math.inf:
            raise ConfigError(f"{name} has a value of {value}; it must be at least {least:g}")
