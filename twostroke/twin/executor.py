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

from twostroke.arrays import Float64s, Int32s, Int64s
from twostroke.clock import Clock
from twostroke.core.step import Step
from twostroke.cost import CHANGE_FADES, HostCost, StepColumns, StepCost, StepWork
from twostroke.cost_spread import SpreadReader
from twostroke.kv_messages import KvCommands, KvLoad, KvReport
from twostroke.messages import StepPlan, StepResult


class Transfers(Protocol):
    """What moves KV for one engine of the twin (`transfers.EngineTransfers`)."""

    def apply(self, commands: KvCommands, delay_s: float) -> None: ...
    def report(self) -> KvReport | None: ...
    @property
    def has_report(self) -> bool: ...
    @property
    def is_busy(self) -> bool: ...
    @property
    def reads_ahead(self) -> bool: ...


# How long a worker without rows looks out for the end of a transfer before it asks for more to do
# (`worker.runner`): a request that comes meanwhile waits as long.
IDLE_WAIT_S = 0.005


@dataclass(slots=True)
class RunningPlan:
    """A submitted plan. Its end is not known before those ahead of it are, and that of a plan
    without rows not before it is the oldest: transfers may end until then."""

    plan: StepPlan
    submitted_s: float
    seconds: float
    gap_s: float
    start_s: float = math.nan
    end_s: float | None = None
    num_arrivals: int = 0  # of requests, while it ran


