"""What engines say to each other, through the router, when KV moves from one to another.

    router ──AddRequest(kv_send)──────▶ P      computes the prompt and holds its KV under a lease
    router ◀─EngineOutputs.kv_ready─── P      the ticket: which blocks, how many tokens
    router ──AddRequest(kv_receive)──▶ D      allocates, reads the blocks out of P's memory
    router ◀─EngineOutputs.kv_received─ D
    router ──KvRelease───────────────▶ P      lets the blocks go

Streaming: D gets its request first, without a ticket, and allocates all blocks (EventKind.LOADING
is P's credit); then P gets its own, and its tickets follow to D as `KvReady`, chunk by chunk.

Data moves in one direction only, by one-sided reads: nobody writes into another engine's memory, so
whatever goes wrong can spoil no more than the reader's own copy. Whether that copy is good is said
by the lease: every rank of P keeps a table of lease words beside its pool, and a read counts only
if the word, looked at after the data, still is the ticket's `transfer_id`. P clears the word before
it lets the blocks go, so a reader that was too late, or came with a forged ticket, finds out.
"""

import msgspec

from twostroke.arrays import Int32s

LAYOUT_VERSION = 1
TRANSFER_ID_BYTES = 16
LEASE_ENDED = "the lease ended before all was read"  # an error of loads, apart from the network's
# A row is one token's keys, or values, of one head. In int8 a float32 follows, the row's scale, so
# that it goes wherever the row goes.
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8": 1, "int8": 1}
SCALE_BYTES = {"int8": 4}


def row_bytes(dtype: str, head_dim: int) -> int:
    """Bytes of a row of a KV pool. Of an unknown type, which nobody reads: as of 16 bits."""
    return head_dim * DTYPE_BYTES.get(dtype, 2) + SCALE_BYTES.get(dtype, 0)


