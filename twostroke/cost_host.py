"""What the processes around the devices add, from steps on a common clock and what clients saw.

    client  sent ──frontend, ingress──▶ first step     last step ──egress, deliver──▶ last piece
    device  step ──gap── step ──gap── step       slowdown: steps while other engines compute too

All times are of the host's monotonic clock, so those of different processes can be compared.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from twostroke.cost import HostCost, LinearStepCost
from twostroke.cost_fit import FitError, fit_step_cost, robust_fit, work_of
from twostroke.messages import StepSample
from twostroke.trace_steps import Trace, TracedStep

ALONE = 0.02  # a step counts as alone when others compute for at most this share of it
TOGETHER = 0.5  # least share that says something of the slowdown
MOST_GAP_S = 0.1  # longer waits between two steps are no overhead, but something that happened


@dataclass(frozen=True)
class Wave:
    """Requests that were sent at the same moment to idle engines, and when answers came."""

    num_requests: int
    prompt_tokens: int  # of each
    sent_s: float
    ended_s: float  # the last piece of the last answer


def fit_costs(
    trace: Trace, waves: Sequence[Wave], relay_s: float = 0.0
) -> tuple[LinearStepCost, HostCost, FitError]:
    """The cost of a step alone, what is around it, and the error of both together on all steps.

    `relay_s` is what a message between router and engine takes; the rest of the way to the client
    and back is the front end's. Raises ValueError when no step says anything.
    """
    steps = trace.steps
    busy = _overlaps(steps)
    alone = [step.sample for step, others in zip(steps, busy, strict=True) if others <= ALONE]
    cost, _ = fit_step_cost(alone or [step.sample for step in steps])
    slowdown, prompt_slowdown = (_slowdowns(steps, busy, cost, kind) for kind in (False, True))
    gap_s, gap_row_s = _gaps(steps)
    inward_s, inward_token_s = _inward(steps, waves)
    outward_s, outward_row_s = _outward(steps, waves)
    host = HostCost(
        gap_s=gap_s,
        gap_row_s=gap_row_s,
        frontend_s=max(0.0, inward_s - relay_s),
        frontend_token_s=inward_token_s,
        frontend_busy_s=_busy(trace.inputs_s, waves, inward_s, inward_token_s),
        ingress_s=min(relay_s, inward_s),
        egress_s=min(relay_s, outward_s),
        deliver_s=max(0.0, outward_s - relay_s),
        deliver_row_s=outward_row_s,
        slowdown=slowdown,
        prompt_slowdown=prompt_slowdown,
    )
    return cost, host, error_on(cost, host, steps)


def error_on(cost: LinearStepCost, host: HostCost, steps: Sequence[TracedStep]) -> FitError:
    """How far off the cost is on these steps, slowed down for the time that others compute."""
    predicted = []
    for step, others in zip(steps, _overlaps(steps), strict=True):
        alone_s = cost.step_s(work_of(step.sample))
        factors = host.prompt_slowdown if _has_prompts(step.sample) else host.slowdown
        predicted.append(_slowed(alone_s, others, factors))
    return FitError.of(predicted, [step.sample.seconds for step in steps])


def _has_prompts(sample: StepSample) -> bool:
    """Whether the step computes prompts, and does not only decode."""
    return sample.num_tokens > sample.num_rows


def _slowed(alone_s: float, others: float, slowdown: Sequence[float]) -> float:
    """A step while `others` engines compute in the mean: some of it alone, some of it not."""
    rates = 1 / np.array(slowdown)
    return alone_s / float(np.interp(others, np.arange(len(rates)), rates))


def _overlaps(steps: Sequence[TracedStep]) -> list[float]:
    """For each step, how many other engines compute meanwhile, in the mean."""
    by_engine: dict[int, list[TracedStep]] = defaultdict(list)
    for step in steps:
        by_engine[step.engine].append(step)
    busy: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
    for engine, own in by_engine.items():
        starts = np.array([step.start_s for step in own])
        ends = np.array([step.end_s for step in own])
        busy[engine] = starts, ends, np.concatenate(([0.0], np.cumsum(ends - starts)))
    shares = []
    for step in steps:
        seconds = sum(
            _busy_until(times, step.end_s) - _busy_until(times, step.start_s)
            for engine, times in busy.items()
            if engine != step.engine
        )
        shares.append(seconds / (step.end_s - step.start_s))
    return shares


def _busy_until(times: tuple[np.ndarray, np.ndarray, np.ndarray], time_s: float) -> float:
    """Seconds that an engine has computed up to `time_s`."""
    starts, ends, summed = times
    done = int(np.searchsorted(ends, time_s, side="right"))
    under_way = max(0.0, time_s - starts[done]) if done < len(starts) else 0.0
    return float(summed[done]) + under_way


def _slowdowns(
    steps: Sequence[TracedStep], busy: Sequence[float], cost: LinearStepCost, has_prompts: bool
) -> tuple[float, ...]:
    """[engines that compute - 1] How many times longer steps of a kind take, the median of many.

    A step that was alone for a part of its time ran at full speed in that part. The slowdown by
    several others is taken as in proportion to their number.
    """
    num_engines = len({step.engine for step in steps})
    each = []
    for step, others in zip(steps, busy, strict=True):
        if others >= TOGETHER and _has_prompts(step.sample) == has_prompts:
            lost = 1 - cost.step_s(work_of(step.sample)) / step.sample.seconds
            each.append((1 / max(1 - lost / min(others, 1.0), 0.1) - 1) / max(others, 1.0))
    if num_engines < 2 or len(each) < 8:
        return (1.0,)
    slope = max(0.0, float(np.median(each)))
    return tuple(1.0 + slope * count for count in range(num_engines))


def _gaps(steps: Sequence[TracedStep]) -> tuple[float, float]:
    """Seconds from a step to the next, and for each row: where the next only decodes on.

    Only there it is known that the next step could have followed at once.
    """
    by_engine: dict[int, list[TracedStep]] = defaultdict(list)
    for step in steps:
        by_engine[step.engine].append(step)
    gaps = []
    for own in by_engine.values():
        for before, after in pairwise(own):
            goes_on = after.sample.context_tokens == (
                before.sample.context_tokens + before.sample.num_tokens
            )
            gap_s = after.start_s - before.end_s
            if goes_on and before.sample.num_rows == after.sample.num_rows and gap_s < MOST_GAP_S:
                gaps.append((after.sample.num_rows, max(gap_s, 1e-7)))
    return _line(gaps)


def _inward(steps: Sequence[TracedStep], waves: Sequence[Wave]) -> tuple[float, float]:
    """Seconds from sending a lone request to its first step, and for each token of its prompt."""
    starts = np.array([step.start_s for step in steps])
    seen = []
    for wave in waves:
        first = int(np.searchsorted(starts, wave.sent_s))
        if wave.num_requests == 1 and first < len(starts) and starts[first] < wave.ended_s:
            seen.append((wave.prompt_tokens, float(starts[first]) - wave.sent_s))
    return _line(seen)


def _busy(
    inputs_s: Sequence[float], waves: Sequence[Wave], inward_s: float, inward_token_s: float
) -> float:
    """Seconds of the front end that each request of a wave takes from the others: by how much the
    last of them reaches an engine later than a lone one would."""
    times = np.array(inputs_s)
    later = []
    for wave in waves:
        others = wave.num_requests - 1
        last = int(np.searchsorted(times, wave.sent_s)) + others
        if others and last < len(times) and times[last] < wave.ended_s:
            alone_s = inward_s + inward_token_s * wave.prompt_tokens
            later.append((float(times[last]) - wave.sent_s - alone_s) / others)
    return max(0.0, float(np.median(later))) if later else 0.0


def _outward(steps: Sequence[TracedStep], waves: Sequence[Wave]) -> tuple[float, float]:
    """Seconds from a step's end until the client has the last of its tokens, and for each row."""
    by_end = sorted(steps, key=lambda step: step.end_s)
    ends = np.array([step.end_s for step in by_end])
    seen = []
    for wave in waves:
        last = int(np.searchsorted(ends, wave.ended_s, side="right")) - 1
        if last >= 0 and ends[last] > wave.sent_s:
            rows = by_end[last].sample.num_sampled
            seen.append((rows, wave.ended_s - float(ends[last])))
    return _line(seen)


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(constant, slope), neither negative, through points (x, y)."""
    if not points:
        return 0.0, 0.0
    x, y = np.array(points, np.float64).T
    (constant, slope), _ = robust_fit(np.column_stack([np.ones(len(x)), x]), np.maximum(y, 1e-7))
    return float(constant), float(slope)
