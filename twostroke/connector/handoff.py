"""The scheduler's half of the connector that hands prompts over between engines.

    prefill stroke   `sends`    compute a prompt, hold it under a lease, let it go
    decode stroke    `loads`    reserve blocks, have the prompt read into them, run

Every engine does both; which of them it is asked for is the router's choice. Decisions only: it
waits for nothing, and reads time from the clock that it is handed. It is the same for real engines
and for those of the twin.
"""

import secrets
from collections.abc import Callable, Collection, Sequence
from typing import Any

from twostroke.clock import Clock
from twostroke.connector.base import KvCounts, KvEnds, KvOutputs, KvRequest
from twostroke.connector.loads import Loads, ticket_problem
from twostroke.connector.outbox import Outbox
from twostroke.connector.sends import Sends
from twostroke.cost import StepCost
from twostroke.kv.manager import IntegrityError
from twostroke.kv_messages import (
    TRANSFER_ID_BYTES,
    KvCommands,
    KvEndpoint,
    KvLoad,
    KvReady,
    KvReport,
)
from twostroke.messages import AddRequest


def random_transfer_id() -> bytes:
    return secrets.token_bytes(TRANSFER_ID_BYTES)


class HandoffScheduler:
    """`KvHandoffScheduler` for both strokes.

    `endpoint` is where this engine's own KV can be read; block size and number of blocks are its
    layout's. With a `step_cost` a load is computed here instead where reading would take longer (if
    the link is measured). `new_transfer_id` must give ids that nobody can guess; a twin may count.
    """

    def __init__(
        self,
        clock: Clock,
        endpoint: KvEndpoint,
        *,
        max_hold_share: float = 0.5,
        step_cost: StepCost | None = None,
        quarantine_s: float = 60.0,
        new_transfer_id: Callable[[], bytes] = random_transfer_id,
    ) -> None:
        self._clock = clock
        self._outbox = Outbox()
        self._num_plans = 0
        self.endpoint = endpoint
        self.sends = Sends(
            clock,
            endpoint,
            self._outbox,
            max_hold_share=max_hold_share,
            new_transfer_id=new_transfer_id,
        )
        self.loads = Loads(
            clock,
            self._outbox,
            step_cost=step_cost,
            bytes_per_token=endpoint.layout.bytes_per_token,
            quarantine_s=quarantine_s,
        )

    # ------------------------------------------------------------ the life of a request

    def refusal(self, request: AddRequest) -> str | None:
        received = request.kv_receive
        if received is None:
            return None
        if request.kv_send is not None:
            return "a prompt cannot be handed over and taken over at once; limit: one of the two"
        num_prompt = len(request.prompt_token_ids)
        if not 0 < received.num_tokens <= num_prompt:
            return (
                f"KV of {received.num_tokens:,} tokens was announced for a prompt of "
                f"{num_prompt:,}; limit: 1 to the length of the prompt"
            )
        if received.ticket is None:
            return None
        return ticket_problem(received.ticket, received.num_tokens, is_last=True)

    def on_new_request(self, request: KvRequest) -> None:
        if request.kv_send is not None:
            self.sends.new(request, request.kv_send)
        if request.kv_receive is not None:
            self.loads.new(request, request.kv_receive)

    def may_send(self, request: KvRequest, cached: Sequence[int], *, is_first: bool) -> bool:
        return self.sends.may_start(request.uid, cached, is_first=is_first)

    def get_num_new_matched_tokens(
        self, request: KvRequest, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if request.kv_receive is None:
            return 0, False
        missing = self.loads.missing_tokens(request, num_computed_tokens)
        return missing, missing > 0

    def update_state_after_alloc(
        self, request: KvRequest, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        if request.kv_send is not None:
            self.sends.allocated(request.uid, block_ids)
        if request.kv_receive is not None:
            self.loads.allocated(request.uid, block_ids, num_external_tokens)

    def blocks_lost(self, request: KvRequest) -> None:
        if request.kv_send is not None:
            self.sends.lost(request.uid)

    def chunk_computed(self, request: KvRequest, block_ids: Sequence[int], num_tokens: int) -> None:
        self.sends.chunk_computed(request.uid, block_ids, num_tokens)

    def request_finished(
        self, request: KvRequest, block_ids: Sequence[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        is_kept = request.kv_receive is not None and self.loads.finished(request)
        if request.kv_send is not None:
            is_kept |= self.sends.finished(request, block_ids)
        return is_kept, None

    # ------------------------------------------------------------ the router's messages

    def ready(self, message: KvReady) -> None:
        self.loads.ready(message)

    def release(self, transfer_ids: Sequence[bytes]) -> None:
        self.sends.release(transfer_ids)

    def renew(self, transfer_ids: Sequence[bytes]) -> None:
        self.sends.renew(transfer_ids)

    def connect(self, endpoint: KvEndpoint) -> None:
        self.loads.connect(endpoint)

    def disconnect(self, engine_id: str) -> None:
        self.loads.disconnect(engine_id)

    # ------------------------------------------------------------ time, and the worker's half

    def expire(self) -> None:
        now = self._clock.now()
        self.sends.expire(now)
        self.loads.expire(now)

    def next_deadline_s(self) -> float | None:
        times = (self.sends.next_deadline_s(), self.loads.next_deadline_s())
        return min((time for time in times if time is not None), default=None)

    @property
    def num_sends_ended(self) -> int:
        return self.sends.num_ended

    @property
    def has_commands(self) -> bool:
        return self._outbox.has_commands

    @property
    def awaits_report(self) -> bool:
        return self.loads.awaits_report

    def build_connector_meta(self) -> KvCommands | None:
        self._num_plans += 1
        if not self._outbox.has_commands:
            return None
        self.loads.left_with(self._num_plans)
        commands, self._outbox.commands = self._outbox.commands, KvCommands()
        return commands

    def take_pieces(self, num_in_flight: int) -> list[KvLoad]:
        return self.loads.take_pieces(self._num_plans - num_in_flight)

    def plans_skipped(self, count: int) -> None:
        self._num_plans += count

    def update_connector_output(self, report: KvReport) -> None:
        for end in report.loads:
            self.loads.report(end)
        for link in report.links:
            self.loads.link(link)

    # ------------------------------------------------------------ what came of it

    def take_ends(self) -> KvEnds | None:
        if not self._outbox.has_ends:
            return None
        ends, self._outbox.ends = self._outbox.ends, KvEnds()
        return ends

    @property
    def has_outputs(self) -> bool:
        return self._outbox.has_outputs

    def take_outputs(self) -> KvOutputs:
        outputs, self._outbox.outputs = self._outbox.outputs, KvOutputs()
        return outputs

    def counts(self) -> KvCounts:
        sends, loads = self.sends, self.loads
        return KvCounts(
            num_holds=sends.num_holds,
            hold_usage=sends.hold_usage,
            num_expired_leases=sends.num_expired,
            num_failed_loads=loads.num_failed,
            num_unknown_transfers=sends.num_unknown + loads.num_unknown,
        )

    def check_integrity(self, held: Collection[int], unfinished: Collection[int]) -> None:
        known = self.sends.held() | self.loads.held()
        if known != set(held):
            raise IntegrityError(f"blocks of {set(held)} are kept; transfers need {known}")
        self.sends.check_integrity(unfinished)
        self.loads.check_integrity(unfinished)
