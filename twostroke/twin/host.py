"""What a host adds to its engines: messages on their way, and that they share its processors.

A step beside another engine's takes longer, and whenever one begins, those that compute are late:

    engine 0  ├─── prompts ──────────i───i───i┤         i: `HostCost.interrupted_s`
    engine 1                 ├decode b├decode b├decode b┤  b: `HostCost.beside_s`

A step's end is told as if no other began before: whoever is woken then asks again (`is_due`), and
is late for nothing.
"""

import math
from typing import Any

from twostroke.cost import HostCost
from twostroke.kv_messages import KvReady
from twostroke.messages import AddRequest, StepResult, ToEngine
from twostroke.twin.executor import CostExecutor, RunningPlan


def inward_s(cost: HostCost, message: ToEngine) -> float:
    """How long a message takes from the router to an engine."""
    if isinstance(message, KvReady):
        return cost.ingress_s + cost.handoff_s
    if not isinstance(message, AddRequest):
        return cost.ingress_s
    delay_s = cost.ingress_s + cost.ingress_token_s * len(message.prompt_token_ids)
    receive = message.kv_receive
    is_computed = receive is not None and receive.ticket is not None
    return delay_s + (cost.handoff_s if is_computed else 0.0)


class SharedHost:
    """The engines of one host, and what they take from each other."""

    def __init__(self, cost: HostCost) -> None:
        self.members: list[SharedHostExecutor] = []
        self._cost = cost

    def begin(self, member: "SharedHostExecutor", start_s: float) -> float:
        """A step of this engine begins: others end later. Returns by how much it does itself."""
        others = [it for it in self.members if it is not member and it.step_end_s > start_s]
        for it in others:
            it.step_end_s += self._cost.interrupted_s
        return self._cost.beside_s * len(others)


class SharedHostExecutor(CostExecutor):
    """The device of one engine of such a host."""

    def __init__(self, shared: SharedHost, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.step_end_s = -math.inf  # of the step that runs, or ran last, as far as is known
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
        if len(it.plan.slots):
            it.start_s = max(it.submitted_s, self._ended_s + it.gap_s)
            self.step_end_s = it.start_s + it.seconds + self._shared.begin(self, it.start_s)
            self.command(it)
        elif it.end_s is None:
            it.start_s = max(it.submitted_s, self._ended_s)
            self.command(it)
            it.end_s = it.start_s + self._idle_s()

    def _lengthen(self, oldest: RunningPlan, longer_s: float) -> None:
        self.step_end_s += longer_s  # `collect` counts it

    def collect(self) -> StepResult:
        it, now = self._running[0], self._clock.now()
        if len(it.plan.slots):
            longer_s = now - it.start_s - it.seconds
            self.busy_s += longer_s
            has_prompts = int(it.plan.num_scheduled.sum()) > len(it.plan.slots)
            self.prefill_s += longer_s if has_prompts else 0.0
        return super().collect()

    @property
    def end_of_oldest_s(self) -> float:
        """When to ask again whether it is due: at its end, if no other step begins before."""
        end_s = self._running[0].end_s
        return self.step_end_s if end_s is None else end_s

    @property
    def is_due(self) -> bool:
        return self._running[0].end_s is not None or self._clock.now() >= self.step_end_s