class CostExecutor:
    """The device of one engine. `token_of` maps a request id to the token of its answer."""

    def __init__(
        self,
        clock: Clock,
        cost: StepCost,
        *,
        max_num_seqs: int,
        token_of: Callable[[str], int],
        host: HostCost | None = None,
        transfers: Transfers | None = None,
        engine: int = 0,
    ) -> None:
        """`engine`: its number, so that engines alike are not late in the same steps."""
        self.busy_s = 0.0
        self.prefill_s = 0.0  # of that, in steps that compute prompts
        self._clock = clock
        self._cost = cost
        self._host = host or HostCost()
        self._token_of = token_of
        self._tokens: Int32s = np.zeros(max_num_seqs, np.int32)  # by seat
        self.reads_ahead = transfers is not None and transfers.reads_ahead
        self.arrivals_delay = self._host.arrival_s + self._host.arrivals_s > 0
        self._transfers = transfers
        self._running: deque[RunningPlan] = deque()
        self._ended_s = -math.inf  # the end of the plan that was collected last
        self._computed_s = -math.inf  # of the last one with rows
        self._decodes = StepColumns.of_decodes(0, 0, 0)  # the steps that may be skipped
        self._costs: Float64s = np.empty(0)  # of these
        self._levels: Float64s = np.empty(0)  # and how unsettled each is
        self._num_steps = 0  # submitted with rows
        self._work: StepWork | None = None  # of the last of them
        self._has_joined = False  # whether a row was new in it whose prompt another engine computed
        self._unsettled = 0.0  # how much of `HostCost.changed_s` that one took
        has_spread = bool(self._host.spread.most_tokens)
        self._spread = SpreadReader(self._host.spread, engine) if has_spread else None

    # ------------------------------------------------------------ the protocol

    def submit(self, plan: StepPlan) -> None:
        for new in plan.new:
            self._tokens[new.slot] = self._token_of(new.request_id)
        now, rows = self._clock.now(), len(plan.slots)
        if not rows:
            self._running.append(RunningPlan(plan, now, 0.0, 0.0))
            self._resolve()
            return
        work = StepWork.of_rows(
            plan.num_computed, plan.num_scheduled, int(np.count_nonzero(plan.samples))
        )
        seconds = self._step_s(work)
        if self._host.cold_s and not any(len(it.plan.slots) for it in self._running):
            seconds += self._host.after_pause_s(now - self._computed_s, seconds)
        self.busy_s += seconds
        if work.num_tokens > rows:
            self.prefill_s += seconds
        self._running.append(RunningPlan(plan, now, seconds, self._gap_s(rows)))
        self._resolve()

    def collect(self) -> StepResult:
        """The oldest plan's result; the clock stands at its end."""
        running = self._running.popleft()
        plan = running.plan
        self._ended_s = self._clock.now()
        if len(plan.slots):
            self._computed_s = self._ended_s
        self._resolve()
        return StepResult(
            step=plan.step,
            num_sampled=plan.samples.astype(np.int32),
            token_ids=self._tokens[plan.slots[plan.samples]],
            kv=self._transfers.report() if self._transfers is not None else None,
        )

    def shutdown(self) -> None:
        self._running.clear()

    # ------------------------------------------------------------ for the virtual clock

    def _resolve(self) -> None:
        """When the submitted plans start and end, as far as that is certain."""
        before_s = self._ended_s
        for nth, it in enumerate(self._running):
            if it.end_s is None:
                if len(it.plan.slots):
                    it.start_s = max(it.submitted_s, before_s + it.gap_s)
                    it.end_s = it.start_s + it.seconds
                    self.command(it)
                elif nth == 0:
                    it.start_s = max(it.submitted_s, before_s)
                    self.command(it)
                    it.end_s = it.start_s + self._idle_s()
                else:
                    return
            elif nth == 0:
                self._stop_waiting(it)
            before_s = it.end_s

    def _stop_waiting(self, oldest: RunningPlan) -> None:
        """If it waits for nothing but a transfer and there is another plan now: with the next look.

        Without that the other plan would have no end, and the engine stand still until a deadline.
        """
        if oldest.end_s == math.inf and len(self._running) > 1:
            oldest.end_s = self.looked_up_s(self._clock.now())

    def command(self, it: RunningPlan) -> None:
        """A worker does what a plan says about transfers when it comes to that plan."""
        if it.plan.kv is not None and self._transfers is not None:
            self._transfers.apply(it.plan.kv, max(0.0, it.start_s - self._clock.now()))

    def read(self, loads: list[KvLoad]) -> None:
        """Read these now, whatever step runs."""
        assert self._transfers is not None
        self._transfers.apply(KvCommands(loads=loads), 0.0)

    def request_arrives(self, now: float) -> bool:
        """A request reaches the engine. True: the step that runs ends later for it."""
        it = self._running[0] if self._running else None
        if it is None or not len(it.plan.slots) or not it.start_s <= now < self.end_of_oldest_s:
            return False
        longer_s = self._host.arrivals_s if it.num_arrivals else self._host.arrival_s
        it.num_arrivals += 1
        if longer_s:
            self._lengthen(it, longer_s)
        return longer_s > 0

    def _lengthen(self, oldest: RunningPlan, longer_s: float) -> None:
        assert oldest.end_s is not None
        oldest.end_s = before_s = oldest.end_s + longer_s
        self.busy_s += longer_s
        if int(oldest.plan.num_scheduled.sum()) > len(oldest.plan.slots):
            self.prefill_s += longer_s
        for it in list(self._running)[1:]:
            if it.end_s is not None:
                it.start_s = max(it.submitted_s, before_s + it.gap_s)
                it.end_s = before_s = it.start_s + it.seconds

    def _idle_s(self) -> float:
        """How long the oldest plan, without rows, waits for a transfer; alone: until one ends."""
        transfers = self._transfers
        if transfers is None or transfers.has_report or not transfers.is_busy:
            return 0.0
        return IDLE_WAIT_S if len(self._running) > 1 else math.inf

    def _step_s(self, work: StepWork) -> float:
        """Of the next step that is submitted."""
        seconds = self._cost.step_s(work)
        if self._spread is not None:
            seconds *= self._spread.ratio(self._num_steps, work.num_tokens)
        if self._host.changed_s:
            self._unsettled = self._unsettled_by(work)
            seconds += self._host.changed_s * self._unsettled
            self._has_joined = self._joins(work)
            self._work = work
        self._num_steps += 1
        return seconds

    def _unsettled_by(self, work: StepWork) -> float:
        """What the next step has of the changes of rows up to it: 1 for one of its own."""
        goes_on = self._work is not None and work.decodes_on(self._work) and not self._has_joined
        return self._unsettled * CHANGE_FADES + (0.0 if goes_on else 1.0)

    def _joins(self, work: StepWork) -> bool:
        return self._work is not None and work.joins_decodes(self._work)

    def _gap_s(self, rows: int) -> float:
        return self._host.gap_s + self._host.gap_row_s * rows

    @property
    def end_of_oldest_s(self) -> float:
        """When `collect` may be called; inf: not before a transfer ends or a message comes."""
        end_s = self._running[0].end_s
        assert end_s is not None, "the oldest plan's end is always known"
        return end_s

    @property
    def is_due(self) -> bool:
        """Whether `collect` may be called at what `end_of_oldest_s` said before."""
        return True

    @property
    def has_report(self) -> bool:
        """Whether the next result will tell of a transfer."""
        return self._transfers is not None and self._transfers.has_report

    def transfer_ended(self) -> None:
        """There is something to report now: a plan that waits for that is over."""
        it = self._running[0] if self._running else None
        if it is not None and not len(it.plan.slots) and self._clock.now() >= it.start_s:
            it.end_s = self._clock.now()
            for other in list(self._running)[1:]:
                other.end_s = None
            self._resolve()

    def looked_up_s(self, time_s: float) -> float:
        """When a worker that waits for a transfer, and nothing else, first hears of `time_s`."""
        start_s = self._running[0].start_s
        return start_s + max(1, math.ceil((time_s - start_s) / IDLE_WAIT_S)) * IDLE_WAIT_S

    def tokens_of(self, slots: Int64s) -> Int32s:
        """[rows] What the requests in these seats sample."""
        return self._tokens[slots]

    def ends_of_decodes(self, rows: int, context_tokens: int, turns: int) -> Float64s:
        """When the oldest step ends in each of the next `turns` plain decode turns.

        With a step in flight there is one entry more: the end of the step that then is. Each sum is
        made as single steps would, so that the last bit is the same.
        """
        decodes = StepColumns.of_decodes(rows, context_tokens, turns)
        costs = self._cost.step_s_many(decodes)
        if self._spread is not None:
            costs = costs * self._spread.ratios(self._num_steps, turns, rows)
        if self._host.changed_s:
            levels = np.full(turns, CHANGE_FADES)
            levels[0] = self._unsettled_by(decodes.work(0))
            joins = int(turns > 1 and self._joins(decodes.work(0)))
            if joins:  # then the next one is another that does not just decode on
                levels[1] = levels[0] * CHANGE_FADES + 1.0
            levels[joins:] = np.multiply.accumulate(levels[joins:])
            self._decodes, self._levels = decodes, levels
            costs = costs + self._host.changed_s * self._levels
        self._costs = costs
        gap_s = self._gap_s(rows)
        spans = np.empty(2 * turns + 1)
        spans[1::2], spans[2::2] = gap_s, costs
        if self._running:
            spans[0] = self.end_of_oldest_s
            ends: Float64s = spans.cumsum()[::2]
            return ends
        spans[0], spans[1] = max(self._clock.now(), self._ended_s + gap_s), 0.0
        return spans.cumsum()[2::2]

    def skip(self, turns: int, ends: Float64s) -> KvReport | None:
        """So many plain decode turns were taken, with the ends that `ends_of_decodes` gave.

        The clock stands at the last one's end. Returns what its result would have reported.
        """
        self.busy_s += float(np.add.reduce(self._costs[:turns]))
        self._num_steps += turns
        if self._host.changed_s:
            self._has_joined = turns == 1 and self._joins(self._decodes.work(0))
            self._work = self._decodes.work(turns - 1)
            self._unsettled = float(self._levels[turns - 1])
        self._ended_s = self._computed_s = float(ends[turns - 1])
        if self._running:
            running = self._running[0]
            running.plan.step += turns
            running.num_arrivals = 0
            running.start_s = self._ended_s + running.gap_s
            running.end_s = float(ends[turns])
        return self._transfers.report() if self._transfers is not None else None

    def skip_to_ends(self, turns: int, ends: Float64s, step: Step | None) -> None:
        """The same where requests end in the last of two turns or more, and nothing moves KV.

        `step` is the one that is then in flight, if any is: with a row of each that goes on.
        """
        if step is None:
            self.skip(turns, ends)
            return
        self.skip(turns - 1, ends)
        self._ended_s = self._computed_s = float(ends[turns - 1])
        running, rows = self._running[0], len(step.slots)
        plan = running.plan
        plan.step, plan.samples = step.number, step.samples
        plan.slots = step.slots.astype(np.int32)
        running.gap_s, running.seconds = 0.0, 0.0
        if rows:
            work = StepWork.of_rows(step.num_computed, step.num_scheduled, rows)
            running.gap_s, running.seconds = self._gap_s(rows), self._step_s(work)
            self.busy_s += running.seconds
        running.start_s = self._ended_s + running.gap_s
        running.end_s = running.start_s + running.seconds
