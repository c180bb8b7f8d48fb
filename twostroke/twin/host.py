"""Engines that share a host: while several compute, the steps of each take longer.

    engine 0  ├─── prompts ────────┤                    a step runs at full speed while it is alone,
    engine 1       ├decode┤├decode┤├d┤├d┤               and at 1 / slowdown among several

What a step lacks is brought up to date whenever somebody asks. When it will end is told as if no
other step began before: whoever is woken then asks again (`is_due`), and is late for nothing.
"""

import math
from typing import Any

from twostroke.cost import HostCost
from twostroke.messages import StepResult
from twostroke.twin.executor import CostExecutor, RunningPlan

_NOTHING_S = 1e-9  # less than this is left of a step that is over: sums are rounded


class SharedHost:
    """The engines of one host."""

    def __init__(self, cost: HostCost) -> None:
        self.members: list[SharedHostExecutor] = []
        self._cost = cost
        self._now = -math.inf  # up to which all steps are advanced

    def advance(self, now: float) -> None:
        """Bring what each step lacks up to date."""
        while self._now < now:
            self._now = self._run_until(now, [m for m in self.members if m.lacks_s > 0])

    def end_s(self, member: "SharedHostExecutor") -> float:
        """When the step of this engine is over, if no other begins that is not known of."""
        now, lacks_s = self._now, [it.lacks_s for it in self.members]
        while member.lacks_s > _NOTHING_S:
            self._now = self._run_until(math.inf, [m for m in self.members if m.lacks_s > 0])
        end_s, self._now = self._now, now
        for it, left_s in zip(self.members, lacks_s, strict=True):
            it.lacks_s = left_s
        return end_s

    def _run_until(self, limit_s: float, steps: "list[SharedHostExecutor]") -> float:
        """Run all steps until one of them begins or ends, but not beyond `limit_s`: until then."""
        computing = [it for it in steps if it.start_s <= self._now]
        until_s = min([limit_s, *(it.start_s for it in steps if it.start_s > self._now)])
        factors = [
            self._cost.slowdown_of(len(computing), has_prompts=it.has_prompts) for it in computing
        ]
        ends = [it.lacks_s * factor for it, factor in zip(computing, factors, strict=True)]
        span_s = min([until_s - self._now, *ends])
        for it, factor in zip(computing, factors, strict=True):
            it.lacks_s -= span_s / factor
            if it.lacks_s <= _NOTHING_S:
                it.lacks_s = 0.0
        return until_s if span_s >= until_s - self._now else self._now + span_s


class SharedHostExecutor(CostExecutor):
    """The device of one engine of such a host."""

    def __init__(self, shared: SharedHost, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.lacks_s = 0.0  # of the step that runs, or is about to: what it would take alone
        self.start_s = 0.0
        self.has_prompts = False
        self._shared = shared
        self._step: RunningPlan | None = None
        shared.members.append(self)

    def _resolve(self) -> None:
        """The oldest plan runs, or waits for transfers if it has no rows; the others wait for it.

        A step's end is not known for certain before it is over, but that it has begun is.
        """
        it = self._running[0] if self._running else None
        if it is None:
            return
        if it is self._step:
            self._stop_waiting(it)
            return
        self._step = it
        self._shared.advance(self._clock.now())
        if len(it.plan.slots):
            it.start_s = max(it.submitted_s, self._ended_s + it.gap_s)
            self.start_s, self.lacks_s = it.start_s, it.seconds
            self.has_prompts = int(it.plan.num_scheduled.sum()) > len(it.plan.slots)
            self.command(it)
        elif it.end_s is None:
            it.start_s = max(it.submitted_s, self._ended_s)
            self.command(it)
            it.end_s = it.start_s + self._idle_s()

    def collect(self) -> StepResult:
        it, now = self._running[0], self._clock.now()
        if len(it.plan.slots):
            longer_s = now - it.start_s - it.seconds
            self.busy_s += longer_s
            self.prefill_s += longer_s if self.has_prompts else 0.0
        return super().collect()

    @property
    def end_of_oldest_s(self) -> float:
        """When to ask again whether it is due: at its end, if no other step begins before."""
        end_s = self._running[0].end_s
        return self._shared.end_s(self) if end_s is None else end_s

    @property
    def is_due(self) -> bool:
        self._shared.advance(self._clock.now())
        return self._running[0].end_s is not None or self.lacks_s <= 0
