"""The scheduler: which request gets how many tokens in the next step.

Running requests first, in order of admission, then waiting ones, until the token budget is used up.
Every request catches up with its known tokens by as many as fit; when blocks are short, a running
request is preempted and later recomputed. The rules are those of vLLM 0.22.1, decision by decision.

`schedule` advances counters optimistically: when the next step is planned before the tokens of this
one are known, they count as placeholders. What results do to requests is in `core.results`.
"""

from enum import Enum

import numpy as np

from twostroke.arrays import ONE, ZERO, has_any, total
from twostroke.core.ended_loads import break_deadlock, end_load, give_up, take_from_ended_load
from twostroke.core.policy import (
    MAX_STALLS,
    MAX_TRIES,
    expected_length,
    last_victim,
    least_lost_victim,
    reserved_blocks,
)
from twostroke.core.request import Request, Status
from twostroke.core.state import EngineState
from twostroke.core.step import Admission, Step
from twostroke.kv.blocks import NO_BLOCKS
from twostroke.messages import Bools, Int32s, Int64s

_TWO = np.array(2, np.int32)


class _Verdict(Enum):
    """What became of the head of the queues."""

    ADMITTED = 0  # it runs, or its load has begun
    PASSED = 1  # it waits for something outside
    STOP = 2  # nobody behind it may run in this step
    LACKS_BLOCKS = 3


