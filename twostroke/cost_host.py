"""What the processes around the devices add, from steps on a common clock and what clients saw.

    client  sent ──frontend, ingress──▶ first step     last step ──egress, deliver──▶ last piece
    device  step ──gap── step ──gap── step       beside: steps while other engines compute too
                                                 cold: steps after a pause
                                                 changed: steps with other rows than before
                                                 arrivals: steps during which requests come

All times are of the host's monotonic clock, so those of different processes can be compared.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import msgspec
import numpy as np

from twostroke.arrays import Bools, Float64s
from twostroke.cost import CHANGE_FADES, COLD_AFTER_S, HostCost, LinearStepCost
from twostroke.cost_fit import FitError, fit_step_cost, robust_fit, work_of
from twostroke.cost_spread import SIZES, StepSpread
from twostroke.trace_steps import Trace, TracedStep

MOST_GAP_S = 0.1  # longer waits between two steps are no overhead, but something that happened
LEAST_STEPS = 8  # fewer say nothing of what happens to them
# A machine that is shared with others has slower minutes. Steps of those in which steps around take
# so much longer than in most are neither fitted to nor part of the spread.
SLOW, AROUND_S = 1.15, 1.0
LONG_S = 0.05  # of a step that takes so long, what a pause before it adds is no part
LEAST_ALONE = 0.2  # of a step's time is its own, whatever others take from it
SHARED_ROUNDS = 2  # of fits to all steps, each with a better idea of what others take
SETTLED = 0.1  # of `HostCost.changed_s`: what takes no more is as if nothing had changed
LEAST_TYPICAL = 0.5  # of all steps; with fewer, nothing is typical


@dataclass(frozen=True)
class Wave:
    """Requests that were sent at the same moment to idle engines, and when answers came."""

    num_requests: int
    prompt_tokens: int  # of each
    sent_s: float
    ended_s: float  # the last piece of the last answer
    first_s: float | None = None  # the first piece of the first one


def fit_costs(
    trace: Trace, waves: Sequence[Wave], relay_s: float = 0.0
) -> tuple[LinearStepCost, HostCost, FitError]:
    """The cost of a step alone, what is around it, and the error of both together on all steps.

    `relay_s` is what a message between router and engine takes; the rest of the way to the client
    and back is the front end's. Raises ValueError when no step says anything.
    """
    steps = trace.steps
    cost, shared = _fit_steps(steps, trace.inputs_s)
    gap_s, gap_row_s = _gaps(steps)
    inward_s, inward_token_s = _inward(steps, waves)
    outward_s, outward_row_s = _outward(steps, waves)
    host = replace(
        shared,
        gap_s=gap_s,
        gap_row_s=gap_row_s,
        frontend_s=max(0.0, inward_s - relay_s),
        frontend_token_s=inward_token_s,
        frontend_busy_s=_busy(trace.inputs_s, waves, inward_s, inward_token_s),
        ingress_s=min(relay_s, inward_s),
        egress_s=min(relay_s, outward_s),
        deliver_s=max(0.0, outward_s - relay_s),
        deliver_row_s=outward_row_s,
        deliver_first_s=_first_later(steps, waves, outward_s + outward_row_s),
        handoff_s=_handoff(trace, waves, relay_s),
    )
    error = error_on(cost, host, steps, trace.inputs_s)
    return cost, replace(host, spread=spread_of(steps, cost, host, trace.inputs_s)), error


def _fit_steps(
    steps: Sequence[TracedStep], inputs_s: Sequence[float]
) -> tuple[LinearStepCost, HostCost]:
    """The cost of a step alone, and what others, arrivals, changes and pauses add to it.

    First of steps that were alone, as far as there are any; then of all, less what the others and
    a change of rows make of it by that: where prompts and decodes have engines of their own, few
    prompts are alone.
    """
    around, pauses = _around(steps, inputs_s), _pauses(steps)
    lone, after_pause = ~around[:, :2].any(axis=1), pauses > COLD_AFTER_S
    is_warm = ~after_pause | (np.array([step.sample.seconds for step in steps]) > LONG_S)
    chosen = lone & is_warm if (lone & is_warm).sum() >= LEAST_STEPS else np.ones_like(lone)
    cost, host, alone = _fit_typical(_chosen(steps, chosen)), HostCost(), list(steps)
    for _ in range(SHARED_ROUNDS):
        host = _shared(steps, around, cost)
        longer_s = around @ _shares(host)
        alone = [
            _taking(step, max(step.sample.seconds - longer, LEAST_ALONE * step.sample.seconds))
            for step, longer in zip(steps, longer_s.tolist(), strict=True)
        ]
        cost = _fit_typical(_chosen(alone, is_warm))
    return cost, replace(host, cold_s=_cold(alone, lone & after_pause, cost))


def _shares(host: HostCost) -> tuple[float, ...]:
    """What each of the columns of `_around` costs."""
    shared = host.beside_s, host.interrupted_s, host.changed_s
    return *shared, host.arrival_s, host.arrivals_s


def _taking(step: TracedStep, seconds: float) -> TracedStep:
    """The same step if it had taken so long."""
    return replace(step, sample=msgspec.structs.replace(step.sample, seconds=seconds))


def _fit_typical(steps: Sequence[TracedStep]) -> LinearStepCost:
    """To steps, less those of slow minutes."""
    cost, _ = fit_step_cost([step.sample for step in steps])
    typical = _chosen(steps, _typical(steps, _ratios(steps, cost)))
    cost, _ = fit_step_cost([step.sample for step in typical])
    return cost


def error_on(
    cost: LinearStepCost,
    host: HostCost,
    steps: Sequence[TracedStep],
    inputs_s: Sequence[float] = (),
) -> FitError:
    """How far off the cost is on these steps, with what all that is around adds; `inputs_s`: when
    messages reached engines."""
    alone_s, longer_s = _predicted(steps, cost, host, inputs_s)
    return FitError.of(alone_s + longer_s, [step.sample.seconds for step in steps])


def spread_of(
    steps: Sequence[TracedStep], cost: LinearStepCost, host: HostCost, inputs_s: Sequence[float]
) -> StepSpread:
    """What steps took of what they take alone, but for what is around and for slow minutes; engine
    by engine, each in order."""
    alone_s, longer_s = _predicted(steps, cost, host, inputs_s)
    measured_s = np.array([step.sample.seconds for step in steps])
    ratios = (measured_s - longer_s) / np.maximum(alone_s, 1e-9)
    typical = _typical(steps, ratios)
    order = [index for own in _by_engine(steps).values() for index in own if typical[index]]
    return StepSpread.of([steps[i].sample.num_tokens for i in order], ratios[order])


def _predicted(
    steps: Sequence[TracedStep], cost: LinearStepCost, host: HostCost, inputs_s: Sequence[float]
) -> tuple[Float64s, Float64s]:
    """[steps] Seconds of each alone, and what pauses, changes, arrivals and other engines add."""
    alone_s = np.array([cost.step_s(work_of(step.sample)) for step in steps])
    longer_s: Float64s = _around(steps, inputs_s) @ _shares(host)
    for index, pause_s in enumerate(_pauses(steps).tolist()):
        longer_s[index] += host.after_pause_s(pause_s, float(alone_s[index]))
    return alone_s, longer_s


def _chosen(steps: Sequence[TracedStep], which: Bools) -> list[TracedStep]:
    return [step for step, it in zip(steps, which, strict=True) if it]


def _typical(steps: Sequence[TracedStep], ratios: Float64s) -> Bools:
    """[steps] Whether steps around each take no longer, of what is predicted, than most of all; or
    all, where that says nothing."""
    starts = np.array([step.start_s for step in steps])
    firsts = starts.searchsorted(starts - AROUND_S)
    ends = starts.searchsorted(starts + AROUND_S, side="right")
    around = np.array([np.median(ratios[a:b]) for a, b in zip(firsts, ends, strict=True)])
    typical: Bools = around <= SLOW * np.median(around)
    return typical if typical.mean() >= LEAST_TYPICAL else np.ones(len(steps), np.bool_)


def _ratios(steps: Sequence[TracedStep], cost: LinearStepCost) -> Float64s:
    """[steps] Seconds over those that the cost says."""
    return np.array([step.sample.seconds / cost.step_s(work_of(step.sample)) for step in steps])


def _by_engine(steps: Sequence[TracedStep]) -> dict[int, list[int]]:
    """Which of the steps are whose."""
    indices: dict[int, list[int]] = defaultdict(list)
    for index, step in enumerate(steps):
        indices[step.engine].append(index)
    return indices


def _around(steps: Sequence[TracedStep], inputs_s: Sequence[float]) -> Float64s:
    """[steps, 5] Whose steps ran when each began (of how many other engines), how many steps of
    others began during it, how much it has of the changes of rows (`HostCost.changed_s`), whether
    requests came during it, and how many but the first.

    With several engines, which of them a message was for is not known, nor whether it was a
    request: there all of that is a part of what the first two columns cost.
    """
    starts, ends = (np.array([getattr(it, name) for it in steps]) for name in ("start_s", "end_s"))
    found = np.zeros((len(steps), 5))
    found[:, 2] = 1.0
    by_engine = _by_engine(steps)
    if len(by_engine) == 1:
        inputs = np.array(inputs_s)
        arrived = inputs.searchsorted(ends) - inputs.searchsorted(starts)
        found[:, 3], found[:, 4] = arrived > 0, np.maximum(arrived - 1, 0)
    for engine, own in by_engine.items():
        works, has_joined = [work_of(steps[index].sample) for index in own], False
        for (last, this), (former, work) in zip(pairwise(own), pairwise(works), strict=True):
            goes_on = work.decodes_on(former) and not has_joined
            found[this, 2] = found[last, 2] * CHANGE_FADES + (not goes_on)
            has_joined = work.joins_decodes(former)
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


def _shared(steps: Sequence[TracedStep], around: Float64s, cost: LinearStepCost) -> HostCost:
    """`HostCost.changed_s`, `beside_s` and `interrupted_s`: medians, so that pauses of the machine
    do not count, against the median of steps of that size that nothing befell, so that neither
    does what the cost is off for them. Then `arrival_s` and `arrivals_s`."""
    running, begun, changed, came, more = around.T
    measured = np.array([step.sample.seconds for step in steps])
    ratios = _ratios(steps, cost)
    sizes = np.searchsorted(SIZES, [step.sample.num_tokens for step in steps])
    alone, compared = measured / ratios, np.zeros(len(steps), np.bool_)
    for size in np.unique(sizes):
        same = ratios[(sizes == size) & (around.sum(axis=1) < SETTLED)]
        if len(same) >= LEAST_STEPS:
            alone[sizes == size] *= np.median(same)
            compared |= sizes == size
    lost = measured - alone
    lone, undisturbed, disturbed = running + begun == 0, (running > 0) & (begun == 0), begun > 0
    for_changes = compared & lone & (came == 0) & (changed >= SETTLED)
    changed_s = _weighted_median(lost, changed * for_changes)
    lost -= changed_s * changed
    beside_s = _median(lost[undisturbed] / running[undisturbed])
    rest = lost[disturbed] - beside_s * running[disturbed]
    interrupted_s = _median(rest / begun[disturbed])
    arrival_s, arrivals_s = _arrivals(lost, came * (alone < LONG_S), more)
    return HostCost(
        beside_s=beside_s,
        interrupted_s=interrupted_s,
        changed_s=changed_s,
        arrival_s=arrival_s,
        arrivals_s=arrivals_s,
    )


def _arrivals(lost: Float64s, came: Float64s, more: Float64s) -> tuple[float, float]:
    """`HostCost.arrival_s` and `arrivals_s`, from what steps lost (of long ones that says nothing).

    A mean, for a newcomer waits as long as it takes: mostly 2 ms, but 10 if the front end was given
    a processor for its whole slice. Without the tenths that lost most and least.
    """
    single = lost[(came > 0) & (more == 0)]
    if len(single) < LEAST_STEPS:
        return 0.0, 0.0
    arrival_s = max(0.0, _middle_mean(single) - _middle_mean(lost[came == 0]))
    return arrival_s, _weighted_median(lost - arrival_s, more * came)


def _middle_mean(seconds: Float64s) -> float:
    """Of all but the tenths at both ends."""
    cut = len(seconds) // 10
    return float(np.sort(seconds)[cut : len(seconds) - cut].mean())


def _weighted_median(seconds: Float64s, levels: Float64s) -> float:
    """Of what steps lose at a level of 1, the value that leaves the least sum of errors."""
    which = levels > 0
    if which.sum() < LEAST_STEPS:
        return 0.0
    each = seconds[which] / levels[which]
    order = each.argsort()
    share = levels[which][order].cumsum()
    return max(0.0, float(each[order][share.searchsorted(share[-1] / 2)]))


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
    last_before = _last_before(steps)
    seen = []
    for wave in waves:
        step = last_before(wave.ended_s)
        if step is not None and step.end_s > wave.sent_s:
            seen.append((step.sample.num_sampled, wave.ended_s - step.end_s))
    return _line(seen)


def _first_later(steps: Sequence[TracedStep], waves: Sequence[Wave], outward_s: float) -> float:
    """By how much longer than `outward_s` the first piece of a lone request's answer takes.

    Counted from the end of the step that samples it, for it is of two kinds: it comes at once or,
    where the next step keeps all processors busy, when that is over. Hence a mean, too.
    """
    last_before, starts = _last_before(steps), [step.start_s for step in steps]
    seen = []
    for wave in waves:
        last = last_before(wave.ended_s)
        if wave.num_requests > 1 or wave.first_s is None or last is None:
            continue
        own = steps[bisect_left(starts, wave.sent_s) : bisect_left(starts, wave.first_s)]
        ends = [it.end_s for it in own if it.engine == last.engine and it.sample.num_sampled]
        if ends:
            seen.append(wave.first_s - ends[0] - outward_s)
    return max(0.0, _middle_mean(np.array(seen))) if seen else 0.0


def _last_before(steps: Sequence[TracedStep]) -> Callable[[float], TracedStep | None]:
    """Tells which of the steps that have ended by a time is the last."""
    by_end = sorted(steps, key=lambda step: step.end_s)
    ends = np.array([step.end_s for step in by_end])

    def last_before(time_s: float) -> TracedStep | None:
        count = int(np.searchsorted(ends, time_s, side="right"))
        return by_end[count - 1] if count else None

    return last_before


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
    """(constant, slope), neither negative, through points (x, y); where nearly all have one x, what
    the others say is chance, and there is no slope."""
    if not points:
        return 0.0, 0.0
    x, y = np.array(points, np.float64).T
    if (x != np.median(x)).sum() < LEAST_STEPS:
        x = np.zeros_like(x)
    (constant, slope), _ = robust_fit(np.column_stack([np.ones(len(x)), x]), np.maximum(y, 1e-7))
    return float(constant), float(slope)
