"""Which engines serve each request, and every message that follows from that. No I/O.

    submit ─▶ waiting ─ room ─▶ whole, on one engine ───────────────────────────▶ decoding ─▶ over
                 ▲   │                                                                ▲
                 │   ├─ pull ──▶ P computes ─ ticket ─▶ D loads ──────────────────────┤
                 │   └─ stream ▶ D waits ─ has blocks ─▶ P computes ─ tickets ─▶ D loads
                 └──────────── lost, failed or late: run elsewhere, or an error ──────┘

A request that is handed over has two legs, and both are ours: the first terminal failure of one
ends the other. Whatever way a request leaves, every ticket that P gave out is released exactly once
(unless P is gone), its lease renewed till then. Engines get what is left of a hand-off's deadline.
"""

from collections import deque
from collections.abc import Sequence

import msgspec

from twostroke.clock import Clock
from twostroke.errors import EngineDeadError
from twostroke.kv_messages import LEASE_ENDED, KvReady, KvReceive, KvReceived, KvSend, KvTicket
from twostroke.ledger import Boundary
from twostroke.messages import (
    AddRequest,
    EngineOutputs,
    EngineReady,
    EventKind,
    Events,
    Finished,
    FinishReason,
    Int32s,
    ToEngine,
)
from twostroke.router.deadlines import Deadlines
from twostroke.router.engines import Engine, Fleet, Role
from twostroke.router.jobs import FIRST_OWN_HANDLE, Counters, DispatchSettings, Job, Leg, LegKind
from twostroke.router.legs import Legs
from twostroke.router.outputs import nothing, translated, with_more
from twostroke.router.pd_policy import PdPolicy
from twostroke.router.policy import RoutingPolicy

__all__ = ["FIRST_OWN_HANDLE", "DispatchSettings", "Dispatcher", "Role"]

_RENEWALS = 3  # of a lease, before it would end
_WATCHED = (EventKind.FIRST_TOKEN, EventKind.LOADING)
_NESTED = 0.9  # the share of what is left of a deadline that the next hop gets