class Scheduler:
    """Chooses steps over the state that it shares with `core.results`."""

    def __init__(self, state: EngineState) -> None:
        self.state = state
        self.kv = state.kv
        self.seats = state.seats
        self.queues = state.queues
        self.config = state.config
        self._connector = state.connector
        self._handoff = state.handoff
        self._sends_seen = 0
        self.num_steps = 0
        self._admitted_counts: list[int] = []
        self._last_place = np.array(self.config.max_model_len - 1, np.int32)
        least_lost = self.config.preemption == "least_lost"
        self._victim = least_lost_victim if least_lost else last_victim

    # ------------------------------------------------------------ one step

    def schedule(self, *, idle: bool = True) -> Step:
        """Choose the next step and advance the counters as if it were done.

        `idle` says that no step with rows is in flight.
        """
        step = Step(self.num_steps, self.state.token_budget)
        self.num_steps += 1
        counts = self._schedule_running(step)
        if not step.preempted:
            self._schedule_waiting(step)
        self._fill_rows(step, counts)
        if idle and step.blocked is not None and not self.state.faithful:
            break_deadlock(self.state, step, step.blocked)
        step.freed_slots = self.state.flush_freed_slots()
        return step

    def extend(self, step: Step) -> None:
        """Let those into `step`, the last one, who came after it was chosen, as far as they fit.

        It must have preempted nobody, and have left nobody to wait.
        """
        self._schedule_waiting(step)
        counts = np.array(self._admitted_counts, np.int32)
        self._admitted_counts.clear()
        if len(counts):
            self._add_rows(step, self.state.running[-len(counts) :].copy(), counts)

    # ------------------------------------------------------------ running requests

    def _schedule_running(self, step: Step) -> Int32s:
        """Give tokens to running requests; returns how many to each, by place in `running`."""
        counts = np.zeros(self.state.num_running, np.int32)
        index = 0
        while index < self.state.num_running and step.budget > 0:
            short = self._schedule_rows(step, index, counts)
            if short is None:
                break
            slot = int(self.state.order[short])
            request = self.state.request_at(slot)
            wanted = int(counts[short])
            counts[short] = 0
            index, wanted, counts = self._make_room(step, request, short, wanted, counts)
            if request.slot < 0:
                break
            here = int(np.flatnonzero(self.state.running == slot)[0])
            counts[here] = wanted
            step.budget -= wanted
            index += 1
        return counts

    def _schedule_rows(self, step: Step, start: int, counts: Int32s) -> int | None:
        """Rows from place `start` on, up to one that lacks blocks, whose place is returned.

        `counts` of that row holds what it wants. All arithmetic is over columns; only rows that
        reach a block boundary are looked at one by one.
        """
        seats, config = self.seats, self.config
        slots = self.state.order[start : self.state.num_running]
        computed, known = seats.computed[slots], seats.known[slots]
        pending = seats.placeholders[slots]
        wanted = known + pending
        if config.num_spec_tokens:
            wanted += seats.num_drafts[slots]
        np.minimum(wanted, self._last_place, out=wanted)
        wanted -= computed
        if config.long_prefill_token_threshold > 0:
            np.minimum(wanted, config.long_prefill_token_threshold, out=wanted)
        if self.state.in_flight:  # a step that certainly ends these
            ends = computed - pending >= seats.end[slots] - _TWO
            if has_any(ends):
                wanted[ends & (pending > ZERO)] = 0
        np.maximum(wanted, ZERO, out=wanted)
        in_all = total(wanted)
        if not in_all:
            return None
        if in_all > step.budget:
            before, in_all = wanted.cumsum() - wanted, step.budget
            wanted = np.minimum(np.maximum(in_all - before, 0), wanted).astype(np.int32)
        after = needed = computed + wanted
        if self.state.lookahead:
            needed = np.minimum(after + self.state.lookahead, config.max_model_len)
        active = wanted > ZERO
        short = (needed > seats.room[slots]) & active
        if config.sliding_window is not None:
            short |= (computed >= seats.window_at[slots]) & active
        stop = len(slots)
        if has_any(short):
            stop = self._grow_rows(step, slots, short, computed, needed)
        if self.kv.caching:
            full = np.minimum(after, known)
            fills = ((full >= seats.register_at[slots]) & active)[:stop].nonzero()[0]
            if len(fills):
                self.state.register_blocks(slots[fills], full[fills])
        counts[start : start + stop] = wanted[:stop]
        if stop == len(slots):
            step.budget -= in_all
            return None
        step.budget -= total(wanted[:stop])
        counts[start + stop] = wanted[stop]
        return start + stop

    def _grow_rows(
        self, step: Step, slots: Int64s, short: Bools, computed: Int32s, needed: Int32s
    ) -> int:
        """Blocks for the rows that are `short`; the first row that gets none, or their number.

        They are served from the front of the free list in row order: together while blocks
        suffice, one by one near the end of the pool or with a window, which gives some back.
        """
        seats, kv = self.seats, self.kv
        places = short.nonzero()[0]
        lacking = slots[places]
        missing = needed[places] - seats.room[lacking]
        counts = (missing + (kv.block_size - 1)) // kv.block_size
        if not kv.windowed and total(counts) <= kv.num_free:
            seats.room[lacking] += counts * kv.block_size
            tables = self.state.tables_at(lacking)
            step.grown.update(
                zip(lacking.tolist(), kv.take_for(tables, counts.tolist()), strict=True)
            )
            return len(slots)
        for place in places.tolist():
            slot = int(slots[place])
            if not self._grow_row(step, slot, int(computed[place]), int(needed[place])):
                return int(place)
        return len(slots)

    def _grow_row(self, step: Step, slot: int, computed: int, needed: int) -> bool:
        """Blocks for one row, so that its table holds `needed` tokens."""
        request = self.state.request_at(slot)
        taken = self.kv.grow(request.table, computed, needed)
        if taken is None:
            return False
        if len(taken):
            step.grown[slot] = taken
        self.seats.refresh_table(request)
        return True

    # ------------------------------------------------------------ preemption

    def _make_room(
        self, step: Step, request: Request, index: int, wanted: int, counts: Int32s
    ) -> tuple[int, int, Int32s]:
        """Preempt until `request` (at place `index`) has its blocks or is itself the victim.

        Returns its index, its tokens, and the counts, shifted by the victims that left before it.
        """
        state = self.state
        while True:
            if state.num_running == 1 and (granted := self._ends_stall(step, request, wanted)):
                return index, granted, counts[: state.num_running]
            place = self._victim(state)
            victim = state.request_at(int(state.order[place]))
            if counts[place] > 0:
                # Already scheduled in this step: its tokens go back to the budget.
                step.budget += int(counts[place])
                step.grown.pop(victim.slot, None)
                index -= 1
            # A victim before `index` that was not scheduled does not lower it, so that the
            # request behind this one is passed over in this step (as in vLLM 0.22.1).
            counts = np.delete(counts, place)
            state.preempt(place)
            step.preempted.append(victim)
            if victim is request or self._grow_lone(step, request, wanted, state.lookahead):
                return index, wanted, counts

    def _ends_stall(self, step: Step, request: Request, wanted: int) -> int:
        """A request that runs alone and lacks blocks would preempt itself.

        That may help: its drafts are dropped, and more of it is cached. If it keeps coming back to
        this point without a new token, it goes on without drafts and room for them; and if that
        is not enough, it ends here. Returns its tokens in this step, or 0 to preempt it.
        """
        if self.state.faithful:
            return 0
        self.seats.read(request)
        if request.stalled_at != request.num_known:
            request.stalled_at, request.num_stalls = request.num_known, 0
        request.num_stalls += 1
        if request.num_stalls <= MAX_STALLS:
            return 0
        wanted = max(1, wanted - int(self.seats.num_drafts[request.slot]))
        while not self._grow_lone(step, request, wanted, 0):
            if take_from_ended_load(self.state, step):
                continue
            if self.queues.num_holding_blocks or self.state.held:
                return 0
            give_up(self.state, step, request)
            break
        return wanted

    def _grow_lone(self, step: Step, request: Request, wanted: int, lookahead: int) -> bool:
        """Blocks for one row that lacked them, and registration of those it fills."""
        seats, slot = self.seats, request.slot
        after = int(seats.computed[slot]) + wanted
        needed = min(after + lookahead, self.config.max_model_len)
        if not self._grow_row(step, slot, after - wanted, needed):
            return False
        full = min(after, int(seats.known[slot]))
        if full >= seats.register_at[slot]:
            self.state.register_blocks(np.array([slot]), np.array([full], np.int32))
        return True

    # ------------------------------------------------------------ waiting requests

    def _schedule_waiting(self, step: Step) -> None:
        """Admit from the head of the queues until something stops the scan."""
        policy, tries = self.config.admission, 0
        if self._handoff is not None:
            self._before_scan(step)
        while step.budget > 0 and self.state.num_seats_taken < self.config.max_num_seqs:
            loads_only = step.blocked is not None and policy == "loads"
            request = self.queues.head(skipped_only=loads_only)
            if request is None:
                break
            if loads_only and not request.table.blocks:
                self.queues.hide(request)
                continue
            verdict = self._try_admit(step, request)
            if verdict is _Verdict.STOP:
                break
            if verdict is _Verdict.LACKS_BLOCKS:
                step.blocked, tries = step.blocked or request, tries + 1
                if policy == "head" or tries == MAX_TRIES:
                    break
                self.queues.hide(request)
            elif step.blocked is not None and verdict is _Verdict.ADMITTED:
                step.blocked.num_passes += 1
            if step.blocked is not None and step.blocked.num_passes >= self.config.max_backfills:
                break
        self.queues.end_scan()

    def _before_scan(self, step: Step) -> None:
        """Admit requests whose KV has arrived: no head may hide them, for they have their blocks.

        And let the first of those held back be looked at again, when something was let go.
        """
        assert self._handoff is not None
        for request in list(self.state.loaded.values()):
            if step.budget == 0 or self.state.num_running == self.config.max_num_seqs:
                break
            if self._try_admit(step, request) is _Verdict.STOP:
                break
        if self._sends_seen != self._handoff.num_sends_ended:
            self._sends_seen = self._handoff.num_sends_ended
            self.queues.wake_held_back()

    def _try_admit(self, step: Step, request: Request) -> _Verdict:
        """Admit the head of the queues, start its load, pass it over, or stop the scan."""
        if request.status is Status.WAITING_FOR_REMOTE_KVS:
            end_load(self.state, request)
        elif request.status is Status.WAITING_FOR_GRAMMAR:
            request.status = Status.WAITING
        hits = NO_BLOCKS
        num_local, num_external, asynchronous = None, 0, False
        if request.num_computed == 0:
            hits = self._lookup(request)
            num_local = len(hits) * self.config.block_size
            if self._is_held_back(step, request, hits):
                return _Verdict.PASSED
            if self._connector is not None and request.may_load:
                answer, asynchronous = self._connector.get_num_new_matched_tokens(
                    request, num_local
                )
                if answer is None:
                    self.kv.remember_lookup(request.table)
                    self.queues.pass_over(request)
                    return _Verdict.PASSED
                asynchronous = asynchronous and answer > 0
                # A synchronous load leaves one token to run, to sample the next.
                most = request.num_known - num_local - (not asynchronous)
                num_external = max(0, min(answer, most))
        computed = request.num_computed + (num_local or 0) + num_external
        num_new = 0 if asynchronous else self._admission_tokens(step, request, computed)
        if num_new < 0:
            return _Verdict.STOP
        if not self._leaves_room(request, hits) or not self.kv.allocate(
            request.table,
            num_tokens=request.num_known,
            num_computed=request.num_computed,
            hits=hits,
            num_external=num_external,
            num_new=num_new,
            lookahead=self._lookahead(request, computed, asynchronous=asynchronous),
            reserve_full=self.config.reserve_full_isl,
            delay_registration=asynchronous,
        ):
            if num_local is not None:
                self.kv.remember_lookup(request.table)
            return _Verdict.LACKS_BLOCKS
        if self._connector is not None:
            self._connector.update_state_after_alloc(request, request.table.blocks, num_external)
        admission = Admission(
            request, computed, num_local, num_external, request.status is Status.PREEMPTED
        )
        request.num_computed = computed
        if asynchronous:
            request.num_local_hit = num_local or 0
            request.status = Status.WAITING_FOR_REMOTE_KVS
            self.queues.block(request)
            step.loading.append(admission)
            if self._handoff is not None:
                self.state.loading[request.uid] = request
        else:
            self._admit(step, admission, num_new)
        return _Verdict.ADMITTED

    def _is_held_back(self, step: Step, request: Request, hits: Int64s) -> bool:
        """Whether a prefill must wait because what is held for others takes too much memory."""
        if self._handoff is None or request.kv_send is None:
            return False
        is_first = request.was_held_back or not self.queues.num_held_back
        if self._handoff.may_send(request, hits.tolist(), is_first=is_first):
            return False
        self.kv.remember_lookup(request.table)
        self.queues.hold_back(request)
        if not request.was_held_back:
            request.was_held_back = True
            step.held_back.append(request)
        return True

    def _lookahead(self, request: Request, computed: int, *, asynchronous: bool) -> int:
        """Slots to reserve beyond the tokens of a request that is to be admitted.

        A hand-off needs its first decode slots from the start: two loads that fill the pool, each
        lacking one more block, would wait for each other for ever.
        """
        if not asynchronous or self._handoff is None:
            return self.state.lookahead if request.num_computed else 0
        capacity = self.kv.pool.num_usable * self.config.block_size
        return max(0, min(1 + self.config.num_spec_tokens, capacity - computed))

    def _leaves_room(self, request: Request, hits: Int64s) -> bool:
        """Whether blocks for the expected growth of all that runs remain beside this request."""
        if not self.state.reserve_output_tokens or not self.state.num_seats_taken:
            return True
        if request.uid in self.state.loaded:
            return True  # this was seen to before its load began
        blocks = self.kv.blocks_at_once(expected_length(self.state, request))
        own = blocks - len(hits) - len(request.table.blocks)
        return own + reserved_blocks(self.state) <= self.kv.num_free

    def _lookup(self, request: Request) -> Int64s:
        if len(request.table.keys) < request.num_known // self.config.block_size:
            self.kv.hash_tokens(request.table, request.tokens)
        hits = self.kv.lookup(request.table, request.num_known)
        if self.kv.caching and request.table.may_read and request.num_preemptions == 0:
            self.state.num_prefix_queries += request.num_known
            self.state.num_prefix_hits += len(hits) * self.config.block_size
        return hits

    def _admission_tokens(self, step: Step, request: Request, computed: int) -> int:
        """Tokens to compute in the step of admission; -1 when the scan must stop instead."""
        wanted = request.num_known - computed
        threshold = self.config.long_prefill_token_threshold
        if 0 < threshold < wanted:
            wanted = threshold
        if not self.config.enable_chunked_prefill and wanted > step.budget:
            # Preempted, a request may have outgrown the budget: then it takes a step of its own.
            whole_step = step.budget == self.state.token_budget < wanted
            if self.state.faithful or not whole_step:
                return -1
        return min(wanted, step.budget)

    def _admit(self, step: Step, admission: Admission, num_new: int) -> None:
        request = admission.request
        self.queues.take(request)
        request.status = Status.RUNNING
        if self._handoff is not None:
            self.state.loaded.pop(request.uid, None)
            if request.kv_send is not None:
                if request.kv_send.stream:
                    self.state.streaming[request.uid] = step.number
                self.queues.wake_held_back()  # there may be room for the next
        self.state.order[self.state.num_running] = self.seats.sit(request)
        self.state.run(self.state.num_running + 1)
        step.budget -= num_new
        step.admitted.append(admission)
        self._admitted_counts.append(num_new)

    # ------------------------------------------------------------ rows

    def _fill_rows(self, step: Step, counts: Int32s) -> None:
        """Turn counts into the step's rows and advance the columns."""
        admitted = len(step.admitted)
        if admitted:
            own = np.array(self._admitted_counts, np.int32)
            counts = np.concatenate((counts, own)) if len(counts) else own
            self._admitted_counts.clear()
        slots, count = self.state.running, counts
        chosen = counts.nonzero()[0]
        if not len(chosen):
            return
        if len(chosen) < len(counts) or len(counts) < len(slots):
            slots, count = slots[chosen], counts[chosen]
        else:
            slots = slots.copy()
        self._add_rows(step, slots, count)

    def _add_rows(self, step: Step, slots: Int64s, count: Int32s) -> None:
        """Rows of `count` tokens of the requests in these seats, behind those that there are."""
        seats = self.seats
        computed = seats.computed[slots]
        pending = seats.placeholders[slots]
        due = seats.known[slots] + pending
        after = computed + count
        samples = after >= due
        seats.computed[slots] = after
        num_drafts = np.zeros(len(slots), np.int32)
        if self.config.num_spec_tokens:
            behind = np.maximum(after - due, 0)
            np.minimum(behind, seats.num_drafts[slots], out=num_drafts)
            seats.num_drafts[slots] = 0
        if self.config.async_scheduling:
            more = samples * (ONE + num_drafts) if self.config.num_spec_tokens else samples
            seats.placeholders[slots] = pending + more
            if self.config.num_spec_tokens:
                sampling = slots[samples]
                seats.num_drafts[sampling] = self.config.num_spec_tokens
                seats.drafts[sampling] = -1
        uids, handles = seats.uid[slots], seats.handle[slots]
        step.add_rows(slots, uids, handles, computed, count, num_drafts, samples)
