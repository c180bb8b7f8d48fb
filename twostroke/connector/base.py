"""What a KV connector is to the scheduler, to the worker, and to what moves the bytes.

    core ▷ KvConnectorScheduler ──StepPlan.kv──▶ KvConnectorWorker ▷ Transport, Peer
                                ◀─StepResult.kv─

The scheduler asks its half for tokens whose KV exists elsewhere, and hands finished requests to it.
The other half lives with the worker and reads, through a transport, the memory of other engines.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from twostroke.arrays import Int32s, Int64s, UInt8s
from twostroke.kv_messages import (
    KvCommands,
    KvEndpoint,
    KvLayoutRecord,
    KvLink,
    KvLoad,
    KvReady,
    KvReceive,
    KvReceived,
    KvReport,
    KvSend,
)
from twostroke.messages import AddRequest, FinishReason


class KvRequest(Protocol):
    """What a connector may read of a request. `token_ids` are all tokens known so far.

    Only `uid` is unique for ever; clients may choose the same `request_id` twice. `num_computed` is
    how many tokens have their KV in place, while it has no seat.
    """

    @property
    def uid(self) -> int: ...
    @property
    def handle(self) -> int: ...
    @property
    def request_id(self) -> str: ...
    @property
    def kv_send(self) -> KvSend | None: ...
    @property
    def kv_receive(self) -> KvReceive | None: ...
    @property
    def max_tokens(self) -> int: ...
    @property
    def num_computed(self) -> int: ...
    @property
    def finish_reason(self) -> FinishReason | None: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_preemptions(self) -> int: ...
    @property
    def token_ids(self) -> Int32s: ...


class KvConnectorScheduler(Protocol):
    """The scheduler's half of a connector. No method may wait.

        on_new_request ─▶ get_num_new_matched_tokens (any number of times, while nothing of the
        request is computed) ─▶ update_state_after_alloc ─▶ ... ─▶ request_finished (once)

    with `build_connector_meta` and `update_connector_output` at every step, also empty ones.
    """

    def on_new_request(self, request: KvRequest) -> None:
        """The request has arrived."""
        ...

    def get_num_new_matched_tokens(
        self, request: KvRequest, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """How many tokens beyond the local prefix hit can be loaded, and whether asynchronously.

        None means "not known yet": the request is passed over and asked again at the next step. A
        synchronous load must leave one token to compute.
        """
        ...

    def update_state_after_alloc(
        self, request: KvRequest, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        """Blocks were allocated; `block_ids` is the whole table. 0 external tokens: none to load.

        An asynchronous load may start now; it must be reported once, by `KvReport`, in every case.
        """
        ...

    def build_connector_meta(self) -> KvCommands | None:
        """What the worker's half must do before this step. Called at every step."""
        ...

    def update_connector_output(self, report: KvReport) -> None:
        """The worker's half reported ended transfers."""
        ...

    def request_finished(
        self, request: KvRequest, block_ids: Sequence[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The request ended, in whatever way. True: keep its blocks until the send is reported.

        The dictionary, if any, goes to the client of the request.
        """
        ...


@dataclass(slots=True)
class KvEnds:
    """Transfers that are over, for the core to act on; requests by uid."""

    loaded: list[int] = field(default_factory=list)  # their KV is in place: they can run
    failed: list[tuple[int, str]] = field(default_factory=list)  # it is not: they end by the error
    freed: list[int] = field(default_factory=list)  # ended before; nobody uses their blocks now


@dataclass(slots=True)
class KvOutputs:
    """What the router must hear, in the order in which it happened."""

    ready: list[KvReady] = field(default_factory=list)
    received: list[KvReceived] = field(default_factory=list)
    links: list[KvLink] = field(default_factory=list)


@dataclass(slots=True)
class KvCounts:
    """Gauges and counters; see `EngineStats`."""

    num_holds: int = 0
    hold_usage: float = 0.0
    num_expired_leases: int = 0
    num_failed_loads: int = 0
    num_unknown_transfers: int = 0


@runtime_checkable
class KvHandoffScheduler(KvConnectorScheduler, Protocol):
    """The scheduler's half of a connector that hands prompts over between engines.

    The router's messages come in, `KvOutputs` go out, and `KvEnds` tell the core what to do; all
    are named by uid, handle or transfer id, never by request_id. `request_finished` decides alone
    whether blocks are kept; they are until `KvEnds.freed`.
    """

    @property
    def num_sends_ended(self) -> int:
        """Grows whenever a send gives up what it took of the bound: others may pass now."""
        ...

    @property
    def has_commands(self) -> bool:
        """Whether the worker's half must be told something."""
        ...

    @property
    def awaits_report(self) -> bool:
        """Whether the worker's half will have something to tell."""
        ...

    @property
    def has_outputs(self) -> bool: ...

    def refusal(self, request: AddRequest) -> str | None:
        """Why the hand-off that a request asks for can never work, or None."""
        ...

    def may_send(self, request: KvRequest, cached: Sequence[int], *, is_first: bool) -> bool:
        """Whether a prompt that will be held may start now; `cached` are its prefix hits.

        `is_first`: no other waits for this. Once its blocks are allocated the answer stays True.
        """
        ...

    def blocks_lost(self, request: KvRequest) -> None:
        """It was preempted, and is computed again from the start."""
        ...

    def chunk_computed(self, request: KvRequest, block_ids: Sequence[int], num_tokens: int) -> None:
        """The result is in: the KV of this many tokens of the prompt is in place."""
        ...

    def ready(self, message: KvReady) -> None:
        """More of a prompt that is loaded here can be read."""
        ...

    def release(self, transfer_ids: Sequence[bytes]) -> None:
        """Nobody will read these any more."""
        ...

    def renew(self, transfer_ids: Sequence[bytes]) -> None:
        """The leases of these begin anew."""
        ...

    def connect(self, endpoint: KvEndpoint) -> None: ...
    def disconnect(self, engine_id: str) -> None: ...

    def expire(self) -> None:
        """End what is past its deadline. Called in every turn of the loop."""
        ...

    def next_deadline_s(self) -> float | None:
        """When `expire` may have something to do next, on the clock that it was handed."""
        ...

    def take_ends(self) -> KvEnds | None:
        """What is over since the last call."""
        ...

    def take_pieces(self, num_in_flight: int) -> list[KvLoad]:
        """What need not travel with a plan, when so many of those built have not been run: the
        worker's half can be told at once, by `apply`."""
        ...

    def plans_skipped(self, count: int) -> None:
        """As many were run as if they had been built, with nothing to tell."""
        ...

    def take_outputs(self) -> KvOutputs:
        """What the router must hear since the last call."""
        ...

    def counts(self) -> KvCounts: ...

    def check_integrity(self, held: Collection[int], unfinished: Collection[int]) -> None:
        """Raise IntegrityError unless these uids and the transfers known here agree."""
        ...


class KvConnectorWorker(Protocol):
    """The worker's half: moves bytes in threads of its own. One for each rank; used by one thread,
    save that loads may be told of from another.

    No method but `wait` and `shutdown` may wait for a transfer.
    """

    @property
    def endpoint(self) -> KvEndpoint:
        """Where this rank can be read: `addresses` has this rank's alone."""
        ...

    def apply(self, commands: KvCommands) -> None:
        """Do what the scheduler's half says; called before the step that the commands came with."""
        ...

    def report(self) -> KvReport | None:
        """What has ended since the last report."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Return once there is something to report, or nothing under way, or time is up."""
        ...

    def shutdown(self) -> None:
        """End the threads and let go of peers and memory. Idempotent."""
        ...


# ---------------------------------------------------------------- what moves the bytes


class TransferError(Exception):
    """A peer cannot be reached, or a read failed; the message says why, without the peer's name.

    Whoever catches it may reuse the memory that was read into: no byte arrives any more.
    """


@dataclass(frozen=True)
class KvMemory:
    """One rank's memory that others read, and that reads go into.

        address ─▶ | pool | scratch |      leases [slots, TRANSFER_ID_BYTES], in host memory

    Offsets in pieces count from `address`. The scratch takes what is read to measure a link. A slot
    for each block is enough, as a hold has at least one block that no other hold has.
    """

    address: int
    pool_bytes: int
    scratch_bytes: int
    leases: UInt8s
    device: str = "cpu"  # or cuda:0, ...
    fd: int = -1  # of the memory file | pool | scratch | leases |, if it is one


class Peer(Protocol):
    """One rank of another engine, ready to be read. Used by one thread at a time."""

    def read(self, pieces: Int64s) -> None:
        """Copy pieces [n, 3] of (offset in its memory, offset in ours, bytes); waits, without GIL.

        At most the transport's `max_pieces`, each of at most `max_piece_bytes` and inside both
        memories (TransferError otherwise). Returns once all is in place. Raises TransferError
        only when nothing is under way any more: however long a peer hangs, this waits.
        """
        ...

    def lease(self, slot: int) -> bytes:
        """Its lease word, as it is now; the caller has had a `fence` since it read the data that
        this is to vouch for. Raises TransferError."""
        ...

    def close(self) -> None:
        """Let go of it. Idempotent.

        May be called while another thread is in `read`, which then ends, by TransferError if it
        was not complete: this is how a read from a peer that hangs is ended.
        """
        ...


class Transport(Protocol):
    """A way to read memory of another process."""

    @property
    def name(self) -> str:
        """As in `KvEndpoint.transport`."""
        ...

    @property
    def max_pieces(self) -> int:
        """Most pieces of one `Peer.read`."""
        ...

    @property
    def max_piece_bytes(self) -> int: ...

    def open(self, memory: KvMemory, layout: KvLayoutRecord, engine_id: str) -> str:
        """Let others read `memory`, from now until `close`. Returns our address. Called once.

        Raises ConfigError when this machine cannot do it.
        """
        ...

    def connect(self, address: str, engine_id: str) -> Peer:
        """Shake hands with a rank of the engine; may take long. Called from several threads.

        Raises TransferError, also when another engine answers at that address.
        """
        ...

    def close(self) -> None:
        """Stop being read. Peers are closed before. Idempotent."""
        ...