class Dispatcher:
    """Serves requests on engines that come and go. Not thread-safe.

    After each call `take_messages` has what is to be sent, and `next_deadline_s` may have changed.
    """

    def __init__(self, clock: Clock, settings: DispatchSettings | None = None) -> None:
        self.settings = settings or DispatchSettings()
        self.fleet = Fleet()
        self.routing = RoutingPolicy(affinity=self.settings.affinity)
        self.counters = Counters()
        self._clock = clock
        self._legs = Legs(self.fleet, self.routing)
        self._placing = PdPolicy(clock, self.settings, self.fleet, self.routing)
        self._jobs: dict[int, Job] = {}
        self._waiting: deque[Job] = deque()
        self._deadlines = Deadlines()
        self._renew_at_s: float | None = None
        self._events: list[tuple[int, int, float]] = []  # ours, for the clients
        self._ends: list[Finished] = []  # likewise

    # ------------------------------------------------------------ engines

    def add_engine(self, engine: int, role: Role) -> None:
        """An engine that is being started, or is back under its old index."""
        if (old := self.fleet.engines.get(engine)) is not None and old.state != "gone":
            raise ValueError(f"engine {engine} is there already")
        self.fleet.engines[engine] = Engine(engine, role)
        self._legs.add_engine(engine)
        self.routing.add_engine(engine)

    def engine_ready(self, engine: int, ready: EngineReady) -> None:
        """It has loaded its model."""
        it = self.fleet[engine]
        if it.state == "loading":
            it.ready, it.state = ready, "ready"
            self.fleet.look_again()
            self.routing.engine_ready(engine, (ready.num_blocks - 1) * ready.block_size)
            self._place_waiting()

    def engine_died(self, engine: int, error: str) -> list[Finished]:
        """It is gone. Returns the requests that end by it; others are run elsewhere."""
        it = self.fleet[engine]
        if it.state == "gone":
            return []
        self.fleet.died(it, error)
        self.routing.engine_died(engine)
        legs = self._legs.engine_died(it)
        for leg in legs:
            self._legs.close(leg)
            self._lost(leg, f"engine {engine}: {error}")
        self._place_waiting()
        ends, self._ends = self._ends, []
        return ends

    def set_role(self, engine: int, role: Role) -> None:
        """Give it another role, once what it does in the old one has ended.

        Raises RequestError when there is no such engine, or nobody would be left to decode.
        """
        self.fleet.set_role(engine, role)
        self._place_waiting()

    def retire(self, engine: int) -> None:
        """It wants to leave: it gets nothing new, and can go once it `has_nothing_left`."""
        self.fleet[engine].is_leaving = True
        self._place_waiting()

    def prefixes_reset(self, engine: int) -> None:
        """Its prefix cache is empty now."""
        self.routing.prefixes_reset(engine)

    def computed(self, engine: int, token_ids: Int32s, cache_salt: str = "") -> None:
        """The engine has the KV of a request's prompt and output: a next turn may find it there."""
        self.routing.cached(engine, self.routing.keys_of(token_ids, cache_salt))

    @property
    def can_decode(self) -> bool:
        """Whether any engine is there, or is being loaded, that can serve to the end."""
        return self.fleet.can_decode

    # ------------------------------------------------------------ requests

    @property
    def num_waiting(self) -> int:
        """Requests that no engine has yet."""
        return len(self._waiting)

    @property
    def num_holds(self) -> int:
        """Tickets that are out."""
        return self._legs.num_holds

    def submit(self, request: AddRequest, *, beside: int | None = None) -> Boundary:
        """Serve a request: one sample, its KV fields unset, its handle below FIRST_OWN_HANDLE.

        `beside` names a request that it should share engines with. Returns what it passed just now:
        SENT to an engine, or HELD here because none has room. Raises EngineDeadError when nobody
        can serve it.
        """
        if not self.can_decode:
            raise EngineDeadError(self._why_dead())
        job = Job(request, self.routing.keys_of(request.prompt_token_ids, request.cache_salt))
        sibling = None if beside is None else self._jobs.get(beside)
        if sibling is not None:
            job.beside = sibling.engines
        is_placed = not self._waiting and self._place(job)
        self._jobs[job.handle] = job
        if is_placed:
            return Boundary.SENT
        self._waiting.append(job)
        self._place_waiting()
        return Boundary.HELD

    def abort(self, handles: Sequence[int]) -> None:
        """The clients of these are gone; unknown handles are ignored."""
        for handle in handles:
            if (job := self._jobs.get(handle)) is not None:
                if job in self._waiting:
                    self._waiting.remove(job)
                self._end(job)
        self._place_waiting()

    def engines_of(self, handle: int) -> list[int]:
        """Which engines a request is on."""
        job = self._jobs.get(handle)
        return [] if job is None else sorted(job.engines)

    def _why_dead(self) -> str:
        errors = [f"engine {it.index}: {it.error}" for it in self.fleet if it.error]
        return "; ".join(errors) or "no engine is there that decodes"

    def _end(self, job: Job) -> None:
        """A job leaves, in whatever way."""
        self._legs.unwind(job)
        self._jobs.pop(job.handle, None)
        self.counters.num_ended += 1
        generated = sum(engine.stats.generation_tokens for engine in self.fleet)
        self._placing.expected_output_tokens = max(generated / self.counters.num_ended, 1.0)

    def _fail(self, job: Job, error: str) -> None:
        """A job ends with an error of ours."""
        self._end(job)
        self._ends.append(Finished(job.handle, FinishReason.ERROR, error=error))

    # ------------------------------------------------------------ placing

    def _place_waiting(self) -> None:
        """Send what has room now, in order. The last thing that most public methods do."""
        self.fleet.switch_drained()
        if self.fleet.may_introduce(now_s := self._clock.now()):
            self._legs.introduce(now_s)
        while self._waiting and self.can_decode:
            try:
                if not self._place(self._waiting[0]):
                    break
            except EngineDeadError as error:
                self._fail(self._waiting[0], error.message)
            self._waiting.popleft()
        if not self._waiting:
            return
        if not self.can_decode:
            for job in self._waiting:
                self._fail(job, self._why_dead())
            self._waiting.clear()
        elif not self.fleet.with_role("decode", "both"):
            for job in self._waiting:  # somebody is being loaded; but not for ever
                if job.deadline_s is None:
                    self._set_deadline(job)

    def _place(self, job: Job) -> bool:
        """Send a job on its way; False when it must wait."""
        placement = self._placing.place(job)
        if placement is None:
            return False
        job.deadline_s = None
        if placement.reason:
            where = "whole" if placement.prefill is None else "handed_over"
            self.counters.decisions[where, placement.reason] += 1
        self._reserve(job, placement.decode, is_whole=placement.prefill is None)
        if placement.prefill is None:
            self._legs.serve(job, LegKind.WHOLE)
            return True
        self._set_deadline(job)
        if self.settings.kv_mode == "stream":
            job.source = placement.prefill
            self._legs.serve(job, LegKind.DECODE, self._receive(job))
        else:
            self._legs.prefill(job, placement.prefill, KvSend(lease_s=self.settings.lease_s))
        return True

    def _reserve(self, job: Job, reader: Engine, *, is_whole: bool = False) -> None:
        self._legs.reserve(job, reader, self._placing.need(job, reader), is_whole=is_whole)

    def _receive(self, job: Job, ticket: KvTicket | None = None) -> KvReceive:
        assert job.deadline_s is not None
        left_s = max(job.deadline_s - self._clock.now(), 0.0)
        num_tokens = job.num_prompt_tokens if ticket is None else ticket.num_tokens
        return KvReceive(num_tokens=num_tokens, timeout_s=left_s * _NESTED, ticket=ticket)

    def _load(self, job: Job, source: Engine, ticket: KvTicket) -> None:
        """P is done: let D read, or another one if that cannot."""
        reader, now_s = job.reader, self._clock.now()
        usable = reader is not None and reader.decodes_now
        if reader is None or not usable or not self.fleet.may_read(reader, source, now_s):
            self._legs.unreserve(job)
            reader = self._placing.reader(job, source)
            if reader is None:
                self._run_whole(job, "no_reader", "no engine can read the prompt's KV")
                return
            self._reserve(job, reader)
        self._legs.serve(job, LegKind.DECODE, self._receive(job, ticket))

    # ------------------------------------------------------------ what engines say

    def on_outputs(self, engine: int, outputs: EngineOutputs) -> EngineOutputs:
        """Take an engine's outputs in; returns what is left of them for the clients."""
        it = self.fleet[engine]
        if it.state == "gone":
            return nothing(outputs.time_s)
        if outputs.stats is not None:
            it.stats = outputs.stats
            self.routing.engine_stats(engine, outputs.stats)
        if outputs.step is not None:
            it.busy_s += outputs.step.seconds
            if self.settings.pd_policy == "cost":
                self._placing.costs.observe(it, outputs.step)
        for link in outputs.kv_links:
            self.fleet.pair(it, link.engine_id).measured(link, self._clock.now())
            self.fleet.look_again()
        begun = [] if outputs.events is None else self._on_events(it, outputs.events)
        for received in outputs.kv_received:
            self._on_received(it, received)
        for ready in outputs.kv_ready:
            self._on_ready(it, ready)
        ended = self._on_ends(it, outputs) if outputs.finished else []
        if special := self._legs.special[engine]:
            outputs = translated(outputs, special)
        for leg in begun:
            self._legs.pass_untouched(leg)
        for leg in ended:
            self._legs.forget(leg)
        self._place_waiting()
        return self._with_ours(outputs)

    def _with_ours(self, outputs: EngineOutputs) -> EngineOutputs:
        if not self._events and not self._ends:
            return outputs
        events, ends, self._events, self._ends = self._events, self._ends, [], []
        return with_more(outputs, events, ends)

    def _on_events(self, engine: Engine, events: Events) -> list[Leg]:
        """Returns the legs that have their first token."""
        begun: list[Leg] = []
        loading: list[Leg] = []
        for handle, kind in zip(events.handles.tolist(), events.kinds.tolist(), strict=True):
            if kind in _WATCHED and (leg := self._legs.get(engine, handle)):
                (begun if kind == EventKind.FIRST_TOKEN else loading).append(leg)
        for leg in begun:
            self._legs.first_token(leg)
        for leg in loading if self.settings.kv_mode == "stream" else ():
            if leg.is_open and leg.job.source is not None:
                self._start_stream(leg.job, engine, leg.job.source)
        return begun

    def _start_stream(self, job: Job, reader: Engine, source: Engine) -> None:
        """D has its blocks: that is P's credit."""
        job.source = None
        chosen = source if source.takes_work else self._placing.source(job, reader)
        if chosen is None:
            self._run_whole(job, "prefill_died", "the engine that was to prefill is gone")
            return
        self._legs.prefill(job, chosen, KvSend(lease_s=self.settings.lease_s, stream=True))

    def _on_ready(self, engine: Engine, ready: KvReady) -> None:
        """A ticket of P's."""
        leg = self._legs.get(engine, ready.handle)
        if leg is None or leg.kind is not LegKind.PREFILL:
            self.counters.num_unknown_tickets += 1
            return
        job, ticket = leg.job, ready.ticket
        self._legs.hold(leg, ticket.transfer_id)
        if self._renew_at_s is None and self._legs.num_holds:
            self._renew_at_s = self._clock.now() + self.settings.lease_s / _RENEWALS
        if not leg.is_open or job.is_prefilled:
            return
        job.is_prefilled = ready.is_last
        if job.serving is not None:
            self._legs.reads(job.serving, ticket)
            more = KvReady(job.serving.handle, ticket, ready.is_last)
            self._legs.send(job.serving.engine, more)
        elif ready.is_last:
            job.ticket = ticket
            self._load(job, engine, ticket)

    def _on_received(self, engine: Engine, received: KvReceived) -> None:
        """A load of D's is over; if it has failed, the end of its leg says so too."""
        leg = self._legs.get(engine, received.handle)
        if leg is None or not leg.is_open or leg.kind is not LegKind.DECODE or leg.is_loaded:
            return
        if leg.reads_from:
            self.fleet.pair(engine, leg.reads_from).received(received, self._clock.now())
        leg.is_loaded = True
        self._legs.has_read(leg)
        self._legs.drop_prefill(leg.job)
        if received.error:
            leg.load_error = received.error
            leg.load_reason = "lease_ended" if LEASE_ENDED in received.error else "transfer"
            self.counters.failures[leg.load_reason] += 1
            return
        leg.job.deadline_s = None
        self.counters.num_transfers += received.num_bytes > 0
        self.counters.transfer_tokens += received.num_tokens
        self.counters.transfer_bytes += received.num_bytes
        self.counters.transfer_messages += received.num_messages
        self.counters.transfer_s += received.moving_s

    def _on_ends(self, engine: Engine, outputs: EngineOutputs) -> list[Leg]:
        """Leaves of the ends what clients are to know of; returns the legs that have ended."""
        legs = [self._legs.get(engine, end.handle) for end in outputs.finished]
        told = [self._on_end(engine, end) for end in outputs.finished]
        outputs.finished = [end for end in told if end is not None]
        return [leg for leg in legs if leg is not None]

    def _on_end(self, engine: Engine, end: Finished) -> Finished | None:
        """The end of a leg; returns what its client is to know of it."""
        leg = self._legs.get(engine, end.handle)
        if leg is None:  # of a request that its client has left
            return end if end.handle < FIRST_OWN_HANDLE else None
        if not leg.is_open:
            return None
        job = leg.job
        self._legs.close(leg)
        if leg.kind is LegKind.PREFILL:
            self._prefill_ended(job, end)
            return None
        may_move = not job.has_streamed and self.settings.max_retries > 0
        if end.reason is FinishReason.ERROR and leg.lacks_kv and may_move:
            self._legs.mute(leg)
            if not leg.is_loaded:  # refused, or its time was up
                leg.load_reason = "not_loaded"
                self.counters.failures["not_loaded"] += 1
            self._run_whole(job, leg.load_reason, end.error or leg.load_error)
            return None
        if end.reason is FinishReason.ABORT and may_move:  # its engine is about to leave
            self._legs.mute(leg)
            self._run_again(job, "engine_left", f"engine {engine.index} was shut down")
            return None
        self._end(job)
        return msgspec.structs.replace(end, handle=job.handle)

    def _prefill_ended(self, job: Job, end: Finished) -> None:
        job.prefill = None
        if job.is_prefilled:
            return
        if end.reason is FinishReason.ERROR:
            self._fail(job, end.error or "the prompt could not be computed")
        else:
            self._run_again(job, "prefill_lost", "the prefill ended without handing over its KV")

    # ------------------------------------------------------------ when it goes wrong

    def _lost(self, leg: Leg, error: str) -> None:
        """The engine of a leg is gone."""
        job = leg.job
        if leg.kind is LegKind.PREFILL:
            job.prefill = None
            if not job.is_prefilled:
                self._run_again(job, "prefill_died", error)
            return  # what D reads may be there still
        ticket = job.ticket
        source = None if ticket is None else self._legs.holder(ticket)
        if job.has_streamed or job.num_retries >= self.settings.max_retries:
            self._fail(job, error)
        elif ticket is not None and source is not None:
            self._count_retry(job, "decode_died", Boundary.PREFILL_FINISHED)
            job.serving = None
            self._set_deadline(job)
            self._load(job, source, ticket)
        else:
            self._run_again(job, "decode_died", error)

    def _run_again(self, job: Job, reason: str, error: str) -> None:
        """From the start and elsewhere; when it was tried often enough, whole."""
        if job.num_retries >= self.settings.max_retries:
            self._run_whole(job, reason, error)
            return
        self._legs.unwind(job)
        self._count_retry(job, reason)
        self._waiting.appendleft(job)

    def _run_whole(self, job: Job, reason: str, error: str) -> None:
        """The last resort: prefill where it decodes, unless that would hold up too many others."""
        limit = self.settings.recompute_max_tokens
        if limit is not None and job.num_prompt_tokens > limit:
            error += f"; the prompt has {job.num_prompt_tokens:,} tokens, limit: {limit:,} to "
            error += "prefill where it decodes; raise --kv-recompute-max-tokens to retry such ones"
            self._fail(job, error)
        elif self.settings.max_retries == 0 or job.whole_reason:
            self._fail(job, error)
        else:
            self._legs.unwind(job)
            job.whole_reason = reason
            self.counters.recomputes[reason] += 1
            self._count_retry(job, reason)
            self._waiting.appendleft(job)

    def _count_retry(self, job: Job, reason: str, at: Boundary = Boundary.MOVED) -> None:
        job.num_retries += 1
        self.counters.retries[reason] += 1
        self._events.append((job.handle, at, self._clock.now()))

    # ------------------------------------------------------------ time

    def next_deadline_s(self) -> float | None:
        """When `on_time` is to be called next, on the clock; None: not until something happens."""
        if self._ends:
            return self._clock.now()
        renew_at_s, due_s = self._renew_at_s, self._deadlines.next_s()
        if renew_at_s is None or due_s is None:
            return due_s if renew_at_s is None else renew_at_s
        return min(renew_at_s, due_s)

    def on_time(self) -> EngineOutputs | None:
        """Do what is due: renew leases, give up what is late. Returns what clients are to know."""
        now_s = self._clock.now()
        if self._renew_at_s is not None and now_s >= self._renew_at_s:
            self._legs.renew()
            next_s = now_s + self.settings.lease_s / _RENEWALS
            self._renew_at_s = next_s if self._legs.num_holds else None
        while (job := self._deadlines.take_due(now_s)) is not None:
            self._late(job)
        self._place_waiting()
        return self._with_ours(nothing(now_s)) if self._events or self._ends else None

    def _late(self, job: Job) -> None:
        self.counters.num_late += 1
        timeout_s = self.settings.handoff_timeout_s
        if job in self._waiting:
            self._waiting.remove(job)
            self._fail(job, f"no engine that decodes was ready within {timeout_s:g} s")
            return
        job.avoid = job.reader
        self._run_whole(job, "late", f"the hand-off was not over within {timeout_s:g} s")

    def _set_deadline(self, job: Job) -> None:
        self._deadlines.set(job, self._clock.now() + self.settings.handoff_timeout_s)

    def take_messages(self) -> list[tuple[int, ToEngine]]:
        """What is to be sent now, in order: engines with messages."""
        messages, self._legs.messages = self._legs.messages, []
        return messages
