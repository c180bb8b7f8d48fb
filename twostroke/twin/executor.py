"""`core.executor.Executor` around a cost model: plans take virtual time, tokens are given.

    submit(plan) at t     the device starts it at max(t, end of the one before + gap)
    end_of_oldest_s       when `collect` returns
    collect()             its tokens, and what transfers ended meanwhile

A request's answer repeats one token id of its own, so what a prefix cache can see of it follows
from the workload alone.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from twostroke.arrays import Float64s, Int32s
from twostroke.clock import Clock
from twostroke.cost import HostCost, StepColumns, StepCost, StepWork
from twostroke.kv_messages import KvCommands, KvReport
from twostroke.messages import StepPlan, StepResult


class Transfers(Protocol):
    """What moves KV for one engine of the twin (`transfers.EngineTransfers`)."""

    def apply(self, commands: KvCommands) -> None: ...
    def report(self) -> KvReport | None: ...
    @property
    def has_report(self) -> bool: ...
    @property
    def is_busy(self) -> bool: ...


@dataclass(slots=True)
class _Running:
    """A submitted plan. One that only waits for a transfer ends at infinity until there is one."""

    plan: StepPlan
    start_s: float
    end_s: float


class CostExecutor:
    """The device of one engine. `token_of` maps a request id to the token of its answer.

    `num_busy` says how many engines of its host compute right now, itself included.
    """

    def __init__(
        self,
        clock: Clock,
        cost: StepCost,
        *,
        max_num_seqs: int,
        token_of: Callable[[str], int],
        host: HostCost | None = None,
        transfers: Transfers | None = None,
        num_busy: Callable[[], int] = lambda: 1,
    ) -> None:
        self.busy_s = 0.0
        self.prefill_s = 0.0  # of that, in steps that compute prompts
        self._clock = clock
        self._cost = cost
        self._host = host or HostCost()
        self._token_of = token_of
        self._tokens: Int32s = np.zeros(max_num_seqs, np.int32)  # by seat
        self._transfers = transfers
        self._num_busy = num_busy
        self._running: deque[_Running] = deque()
        self._free_s = -math.inf  # the end of the last plan
        self._costs: Float64s = np.empty(0)  # of the steps that may be skipped

    # ------------------------------------------------------------ the protocol

    def submit(self, plan: StepPlan) -> None:
        for new in plan.new:
            self._tokens[new.slot] = self._token_of(new.request_id)
        if plan.kv is not None and self._transfers is not None:
            self._transfers.apply(plan.kv)
        now, rows = self._clock.now(), len(plan.slots)
        if not rows:
            waits = self._transfers is not None and self._must_wait(self._transfers)
            end_s = math.inf if waits and not self._running else max(now, self._free_s)
            self._running.append(_Running(plan, now, end_s))
            return
        work = StepWork.of_rows(plan.num_computed, plan.num_scheduled, int(plan.samples.sum()))
        start_s = max(now, self._free_s + self._gap_s(rows))
        seconds = self._cost.step_s(work)
        if len(self._host.slowdown) > 1 or self._host.slowdown[0] != 1.0:
            seconds *= self._host.slowdown_of(self._num_busy())
        self.busy_s += seconds
        if work.num_tokens > rows:
            self.prefill_s += seconds
        self._free_s = start_s + seconds
        self._running.append(_Running(plan, start_s, self._free_s))

    def collect(self) -> StepResult:
        """The oldest plan's result; the clock stands at its end."""
        running = self._running.popleft()
        plan = running.plan
        return StepResult(
            step=plan.step,
            num_sampled=plan.samples.astype(np.int32),
            token_ids=self._tokens[plan.slots[plan.samples]],
            kv=self._transfers.report() if self._transfers is not None else None,
            started_s=running.start_s,
            ended_s=running.end_s if running.end_s < math.inf else self._clock.now(),
        )

    def shutdown(self) -> None:
        self._running.clear()

    # ------------------------------------------------------------ for the virtual clock

    def _must_wait(self, transfers: Transfers) -> bool:
        """Whether a plan without rows has nothing to tell yet, but will have."""
        return transfers.is_busy and not transfers.has_report

    def _gap_s(self, rows: int) -> float:
        return self._host.gap_s + self._host.gap_row_s * rows

    @property
    def end_of_oldest_s(self) -> float:
        """When `collect` may be called; inf: not before a transfer ends (or a message comes)."""
        return self._running[0].end_s

    @property
    def is_computing(self) -> bool:
        """Whether a step with rows is under way now."""
        now = self._clock.now()
        return any(it.start_s <= now < it.end_s and len(it.plan.slots) for it in self._running)

    @property
    def has_report(self) -> bool:
        """Whether the next result will tell of a transfer."""
        return self._transfers is not None and self._transfers.has_report

    def wake(self) -> None:
        """End a plan that waits for a transfer: something has come."""
        for running in self._running:
            if running.end_s == math.inf:
                running.end_s = self._clock.now()

    def tokens_of(self, slots: Int32s) -> Int32s:
        """[rows] What the requests in these seats sample."""
        return self._tokens[slots]

    def ends_of_decodes(self, rows: int, context_tokens: int, turns: int) -> Float64s:
        """When the oldest step ends in each of the next `turns` plain decode turns.

        With a step in flight there is one entry more: the end of the step that then is. Each sum is
        made as single steps would, so that the last bit is the same.
        """
        costs = self._cost.step_s_many(StepColumns.of_decodes(rows, context_tokens, turns))
        self._costs = costs
        gap_s = self._gap_s(rows)
        spans = np.empty((turns, 2))
        spans[:, 0], spans[:, 1] = gap_s, costs
        flat = spans.reshape(-1)
        if self._running:
            sums = np.cumsum(np.concatenate(([self._running[0].end_s], flat)))
            return sums[::2]
        flat[0] = 0.0
        first_s = max(self._clock.now(), self._free_s + gap_s)
        return np.cumsum(np.concatenate(([first_s], flat)))[2::2]

    def skip(self, turns: int, ends: Float64s) -> None:
        """So many plain decode turns were taken, with the ends that `ends_of_decodes` gave."""
        self.busy_s += float(self._costs[:turns].sum())
        if not self._running:
            self._free_s = float(ends[turns - 1])
            return
        running = self._running[0]
        running.plan.step += turns
        running.plan.num_computed = running.plan.num_computed + turns
        running.start_s = float(ends[turns - 1]) + self._gap_s(len(running.plan.slots))
        running.end_s = self._free_s = float(ends[turns])