class KvLayoutRecord(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine lays KV out; both ends compare records before anything moves.

    Equal `model`, `dtype`, `num_layers`, `num_kv_heads` and `head_dim` are required (`model` is a
    fingerprint of shape and weights). Block size, number of blocks and tensor-parallel size may
    differ: the reader works out which pieces it needs of which rank.
    """

    version: int = LAYOUT_VERSION
    model: str
    dtype: str
    num_layers: int
    num_kv_heads: int  # of the whole model
    head_dim: int
    block_size: int
    num_blocks: int
    tensor_parallel_size: int = 1

    @property
    def bytes_per_token(self) -> int:
        """Bytes of KV that one token takes in the whole engine."""
        return self.num_layers * 2 * self.num_kv_heads * row_bytes(self.dtype, self.head_dim)


class KvEndpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Where an engine's KV can be read. `engine_id` is random for each start of a process."""

    engine_id: str
    transport: str  # shm or nixl
    addresses: list[str]  # by rank, in the transport's own words
    layout: KvLayoutRecord


class KvTicket(msgspec.Struct, frozen=True, kw_only=True):
    """The right to read the KV of a prompt's first `num_tokens` tokens.

    Minted by the engine that computed them, never taken from a client. Entry i of `block_ids` holds
    tokens from i * block size (of that engine) on. `lease_slot` is the place of its lease word
    (there are as many as blocks).
    """

    transfer_id: bytes  # TRANSFER_ID_BYTES random bytes
    endpoint: KvEndpoint
    lease_slot: int
    num_tokens: int
    block_ids: Int32s


# ---------------------------------------------------------------- router -> engine


class KvSend(msgspec.Struct, frozen=True, kw_only=True):
    """In an AddRequest: compute the prompt and hold its KV for another engine.

    Unless it is released, or renewed by `KvRenew`, the hold ends after `lease_s`. With `stream`
    a ticket is sent after every chunk.
    """

    lease_s: float
    stream: bool = False


class KvReceive(msgspec.Struct, frozen=True, kw_only=True):
    """In an AddRequest: the KV of the prompt's first `num_tokens` tokens comes from elsewhere.

    `ticket` None: it will follow in pieces, as `KvReady`. What is not there after `timeout_s` has
    failed.
    """

    num_tokens: int
    timeout_s: float
    ticket: KvTicket | None = None


class KvReady(msgspec.Struct, tag="kv_ready"):
    """More of the prompt of `handle` can be read: P tells the router, and the router tells D.

    `is_last`: the ticket covers the whole prompt.
    """

    handle: int
    ticket: KvTicket
    is_last: bool


class KvRelease(msgspec.Struct, tag="kv_release"):
    """To P: nobody will read these any more. Unknown ones are counted and ignored."""

    transfer_ids: list[bytes]


class KvRenew(msgspec.Struct, tag="kv_renew"):
    """To P: the readers of these are alive; their leases begin anew."""

    transfer_ids: list[bytes]


class KvConnect(msgspec.Struct, tag="kv_connect"):
    """To D: an engine that it will read from. Shake hands and measure the link, ahead of need."""

    endpoint: KvEndpoint


class KvDisconnect(msgspec.Struct, tag="kv_disconnect"):
    """To D: this engine is gone; what is kept of it can go too."""

    engine_id: str


# ---------------------------------------------------------------- engine -> router


class KvReceived(msgspec.Struct, kw_only=True):
    """D's load for `handle` is over, well or not: P can let go. One for each request that asked.

    What may still be read for it (it was aborted, or late) is thrown away.

    `num_tokens` were read (0: all was cached here, or it was better recomputed: `reason`). The time
    is from the first read to the last; of that, reads were under way for `read_s` (0: all of it).
    With an `error` the request has ended by FinishReason.ERROR; the router may run it elsewhere.
    """

    handle: int
    num_tokens: int = 0
    num_bytes: int = 0
    num_messages: int = 0
    started_s: float = 0.0
    ended_s: float = 0.0
    read_s: float = 0.0
    error: str = ""
    reason: str = ""

    @property
    def moving_s(self) -> float:
        """For how long its bytes moved: where it streams, less than from start to end."""
        return self.read_s or self.ended_s - self.started_s


class KvLink(msgspec.Struct, kw_only=True):
    """A link as measured from the reader's side: seconds = base + messages * each + bytes / rate.

    `pipelined` is that of `cost.LinkCost`. `error`: the peer cannot be read from, and why.
    """

    engine_id: str
    base_s: float = 0.0
    message_s: float = 0.0
    bytes_per_s: float = 0.0
    pipelined: bool = False
    error: str = ""


# ---------------------------------------------------------------- scheduler's half <-> worker's


class KvLoad(msgspec.Struct, kw_only=True):
    """Read tokens [`first_token`, ticket.num_tokens) of a ticket into our own blocks.

    `block_ids` is the request's whole table here. A load that streams is told of in pieces with the
    same `load_id`; it is over once the piece with `is_last` is in place.
    """

    load_id: int
    ticket: KvTicket
    first_token: int
    block_ids: Int32s
    is_last: bool = True


class KvCommands(msgspec.Struct, kw_only=True):
    """What the worker's half is to do, in this order, before it runs the step.

    `leases`: lease words to set, by slot (empty: clear). `given_up` loads start no further read,
    and are reported as failed once the reads under way have ended; one that the worker does not
    know is reported as failed at once (its report may have been lost).
    """

    leases: list[tuple[int, bytes]] = []
    loads: list[KvLoad] = []
    given_up: list[int] = []
    connects: list[KvEndpoint] = []
    disconnects: list[str] = []


class KvLoadEnd(msgspec.Struct, kw_only=True):
    """A load is over: no read of it is under way. It has failed if there is an `error`.

    `reads` has start, end and bytes of what was read for each ticket: several where it streams, and
    then less than the time from `started_s` to `ended_s`. Empty where nobody measures it.
    """

    load_id: int
    num_bytes: int = 0
    num_messages: int = 0
    started_s: float = 0.0
    ended_s: float = 0.0
    error: str = ""
    reads: list[tuple[float, float, int]] = []


class KvReport(msgspec.Struct):
    """What KV transfers ended since the last report. Requests are named by request_id.

    `loads` and `links` come from our own connectors, for their other half; the core acts on the
    rest, which are vLLM's.
    """

    finished_sending: list[str] = []
    finished_recving: list[str] = []
    failed_recving: list[str] = []
    invalid_block_ids: list[int] = []
    loads: list[KvLoadEnd] = []
    links: list[KvLink] = []
