"""EngineCore: the engine's decisions behind four calls, without I/O.

    add(request) / abort(handles) / apply_kv(message)
    begin()  -> StepPlan | None       what to run now
    finish(StepResult) -> EngineOutputs    what came of the oldest plan in flight
    take_outputs() -> EngineOutputs | None    what belongs to no step: look after each of the others

While `has_work` is false nothing happens until a message comes or `next_deadline_s` is there; then
`begin` again.

A process drives it around a device (`proc.core_main`), a twin around a cost model; nothing here can
tell which. Counters advance when a plan is begun, so the next one may be begun before the tokens of
the last are known.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from twostroke.arrays import total
from twostroke.clock import Clock
from twostroke.config import SchedulerConfig
from twostroke.connector.base import KvConnectorScheduler
from twostroke.core import fast_forward
from twostroke.core.handoffs import Handoffs, KvMessage
from twostroke.core.plans import plan_of
from twostroke.core.refusal import refusal
from twostroke.core.request import Request, Status
from twostroke.core.results import Outcome, Results, handles_of, logprobs_of
from twostroke.core.scheduler import Scheduler
from twostroke.core.spec import PlanRules
from twostroke.core.state import EngineState
from twostroke.core.step import Admission, Step
from twostroke.cost import StepWork
from twostroke.errors import ConfigError
from twostroke.kv.manager import IntegrityError
from twostroke.kv_messages import KvLoad, KvReceived, KvReport
from twostroke.messages import (
    NO_TOKENS,
    AddRequest,
    EngineOutputs,
    EngineStats,
    EventKind,
    Events,
    Finished,
    FinishReason,
    Int32s,
    PrefillInfo,
    StepPlan,
    StepResult,
    StepSample,
)

_NO_HANDLES = np.empty(0, np.int64)


class EngineCore:
    """The sans-I/O core of one engine.

    With `check` every plan is verified against the rules of `core.spec`. `faithful` keeps vLLM's
    hangs (a request that can never fit is queued for ever); it exists to compare with recordings.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        clock: Clock,
        *,
        connector: KvConnectorScheduler | None = None,
        check: bool = False,
        faithful: bool = False,
    ) -> None:
        self.config = config
        self.state = EngineState(config, connector, faithful=faithful)
        self.scheduler = Scheduler(self.state)
        self._handoffs: Handoffs | None = None
        if self.state.handoff is not None:
            if config.sliding_window is not None:
                raise ConfigError(
                    f"a sliding window of {config.sliding_window:,} tokens has no hand-off: blocks "
                    "outside it are gone; run prefill and decode in one engine"
                )
            self._handoffs = Handoffs(self.state, self.state.handoff)
        self._results = Results(self.state)
        self._clock = clock
        self._rules = PlanRules(self.state) if check else None
        self._next_uid = 0
        self._finished: list[Finished] = []
        self._prefills: list[PrefillInfo] = []
        self._events: list[tuple[int, EventKind, float]] = []
        self._kv_received: list[KvReceived] = []  # of requests that were refused
        self._stats = EngineStats()
        self._is_open = False  # whether `extend` may add to the last step

    # ------------------------------------------------------------ requests in

    def add(self, request: AddRequest, *, waits_for_grammar: bool = False) -> None:
        """Queue a request. One that can never run ends at once, with an error.

        With `waits_for_grammar` it is passed over until `grammar_ready`.
        """
        if request.handle in self.state.by_handle:
            raise ValueError(f"handle {request.handle} is that of a live request")
        now = self._clock.now()
        self._events.append((request.handle, EventKind.QUEUED, now))
        if not self.state.faithful and (problem := refusal(self.state, request)):
            self._ended(Finished(request.handle, FinishReason.ERROR, error=problem), now)
            if request.kv_receive is not None:
                received = KvReceived(handle=request.handle, error=problem, reason="refused")
                self._kv_received.append(received)
            return
        may_read = request.params.prompt_logprobs is None
        table = self.state.kv.new_table(
            request.prompt_token_ids, request.cache_salt, may_read=may_read
        )
        self._next_uid += 1
        queued = Request(request, self._next_uid, table)
        if not self.state.faithful:
            # Beyond the longest possible sequence `min_tokens` would keep it from ever ending.
            room = self.state.max_length - queued.num_prompt_tokens
            queued.min_tokens = min(queued.min_tokens, room)
        if waits_for_grammar:
            queued.status = Status.WAITING_FOR_GRAMMAR
        self.state.add(queued)
        self.state.is_stalled = False

    def apply_kv(self, message: KvMessage) -> None:
        """A message about KV that moves. Whatever it names that is unknown is counted."""
        if self._handoffs is None:
            self._stats.num_unknown_transfers += 1
            return
        self._handoffs.apply(message)
        self._settle(self._clock.now())

    def abort(self, handles: Sequence[int]) -> None:
        """End these requests, whatever they do; unknown and finished ones are ignored."""
        known = dict.fromkeys(handle for handle in handles if handle in self.state.by_handle)
        requests = [self.state.by_handle[handle] for handle in known]
        if requests:
            self.state.abort(requests)
            self.state.is_stalled = False
            now = self._clock.now()
            for request in requests:
                self._ended(Finished(request.handle, FinishReason.ABORT), now)

    def grammar_ready(self, handle: int) -> None:
        """The grammar that this request waits for is compiled."""
        request = self.state.by_handle.get(handle)
        if request is not None and request.status is Status.WAITING_FOR_GRAMMAR:
            self.state.queues.wake(request)
            self.state.is_stalled = False

    def _settle(self, now: float) -> None:
        """Apply what the connector says is over."""
        assert self._handoffs is not None
        finished, events = self._handoffs.settle()
        self._events += [(handle, kind, now) for handle, kind in events]
        for end in finished:
            self._ended(end, now)

    def _ended(self, finished: Finished, now: float) -> None:
        self._finished.append(finished)
        self._events.append((finished.handle, EventKind.FINISHED, now))

    def now(self) -> float:
        """Time on the core's clock, seconds."""
        return self._clock.now()

    # ------------------------------------------------------------ steps

    @property
    def num_in_flight(self) -> int:
        """Plans begun and not finished."""
        return len(self.state.in_flight)

    @property
    def last_step(self) -> Step:
        """The step that was begun last; there must be one in flight."""
        return self.state.in_flight[-1]

    def has_work(self) -> bool:
        """Whether `begin` has anything to say: requests to run, seats to vacate, KV to move.

        What only waits for a message or a deadline is no work.
        """
        return self.state.has_work

    def is_empty(self) -> bool:
        """No request is here, none in flight, and nothing is held for another engine."""
        state = self.state
        return not (state.requests or state.held or state.in_flight or state.has_work)

    def next_deadline_s(self) -> float | None:
        """When `begin` must be called again even if nothing comes until then, on our clock."""
        return None if self.state.handoff is None else self.state.handoff.next_deadline_s()

    def begin(self) -> StepPlan | None:
        """Plan a step; None when there is nothing at all to do.

        A plan may have no rows: the worker still vacates seats and moves KV.
        """
        if self.state.handoff is not None:
            self.state.handoff.expire()
            self._settle(self._clock.now())
        if not self.state.has_work:
            return None
        now = self._clock.now()
        is_idle = not any(len(s.slots) for s in self.state.in_flight)
        step = self.scheduler.schedule(idle=is_idle)
        self.state.in_flight.append(step)
        self.state.is_stalled = is_idle and step.is_empty
        self._note_step(step, now)
        plan = plan_of(step, self.state)
        # Who comes now would be looked at first by the next step.
        self._is_open = not (step.preempted or self.state.num_waiting)
        if self._rules is not None:
            self._rules.check(plan)
            self.check_integrity()
        return plan

    def extend(self) -> StepPlan | None:
        """Put who has come since into the step that was begun last, as if they had come before.

        Returns its plan, for a worker that has not seen the one before; None: that stands.
        """
        state, step = self.state, self.last_step
        closed = not self._is_open or state.handoff is not None or self._rules is not None
        # A seat that was given up since may still have a row, and is nobody else's before the next.
        if closed or not state.num_waiting or state.has_untold:
            return None
        admitted, tokens = len(step.admitted), total(step.num_scheduled)
        self.scheduler.extend(step)
        self._is_open = not state.num_waiting
        self._stats.step_tokens += total(step.num_scheduled) - tokens
        self._note_admitted(step.admitted[admitted:], self._clock.now())
        return plan_of(step, state)

    def _note_step(self, step: Step, now: float) -> None:
        self._stats.num_steps += 1
        self._stats.step_tokens += total(step.num_scheduled)
        for request in step.preempted:
            self._events.append((request.handle, EventKind.PREEMPTED, now))
        for finished in step.ended:
            self._ended(finished, now)
        if self._handoffs is not None:
            for request in step.held_back:
                self._events.append((request.handle, EventKind.HELD, now))
            for loading in step.loading:
                self._events.append((loading.request.handle, EventKind.LOADING, now))
        self._note_admitted(step.admitted, now)

    def _note_admitted(self, admissions: Sequence[Admission], now: float) -> None:
        for admission in admissions:
            request = admission.request
            self._events.append((request.handle, EventKind.SCHEDULED, now))
            if not request.was_admitted:
                request.was_admitted = True
                # What was loaded counts as computed; cached is what was here before.
                was_loaded = request.kv_receive is not None and admission.num_local is None
                cached = request.num_local_hit if was_loaded else admission.num_computed
                self._prefills.append(PrefillInfo(request.handle, cached))

    def finish(self, result: StepResult) -> EngineOutputs:
        """Process the result of the oldest plan in flight."""
        step = self.state.in_flight.popleft()
        if result.step != step.number:
            raise IntegrityError(f"result of step {result.step} while {step.number} is due")
        if self._rules is not None:
            self._rules.observe(result)
        outcome = self._results.apply(step, result)
        now = self._clock.now()
        for handle in outcome.first_tokens:
            self._events.append((handle, EventKind.FIRST_TOKEN, now))
        for finished in outcome.finished:
            self._ended(finished, now)
        if self._handoffs is not None:
            if len(step.slots):
                self.state.is_stalled = False
            if self.state.streaming:
                self._handoffs.report_chunks(step)
            self._settle(now)
        self._stats.prompt_tokens += outcome.num_prompt_tokens
        self._stats.generation_tokens += total(outcome.num_kept)
        if len(result.num_verified):
            self._count_drafts(result, outcome)
        outputs = self._drain(now)
        outputs.handles, outputs.num_tokens = handles_of(step, outcome)
        outputs.token_ids = outcome.token_ids
        if result.logprobs:
            outputs.logprobs = logprobs_of(step, result, outcome)
        if result.ended_s and len(step.slots):
            outputs.step = _sample_of(step, result.ended_s - result.started_s)
        outputs.stats = self.stats()
        return outputs

    @property
    def skippable_turns(self) -> int:
        """How many turns (begin a step, finish the oldest) only decode, if nothing is added.

        To be asked after a `finish`; 0 also when plans are checked. `take_outputs` comes before
        `skip`, or events are told out of order. Requests may end in the last (`ends_in`).
        """
        handoff = self.state.handoff
        if self._rules is not None or (handoff is not None and handoff.has_outputs):
            return 0
        return fast_forward.skippable_turns(self.state)

    def ends_in(self, turns: int) -> bool:
        """Whether requests end in the last of so many of `skippable_turns`."""
        return fast_forward.ends_in(self.state, turns)

    @property
    def has_ends(self) -> bool:
        """Whether `take_outputs` has the end of a request to tell."""
        return bool(self._finished)

    @property
    def first_tokens_due(self) -> list[int]:
        """Handles of requests that get their first token in the next of `skippable_turns`."""
        slots = fast_forward.first_due(self.state)
        due: list[int] = self.state.seats.handle[slots].tolist()
        return due

    def skip(self, turns: int, token_ids: Int32s, *, report: KvReport | None = None) -> list[int]:
        """Do what so many turns would, at least 1 and at most `skippable_turns`, without plans.

        Running request i samples token_ids[i] in each; none may be a stop id. The executor's step
        in flight, if any, has to be renumbered alike, and the seats returned to be vacated. The
        clock stands at the end of the last turn, whose result would have brought `report`. There
        are no outputs of steps: what they would hold is known (see also `first_tokens_due`). The
        ends of requests are among `take_outputs`; of the executor's step their rows are dropped.
        """
        rows = self.state.num_running
        skipped = fast_forward.skip(self.state, turns, token_ids)
        self.scheduler.num_steps += turns
        if self.state.handoff is not None:
            self.state.handoff.plans_skipped(turns)
        self._stats.num_steps += turns
        self._stats.step_tokens += skipped.num_begun
        self._stats.prompt_tokens += skipped.prompt_tokens
        self._stats.generation_tokens += turns * rows
        if report is not None and self.state.connector is not None:
            self.state.connector.update_connector_output(report)
            self._settle(self._clock.now())
        for request in skipped.ended:
            self._ended(Finished(request.handle, FinishReason.LENGTH), self._clock.now())
        return skipped.freed_slots

    def drain(self) -> bool:
        """Take the turns, without rows, that are left when the last request has ended.

        To be asked after a `finish`; False: there is more to do, or connectors are to be told. The
        executor has to drop what it has in flight, and the seats.
        """
        if self._rules is not None or not fast_forward.is_drained(self.state):
            return False
        turns = fast_forward.drain(self.state)
        self.scheduler.num_steps += turns
        self._stats.num_steps += turns
        return True

    def _count_drafts(self, result: StepResult, outcome: Outcome) -> None:
        """Drafts verified in rows whose request still wanted tokens."""
        rows = (result.num_verified > 0) & (outcome.num_kept > 0)
        self._stats.spec_decode_num_drafts += int(rows.sum())
        self._stats.spec_decode_num_draft_tokens += int(result.num_verified[rows].sum())
        self._stats.spec_decode_num_accepted_tokens += int((result.num_sampled[rows] - 1).sum())

    def take_pieces(self) -> list[KvLoad]:
        """What the worker may read of other engines' KV now, without waiting for its next plan."""
        handoff = self.state.handoff
        return [] if handoff is None else handoff.take_pieces(self.num_in_flight)

    def take_outputs(self) -> EngineOutputs | None:
        """Events and ends that belong to no step (arrivals, aborts, refusals), or None."""
        handoff = self.state.handoff
        told = self._finished or self._events or self._prefills or self._kv_received
        if told or (handoff is not None and handoff.has_outputs):
            return self._drain(self._clock.now())
        return None

    def _drain(self, now: float) -> EngineOutputs:
        outputs = EngineOutputs(
            handles=_NO_HANDLES,
            num_tokens=NO_TOKENS,
            token_ids=NO_TOKENS,
            finished=self._finished,
            prefills=self._prefills,
            time_s=now,
        )
        if self._events:
            handles, kinds, times = zip(*self._events, strict=True)
            outputs.events = Events(
                np.array(handles, np.int64), np.array(kinds, np.uint8), np.array(times)
            )
        self._finished, self._prefills, self._events = [], [], []
        outputs.kv_received, self._kv_received = self._kv_received, []
        if self.state.handoff is not None and self.state.handoff.has_outputs:
            kv = self.state.handoff.take_outputs()
            outputs.kv_ready, outputs.kv_links = kv.ready, kv.links
            outputs.kv_received += kv.received
        return outputs

    # ------------------------------------------------------------ looking in

    def stats(self) -> EngineStats:
        """Gauges now, and counters since start."""
        state, stats = self.state, self._stats
        stats.num_running = state.num_running
        stats.num_loading = state.queues.num_blocked
        stats.num_waiting = state.num_waiting
        stats.kv_usage = state.kv.usage
        stats.num_preemptions = state.num_preemptions
        stats.prefix_cache_queries = state.num_prefix_queries
        stats.prefix_cache_hits = state.num_prefix_hits
        if state.handoff is not None:
            stats.num_loading = len(state.loading)
            counts = state.handoff.counts()
            stats.num_holds, stats.hold_usage = counts.num_holds, counts.hold_usage
            stats.num_expired_leases = counts.num_expired_leases
            stats.num_failed_loads = counts.num_failed_loads
            stats.num_unknown_transfers = counts.num_unknown_transfers
        return msgspec.structs.replace(stats)

    def outlook(self) -> fast_forward.Outlook:
        """What `stats` will be in turns to come, before one in which requests end."""
        due = fast_forward.prompts_due(self.state)
        return fast_forward.Outlook(self.stats(), due, self.state)

    def slots(self) -> list[dict[str, Any]]:
        """What each live request does: state, tokens done and in all, blocks, age in seconds."""
        now = self._clock.now()
        rows = []
        for request in self.state.requests.values():
            if request.slot >= 0:
                self.state.seats.read(request)
            rows.append(
                {
                    "handle": request.handle,
                    "request_id": request.request_id,
                    "state": request.status.name.lower(),
                    "slot": request.slot,
                    "num_prompt_tokens": request.num_prompt_tokens,
                    "num_computed_tokens": request.num_computed,
                    "num_output_tokens": request.num_known - request.num_prompt_tokens,
                    "max_tokens": request.max_tokens,
                    "num_blocks": len(request.table.blocks),
                    "num_preemptions": request.num_preemptions,
                    "age_s": max(0.0, now - request.arrival_s),
                }
            )
        return rows

    def reset_prefix_cache(self, *, preempt_running: bool = False) -> bool:
        """Forget all cached prefixes; False while blocks are in use.

        With `preempt_running` running requests are preempted first and recomputed afterwards.
        """
        if preempt_running:
            now = self._clock.now()
            for request in self.state.preempt_all():
                self._events.append((request.handle, EventKind.PREEMPTED, now))
        return self.state.kv.reset()

    def check_integrity(self) -> None:
        """Recount blocks, seats and queues; IntegrityError when they do not balance."""
        self.state.check_integrity()


def _sample_of(step: Step, seconds: float) -> StepSample:
    """The step's work, as it was planned, and how long it took."""
    work = StepWork.of_rows(step.num_computed, step.num_scheduled, int(step.samples.sum()))
    return StepSample(
        num_tokens=int(work.num_tokens),
        num_rows=int(work.num_rows),
        num_sampled=int(work.num_sampled),
        context_tokens=int(work.context_tokens),
        attended_tokens=int(work.attended_tokens),
        seconds=seconds,
    )
