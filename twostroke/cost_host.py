"""What the processes around the devices add, from steps on a common clock and what clients saw.

    client  sent ──frontend, ingress──▶ first step     last step ──egress, deliver──▶ last piece
    device  step ──gap── step ──gap── step       beside: steps while other engines compute too
                                                 cold: steps after a pause

All times are of the host's monotonic clock, so those of different processes can be compared.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from twostroke.arrays import Bools, Float64s
from twostroke.cost import COLD_AFTER_S, HostCost, LinearStepCost
from twostroke.cost_fit import FitError, fit_step_cost, robust_fit, work_of
from twostroke.trace_steps import Trace, TracedStep

MOST_GAP_S = 0.1  # longer waits between two steps are no overhead, but something that happened
LEAST_STEPS = 8  # fewer say nothing of what happens to them


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
    meanwhile, pauses = _meanwhile(steps), _pauses(steps)
    lone = ~meanwhile.any(axis=1)
    plain = lone & (pauses <= COLD_AFTER_S)
    if plain.sum() < LEAST_STEPS:
        plain = np.ones(len(steps), np.bool_)
    cost, _ = fit_step_cost([step.sample for step, it in zip(steps, plain, strict=True) if it])
    gap_s, gap_row_s = _gaps(steps)
    inward_s, inward_token_s = _inward(steps, waves)
    outward_s, outward_row_s = _outward(steps, waves)
    beside_s, interrupted_s = _shared(steps, meanwhile, cost)
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
        handoff_s=_handoff(trace, waves, relay_s),
        beside_s=beside_s,
        interrupted_s=interrupted_s,
        cold_s=_cold(steps, lone & (pauses > COLD_AFTER_S), cost),
    )
    return cost, host, error_on(cost, host, steps)


def error_on(cost: LinearStepCost, host: HostCost, steps: Sequence[TracedStep]) -> FitError:
    """How far off the cost is on these steps, with what pauses and other engines add."""
    predicted = []
    shared_s = _meanwhile(steps) @ (host.beside_s, host.interrupted_s)
    for step, longer_s, pause_s in zip(steps, shared_s, _pauses(steps), strict=True):
        alone_s = cost.step_s(work_of(step.sample))
        predicted.append(alone_s + host.after_pause_s(pause_s, alone_s) + longer_s)
    return FitError.of(predicted, [step.sample.seconds for step in steps])


def _by_engine(steps: Sequence[TracedStep]) -> dict[int, list[int]]:
    """Which of the steps are whose."""
    indices: dict[int, list[int]] = defaultdict(list)
    for index, step in enumerate(steps):
        indices[step.engine].append(index)
    return indices


def _meanwhile(steps: Sequence[TracedStep]) -> Float64s:
    """[steps, 2] Whose steps ran when each began (of how many other engines), and how many steps of
    others began during it."""
    starts, ends = (np.array([getattr(it, name) for it in steps]) for name in ("start_s", "end_s"))
    found = np.zeros((len(steps), 2))
    by_engine = _by_engine(steps)
    for engine, own in by_engine.items():
        for other, theirs in by_engine.items():
            if other == engine:
                continue
            before = starts[theirs].searchsorted(starts[own], side="right")
            last_ends = np.concatenate(([-np.inf], ends[theirs]))[before]
            found[own, 0] += last_ends > starts[own]
            found[own, 1] += starts[theirs].searchsorted(ends[own]) - before
    return found


def _pauses(steps: Sequence[TracedStep]) -> Float64s:
    """[steps] For how long its engine has not computed before each; of the first: endless."""
    pauses = np.full(len(steps), np.inf)
    for own in _by_engine(steps).values():
        for before, after in pairwise(own):
            pauses[after] = steps[after].start_s - steps[before].end_s
    return pauses


def _shared(
    steps: Sequence[TracedStep], meanwhile: Float64s, cost: LinearStepCost
) -> tuple[float, float]:
    """`HostCost.beside_s` and `interrupted_s`: medians, so that neither pauses of the machine nor
    what the cost is off for long steps counts."""
    measured, alone = np.array(
        [(step.sample.seconds, cost.step_s(work_of(step.sample))) for step in steps]
    ).T
    lost, (running, begun) = measured - alone, meanwhile.T
    undisturbed, disturbed = (running > 0) & (begun == 0), begun > 0
    beside_s = _median(lost[undisturbed] / running[undisturbed])
    rest = lost[disturbed] - beside_s * running[disturbed]
    return beside_s, _median(rest / begun[disturbed])


def _median(seconds: Float64s) -> float:
    """Not below zero; of few: zero."""
    return max(0.0, float(np.median(seconds))) if len(seconds) >= LEAST_STEPS else 0.0


def _cold(steps: Sequence[TracedStep], cold: Bools, cost: LinearStepCost) -> float:
    """Seconds that steps after a pause take longer: those that leave the least error.

    The first step of all is left out: it may have compiled something.
    """
    indices = [index for index in np.flatnonzero(cold).tolist() if index]
    if len(indices) < LEAST_STEPS:
        return 0.0
    measured = np.array([steps[index].sample.seconds for index in indices])
    warm = np.array([cost.step_s(work_of(steps[index].sample)) for index in indices])

    def error(cold_s: float) -> float:
        host = HostCost(cold_s=cold_s)
        longer = np.array([host.after_pause_s(np.inf, warm_s) for warm_s in warm.tolist()])
        return float((np.abs(warm + longer - measured) / warm).sum())

    tried: list[float] = [0.0, *np.maximum(measured - warm, 0.0).tolist()]
    return min(tried, key=error)


def _gaps(steps: Sequence[TracedStep]) -> tuple[float, float]:
    """Seconds from a step to the next, and for each row: where the next only decodes on.

    Only there it is known that the next step could have followed at once.
    """
    gaps = []
    for own in _by_engine(steps).values():
        for first, second in pairwise(own):
            before, after = steps[first], steps[second]
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


def _handoff(trace: Trace, waves: Sequence[Wave], relay_s: float) -> float:
    """Seconds from P's last step of a lone prompt to its first on D, but for transfer and relays:
    the messages between them pass several threads, and each of those has to wake."""
    seen = []
    for wave in waves:
        if wave.num_requests > 1:
            continue
        loads = [it for it in trace.loads if wave.sent_s <= it.start_s < wave.ended_s]
        steps = [it for it in trace.steps if wave.sent_s <= it.start_s < wave.ended_s]
        if not loads:
            continue
        first, last = loads[0], loads[-1]
        before = [it.end_s for it in steps if it.engine != last.engine and it.end_s < last.end_s]
        after = [it.start_s for it in steps if it.engine == last.engine and it.start_s > last.end_s]
        if before and after:
            waited_s = max(0.0, first.start_s - max(before)) + min(after) - last.end_s
            seen.append(waited_s - 2 * relay_s)
    return max(0.0, float(np.median(seen))) if seen else 0.0


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(constant, slope), neither negative, through points (x, y)."""
    if not points:
        return 0.0, 0.0
    x, y = np.array(points, np.float64).T
    (constant, slope), _ = robust_fit(np.column_stack([np.ones(len(x)), x]), np.maximum(y, 1e-7))
    return float(constant), float(slope)
