"""Engines that take every step together: data-parallel ones that share the experts of a model.

They exchange tokens in every sparse layer, so a step of one is a step of all: a round. It begins
when the last one is over and anybody has a plan; each runs its oldest that has not run, and one
without a plan takes part all the same, as vLLM's engines run a dummy batch.

    round        1          2              3
    engine 0  ├ prompts ┤├ decodes   ┤├ prompts ┤
    engine 1  ├ decodes ┤├ (nothing) ┤├ decodes ┤        each waits for the one with most to do
"""

import math
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from twostroke.clock import VirtualClock
from twostroke.cost import StepCost, StepWork
from twostroke.messages import StepPlan
from twostroke.twin.executor import CostExecutor, RunningPlan

_NO_WORK = StepWork(0.0, 0.0, 0.0, 0.0, 0.0)


@runtime_checkable
class GroupStepCost(Protocol):
    """A step cost that knows what engines that step together cost one another."""

    def group_step_s(self, works: Sequence[StepWork]) -> float: ...


def group_step_s(cost: StepCost, works: Sequence[StepWork]) -> float:
    """Seconds of a common step; of a cost that does not know of groups, that of the slowest."""
    if isinstance(cost, GroupStepCost):
        return cost.group_step_s(works)
    return max(cost.step_s(work) for work in works if work.num_rows)


class Lockstep:
    """The rounds of one group of engines."""

    def __init__(self, cost: StepCost) -> None:
        self.members: list[LockstepExecutor] = []
        self.end_s = -math.inf  # of the round under way, or of the last one
        self._cost = cost

    def begin(self, now: float) -> None:
        """A new round, if the last one is over and anybody has a plan."""
        if now < self.end_s:
            return
        plans = [member.next_plan(now) for member in self.members]
        rows = max((len(it.plan.slots) for it in plans if it is not None), default=0)
        if not rows:
            return
        works = [_NO_WORK if it is None else _work_of(it.plan) for it in plans]
        gap_s = max(it.gap_s for it in plans if it is not None)
        start_s = max(now, self.end_s + gap_s)
        seconds = group_step_s(self._cost, works)
        self.end_s = start_s + seconds
        for member, it in zip(self.members, plans, strict=True):
            if it is not None:
                member.busy_s += seconds - it.seconds
                it.start_s, it.end_s = start_s, self.end_s
                member.hear(now)
                member.command(it)

    def lengthen(self, longer_s: float) -> None:
        """The round under way takes so much longer, for all."""
        ended_s, self.end_s = self.end_s, self.end_s + longer_s
        for member in self.members:
            member.end_later(ended_s, longer_s)


class LockstepExecutor(CostExecutor):
    """The device of one engine of such a group."""

    def __init__(self, group: Lockstep, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._group = group
        group.members.append(self)

    def hear(self, now: float) -> None:
        """Its clock may be behind that of the engine that began the round."""
        if isinstance(self._clock, VirtualClock) and now > self._clock.now():
            self._clock.advance_to(now)

    def end_later(self, ended_s: float, longer_s: float) -> None:
        """The round that was to be over at `ended_s` is so much later; whoever is woken then asks
        again."""
        for it in self._running:
            if it.end_s == ended_s:
                it.end_s = ended_s + longer_s
                self.busy_s += longer_s

    def next_plan(self, now: float) -> RunningPlan | None:
        """The oldest plan that has not run, if its turn has come; None: this one has nothing."""
        it = next((it for it in self._running if it.end_s is None or it.end_s > now), None)
        return it if it is not None and it.end_s is None and len(it.plan.slots) else None

    def _resolve(self) -> None:
        """The oldest plan waits for transfers if it has no rows; the others for their rounds."""
        oldest = self._running[0] if self._running else None
        if oldest is not None and not len(oldest.plan.slots):
            if oldest.end_s is None:
                oldest.start_s = max(oldest.submitted_s, self._ended_s)
                self.command(oldest)
                oldest.end_s = oldest.start_s + self._idle_s()
            self._stop_waiting(oldest)
        self._group.begin(self._clock.now())

    def _lengthen(self, oldest: RunningPlan, longer_s: float) -> None:
        self._group.lengthen(longer_s)

    @property
    def end_of_oldest_s(self) -> float:
        """When its round ends; while another one is under way, when that does: ask again then."""
        self._group.begin(self._clock.now())
        end_s = self._running[0].end_s
        return self._group.end_s if end_s is None else end_s

    @property
    def is_due(self) -> bool:
        """Not when another round was waited for, and its own has only begun."""
        self._group.begin(self._clock.now())
        end_s = self._running[0].end_s
        return end_s is not None and (end_s <= self._clock.now() or end_s == math.inf)


def _work_of(plan: StepPlan) -> StepWork:
    return StepWork.of_rows(plan.num_computed, plan.num_scheduled, int(plan.samples.sum()))
