"""What scheduling and results share: requests, queues, seats, blocks, and how a request leaves.

`EngineState` keeps these consistent with each other; it decides nothing. Preempting, finishing and
aborting are here because both sides do them.
"""

from collections import deque
from collections.abc import Sequence

import numpy as np

from twostroke.config import SchedulerConfig
from twostroke.connector.base import KvConnectorScheduler, KvHandoffScheduler
from twostroke.core.queue import WaitingQueues
from twostroke.core.request import Request, Status
from twostroke.core.seats import Seats
from twostroke.core.step import Step
from twostroke.errors import ConfigError
from twostroke.kv.manager import BlockTable, IntegrityError, KvManager
from twostroke.messages import FinishReason, Int32s, Int64s

_MEAN_WEIGHT = 0.05  # of the newest


class EngineState:
    """Requests and everything they own.

    With `faithful` a sequence may grow past what the pool can ever hold, as in vLLM, where it then
    waits for ever; otherwise it ends there, by length.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        connector: KvConnectorScheduler | None = None,
        *,
        faithful: bool = False,
    ) -> None:
        self.config = config
        self.connector = connector
        self.handoff = connector if isinstance(connector, KvHandoffScheduler) else None
        self.faithful = faithful
        self.in_flight: deque[Step] = deque()  # begun and not finished, oldest first
        self.kv = KvManager(config, in_runs=self.handoff is not None)
        self.queues = WaitingQueues(config.policy)
        drafting = config.num_spec_tokens > 0 and config.spec_method != "ngram"
        self.lookahead = config.num_spec_tokens if drafting else 0  # slots beyond a row's tokens
        self.token_budget = _token_budget(config)
        self.max_length = config.max_model_len
        if config.sliding_window is None and not faithful:
            # The last token of a sequence needs no KV: hence + 1.
            capacity = self.kv.pool.num_usable * config.block_size + 1
            self.max_length = min(config.max_model_len, capacity)
        self.seats = Seats(
            config.max_num_seqs,
            self.kv,
            max_model_len=config.max_model_len,
            max_length=self.max_length,
            num_drafts=config.num_spec_tokens,
        )
        self.order: Int64s = np.empty(config.max_num_seqs, np.int64)  # seats, by admission
        self.num_running = 0  # set by `run`
        self.running = self.order[:0]  # seats of the running requests, in order of admission
        self.requests: dict[int, Request] = {}  # unfinished, by uid
        self.by_handle: dict[int, Request] = {}  # unfinished
        self.held: dict[int, Request] = {}  # finished, blocks still part of a transfer; by uid
        self.by_request_id: dict[str, Request] = {}  # both, for connectors that hand nothing over
        self.loading: dict[int, Request] = {}  # hand-offs under way to us, by uid
        self.loaded: dict[int, Request] = {}  # and those that have arrived and have no seat yet
        self.streaming: dict[int, int] = {}  # uid of a seated send that streams -> its first step
        self.is_stalled = False  # nothing changes until something comes from outside
        self.finished_ids: list[str] = []  # since the last plan
        self.mean_output_tokens = 0.0  # of requests that ended here by themselves, lately
        self.num_preemptions = 0
        self.num_prefix_queries = 0
        self.num_prefix_hits = 0
        self._freed_slots: list[int] = []

    @property
    def reserve_output_tokens(self) -> int:
        """Output that admission leaves room for, of each request that runs.

        With hand-offs it is the mean of late unless it is set: what is preempted after its KV came
        from elsewhere has its whole prompt computed again by an engine that is to decode.
        """
        if self.config.reserve_output_tokens or self.handoff is None:
            return self.config.reserve_output_tokens
        return int(self.mean_output_tokens)

    @property
    def num_waiting(self) -> int:
        """Requests without a seat: those in the queues."""
        return len(self.requests) - self.num_running

    @property
    def num_seats_taken(self) -> int:
        """Seats of running requests, and those that hand-offs to us will take."""
        return self.num_running + len(self.loading) + len(self.loaded)

    @property
    def has_work(self) -> bool:
        """Requests that are unfinished or hold blocks, or departures that no plan has told yet.

        With hand-offs, what only waits for a message or a deadline is no work.
        """
        if self.handoff is None:
            return bool(self.requests or self.held or self.has_untold)
        may_run = self.requests and not self.is_stalled
        return bool(
            may_run or self.has_untold or self.handoff.has_commands or self.handoff.awaits_report
        )

    @property
    def has_untold(self) -> bool:
        """Departures that no plan has told yet."""
        return bool(self.finished_ids or self._freed_slots)

    def request_at(self, slot: int) -> Request:
        request = self.seats.request_of[slot]
        assert request is not None
        return request

    def tables_at(self, slots: Int64s) -> list[BlockTable]:
        """The block tables of those in these seats, none of them vacant."""
        requests = self.seats.request_of
        return [requests[slot].table for slot in slots.tolist()]

    # ------------------------------------------------------------ coming and going

    def add(self, request: Request) -> None:
        self.requests[request.uid] = request
        self.by_handle[request.handle] = request
        self.queues.add(request)
        if self.connector is not None:
            if self.handoff is None:
                self.by_request_id[request.request_id] = request
            self.connector.on_new_request(request)

    def vacate(self, request: Request, *, keep_tokens: bool = True) -> None:
        """Take a running request's seat; the worker is told with the next plan."""
        self._freed_slots.append(self.seats.leave(request, keep_tokens=keep_tokens))

    def flush_freed_slots(self) -> list[int]:
        freed, self._freed_slots = self._freed_slots, []
        self.finished_ids = []
        return freed

    def run(self, count: int) -> None:
        """So many of `order` run now."""
        self.num_running, self.running = count, self.order[:count]

    def compact(self) -> None:
        """Drop vacated seats from the running order."""
        running = self.running
        kept = running[self.seats.uid[running] >= 0]
        self.order[: len(kept)] = kept
        self.run(len(kept))

    def register_blocks(self, slots: Int64s, full: Int32s) -> None:
        """Enter blocks that seated requests fill, up to `full` known tokens, into the cache."""
        self.seats.hash_blocks(slots, full)
        tables = self.tables_at(slots)
        self.kv.register_all(tables, full.tolist())
        size = self.config.block_size
        self.seats.register_at[slots] = (full // size + 1) * size

    def preempt(self, place: int) -> Request:
        """Take blocks and seat of the request at this place of `running`; it is recomputed later.

        Tokens that are in flight for it stay due, and are appended when they arrive.
        """
        request = self.request_at(int(self.order[place]))
        self.order[place : self.num_running - 1] = self.order[place + 1 : self.num_running].copy()
        self.run(self.num_running - 1)
        self.vacate(request)
        self.lose_blocks(request)
        if request.kv_send is not None:
            # Its last token must not end it now: there would be nothing to hand over.
            self.void_results(request)
        self.queues.put_back(request)
        return request

    def lose_blocks(self, request: Request) -> None:
        """A request without a seat gives its blocks back and starts again from its tokens."""
        if self.handoff is not None:
            self.handoff.blocks_lost(request)
            self.streaming.pop(request.uid, None)
            self.loaded.pop(request.uid, None)
        self.kv.free(request.table)
        request.status = Status.PREEMPTED
        request.num_computed = 0
        request.num_preemptions += 1
        self.num_preemptions += 1

    def preempt_all(self) -> list[Request]:
        """Preempt every running request, last first; their results in flight become void."""
        preempted = []
        while self.num_running:
            request = self.preempt(self.num_running - 1)
            self.void_results(request)
            preempted.append(request)
        return preempted

    def void_results(self, request: Request) -> None:
        """What is in flight for this request counts for nothing; it has no seat, or is `read`."""
        if self.faithful:
            # vLLM counts results by tokens, so with drafts in flight it drops too many.
            request.frames_to_discard = request.num_placeholders
        else:
            uid = request.uid
            due = sum(bool((step.uids[step.samples] == uid).any()) for step in self.in_flight)
            request.frames_to_discard = due
        request.num_placeholders = 0

    def abort(self, requests: Sequence[Request]) -> None:
        """End unfinished requests from outside: all leave their lists, then each is freed."""
        for request in requests:
            if request.status is not Status.RUNNING:
                self.queues.remove(request)
        for request in requests:
            self.finish(request, FinishReason.ABORT)
        self.compact()

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request: seat, blocks and books. It must have left the waiting queues.

        A running one stays in `running` until `compact`. Blocks that a transfer still uses (a load
        that was not reported yet, or a send that the connector announces) are kept in `held`.
        """
        loading = request.status is Status.WAITING_FOR_REMOTE_KVS and not request.load_reported
        if request.slot >= 0:
            self.vacate(request, keep_tokens=self.connector is not None)
        request.status = Status.FINISHED
        request.finish_reason = reason
        if reason in (FinishReason.STOP, FinishReason.LENGTH) and request.kv_send is None:
            num_output = request.num_known - request.num_prompt_tokens
            self.mean_output_tokens += _MEAN_WEIGHT * (num_output - self.mean_output_tokens)
        del self.requests[request.uid]
        del self.by_handle[request.handle]
        self.finished_ids.append(request.request_id)
        keep = loading
        if self.connector is not None:
            self.kv.release_unseen(request.table, request.num_computed)
            sending, _ = self.connector.request_finished(request, request.table.blocks)
            # With hand-offs a load has reads under way, or has not.
            keep = sending or (keep and self.handoff is None)
            for uids in (self.loading, self.loaded, self.streaming):
                uids.pop(request.uid, None)
        if keep:
            self.held[request.uid] = request
        else:
            self.by_request_id.pop(request.request_id, None)
            self.kv.free(request.table)

    def release_held(self, request: Request) -> None:
        """The transfer that kept a finished request's blocks is over."""
        del self.held[request.uid]
        self.by_request_id.pop(request.request_id, None)
        self.kv.free(request.table)

    def check_integrity(self) -> None:
        """Recount blocks, seats and queues; IntegrityError when they do not balance."""
        requests = [*self.requests.values(), *self.held.values()]
        self.kv.check_integrity(request.table for request in requests)
        if self.handoff is not None:
            self.handoff.check_integrity(self.held.keys(), self.requests.keys())
        seated = {request.uid for request in self.seats.requests()}
        ordered = {self.request_at(slot).uid for slot in self.running.tolist()}
        queued = {request.uid for request in (*self.queues.waiting(), *self.queues.skipped())}
        if seated != ordered or len(ordered) != self.num_running:
            raise IntegrityError(f"{len(seated)} requests have seats; {self.num_running} run")
        if queued & seated or queued | seated != set(self.requests):
            raise IntegrityError(
                f"{len(queued)} waiting and {len(seated)} running requests; "
                f"{len(self.requests)} are unfinished"
            )


def _token_budget(config: SchedulerConfig) -> int:
    """Tokens per step; an autoregressive draft model needs one extra row per seat."""
    if config.max_num_scheduled_tokens is not None:
        return config.max_num_scheduled_tokens
    budget = config.max_num_batched_tokens
    if config.num_spec_tokens > 0 and config.spec_method == "draft_model":
        budget -= config.max_num_seqs
    if budget < 1:
        raise ConfigError(
            f"max_num_batched_tokens {config.max_num_batched_tokens} leaves no tokens beside one "
            f"draft row for each of {config.max_num_seqs} seats",
            hint="raise --max-num-batched-tokens or lower --max-num-seqs",
        )
    return budget
