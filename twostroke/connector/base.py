"""What a KV connector is to the scheduler, to the worker, and to what moves the bytes.

    core ▷ KvConnectorScheduler ──StepPlan.kv──▶ KvConnectorWorker ▷ Transport, Peer
                                ◀─StepResult.kv─

The scheduler asks its half for tokens whose KV exists elsewhere, and hands finished requests to it.
The other half lives with the worker and reads, through a transport, the memory of other engines.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from twostroke.arrays import Int32s, Int64s, UInt8s
from twostroke.kv_messages import KvCommands, KvEndpoint, KvLayoutRecord, KvReport


class KvRequest(Protocol):
    """What a connector may read of a request. `token_ids` are all tokens known so far."""

    @property
    def request_id(self) -> str: ...
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


class KvConnectorWorker(Protocol):
    """The worker's half: moves bytes in threads of its own. One for each rank; used by one thread.

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
        """Its lease word, as it is now, after all that was read before. Raises TransferError."""
        ...

    def close(self) -> None:
        """Let go of it; no read is under way. Idempotent."""
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
