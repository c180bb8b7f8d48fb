"""Every structure that crosses a process or thread boundary, in one place.

    API process ──AddRequest, AbortRequests, UtilityCall──▶ engine core
    API process ◀──EngineOutputs, UtilityReply, EngineReady, EngineDead── engine core
    engine core ──StepPlan──▶ worker        engine core ◀──StepResult── worker

All are msgspec structs encoded with msgpack; arrays travel as raw bytes. Nothing is pickled.
What grows with the number of running requests is held in columns (NumPy arrays), one entry a
row, so that a step over a thousand decodes costs a few array operations on either side.
"""

from enum import IntEnum
from typing import Any

import msgspec
import numpy as np

from twostroke.arrays import NO_TOKENS as NO_TOKENS
from twostroke.arrays import Bools as Bools
from twostroke.arrays import Float64s as Float64s
from twostroke.arrays import Int32s as Int32s
from twostroke.arrays import Int64s as Int64s
from twostroke.arrays import UInt8s as UInt8s
from twostroke.kv_messages import (
    KvCommands,
    KvConnect,
    KvDisconnect,
    KvEndpoint,
    KvLink,
    KvReady,
    KvReceive,
    KvReceived,
    KvRelease,
    KvRenew,
    KvReport,
    KvSend,
)

# ---------------------------------------------------------------- what a client asks for


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """How one request is sampled and when it stops. Names and meanings are vLLM's.

    `temperature` 0 is greedy. `top_k` 0 and `top_p` 1 are off. `logprobs` k returns the sampled
    token and the k most likely (0: only the sampled one; None: none). `max_tokens` None means
    up to the model's length. Ranges are checked by `client.sampling.validate`, before a request
    leaves the API process, because a worker trusts them.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None


# ---------------------------------------------------------------- API process -> engine core


class AddRequest(msgspec.Struct, tag="add", kw_only=True):
    """A request, ready to run: tokenised, validated, one sample (`n` is expanded before).

    `handle` is an integer that the sender chooses, unique among its live requests; outputs name
    requests by it. `request_id` is for people and logs. `max_tokens` is resolved (never None).
    `eos_token_ids` is empty when the request ignores EOS.
    """

    handle: int
    request_id: str
    prompt_token_ids: Int32s
    params: SamplingParams
    max_tokens: int
    eos_token_ids: tuple[int, ...] = ()
    arrival_s: float = 0.0
    priority: int = 0
    cache_salt: str = ""
    kv_send: KvSend | None = None
    kv_receive: KvReceive | None = None


class AbortRequests(msgspec.Struct, tag="abort"):
    """Abort these; unknown or finished handles are ignored."""

    handles: list[int]


class UtilityCall(msgspec.Struct, tag="call"):
    """Ask the core something off the hot path.

    Methods: `slots` (what each live request does), `stats`, `reset_prefix_cache`,
    `check_integrity`, `ping`.
    """

    call_id: int
    method: str
    args: list[Any] = []


class Shutdown(msgspec.Struct, tag="shutdown"):
    """Stop: finish what runs within `drain_s` seconds, abort the rest, exit 0."""

    drain_s: float = 0.0


ToEngine = (
    AddRequest
    | AbortRequests
    | UtilityCall
    | Shutdown
    | KvReady
    | KvRelease
    | KvRenew
    | KvConnect
    | KvDisconnect
)


# ---------------------------------------------------------------- engine core -> API process


class FinishReason(IntEnum):
    """Why a request ended. Numbers are vLLM's (SCHEDULER.md 1.1)."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3


class EventKind(IntEnum):
    """Boundaries in a request's life, as the core sees them; `ledger.py` names the intervals."""

    QUEUED = 0  # entered the waiting queue
    SCHEDULED = 1  # got its first tokens of a step (admission or re-admission)
    FIRST_TOKEN = 2
    PREEMPTED = 3
    FINISHED = 4
    HELD = 5  # its prefill waits because what others left to be fetched takes too much memory
    LOADING = 6  # has its blocks; their content comes from another engine
    LOADED = 7  # that has come, or will not


class Events(msgspec.Struct):
    """Events of a step in columns: `handles[i]` passed boundary `kinds[i]` at `times_s[i]`."""

    handles: Int64s
    kinds: UInt8s
    times_s: Float64s


class Finished(msgspec.Struct, array_like=True):
    """A request that ended in this step.

    `stop_token_id` is set when a stop token id (not EOS) ended it; `error` when the reason is
    ERROR.
    """

    handle: int
    reason: FinishReason
    stop_token_id: int | None = None
    error: str | None = None


class TokenLogprobs(msgspec.Struct, array_like=True):
    """Log-probabilities at one position: entry 0 is the chosen token, the rest the top k."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int  # of the chosen token, 1 = most likely


class RequestLogprobs(msgspec.Struct, array_like=True):
    """Log-probabilities of one request in one step, in token order.

    `prompt_start` is the position of the first token when these are prompt positions, else None.
    (Position 0 has none and is not sent.) They arrive in pieces, chunk by chunk, and a request
    preempted in the middle of its prompt sends its first positions again.
    """

    handle: int
    tokens: list[TokenLogprobs]
    prompt_start: int | None = None


class PrefillInfo(msgspec.Struct, array_like=True):
    """Sent once a request is admitted for the first time: how much of its prompt was cached."""

    handle: int
    cached_tokens: int


class EngineStats(msgspec.Struct):
    """Gauges and counters of one engine. Counters are totals since start."""

    num_running: int = 0
    num_waiting: int = 0
    num_loading: int = 0
    kv_usage: float = 0.0
    num_preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    num_holds: int = 0  # prompts whose KV waits to be fetched, and the share of the pool they take
    hold_usage: float = 0.0
    num_expired_leases: int = 0
    num_failed_loads: int = 0
    num_unknown_transfers: int = 0
    num_steps: int = 0
    step_tokens: int = 0
    spec_decode_num_drafts: int = 0  # rows that verified drafts
    spec_decode_num_draft_tokens: int = 0
    spec_decode_num_accepted_tokens: int = 0


class StepSample(msgspec.Struct, array_like=True):
    """How long one step took on the device, and what decides that; see `cost.py`."""

    num_tokens: int
    num_rows: int
    num_sampled: int
    context_tokens: int  # KV read: sum over rows of the tokens in place before the step
    attended_tokens: int  # sum over rows of tokens * (context + tokens / 2)
    seconds: float


class EngineOutputs(msgspec.Struct, tag="outputs", kw_only=True):
    """What one step produced. Row i: `handles[i]` got `num_tokens[i]` of the flat `token_ids`."""

    handles: Int64s
    num_tokens: Int32s
    token_ids: Int32s
    finished: list[Finished] = []
    logprobs: list[RequestLogprobs] = []
    prefills: list[PrefillInfo] = []
    events: Events | None = None
    stats: EngineStats | None = None
    kv_ready: list[KvReady] = []
    kv_received: list[KvReceived] = []
    kv_links: list[KvLink] = []
    step: StepSample | None = None
    time_s: float = 0.0


class UtilityReply(msgspec.Struct, tag="reply"):
    """Answer to a `UtilityCall`: `result`, or `error`."""

    call_id: int
    result: Any = None
    error: str | None = None


class EngineReady(msgspec.Struct, tag="ready"):
    """Sent once the model is loaded and the KV pool exists: facts found out at start-up."""

    engine: int
    max_model_len: int
    num_blocks: int
    block_size: int
    facts: list[tuple[str, str, str]] = []  # name, value, reason: for the start-up block
    kv: KvEndpoint | None = None  # None: it takes no part in hand-offs
    max_num_seqs: int = 0  # 0: not told
    max_hold_share: float = 0.0  # of the pool, most that prompts kept for others may take; likewise


class EngineProgress(msgspec.Struct, tag="progress"):
    """Start-up progress: `done` of `total` units of `stage` (for example bytes of weights)."""

    stage: str
    done: int
    total: int


class EngineDead(msgspec.Struct, tag="dead"):
    """The core is about to exit because of an error it could not handle."""

    error: str


FromEngine = EngineOutputs | UtilityReply | EngineReady | EngineProgress | EngineDead


# ---------------------------------------------------------------- engine core -> worker


class NewRequest(msgspec.Struct):
    """A request that takes a seat in this step, for the first time or after a preemption.

    `token_ids` holds all tokens known so far (prompt, then outputs); `num_prompt_tokens` splits
    them. `block_ids` is its whole block table, in order.
    """

    slot: int
    request_id: str
    token_ids: Int32s
    num_prompt_tokens: int
    params: SamplingParams
    stop_token_ids: tuple[int, ...]  # EOS and stop ids: masked until `min_tokens`
    block_ids: Int32s


class StepPlan(msgspec.Struct, kw_only=True):
    """What the workers run in one step. Rows are in scheduling order.

    A worker applies it in this order: vacate `freed_slots`, seat `new`, append `grown_*` to block
    tables, then run the rows. It keeps each seat's tokens and writes sampled ones itself, so the
    plan for step N+1 can be made before the tokens of step N are known: row i runs tokens
    [num_computed[i], num_computed[i] + num_scheduled[i]) of seat slots[i].
    """

    step: int
    slots: Int32s  # [rows]
    num_computed: Int32s  # [rows] tokens whose KV is in place before this step
    num_scheduled: Int32s  # [rows]
    samples: Bools  # [rows] the row's last position yields a token
    new: list[NewRequest] = []
    freed_slots: Int32s = NO_TOKENS
    grown_slots: Int32s = NO_TOKENS  # [g] seats that got blocks
    grown_counts: Int32s = NO_TOKENS  # [g] how many each
    grown_blocks: Int32s = NO_TOKENS  # [sum(grown_counts)] the ids, seat by seat
    num_drafts: Int32s = NO_TOKENS  # [rows] or empty: trailing draft tokens to verify
    draft_token_ids: Int32s = NO_TOKENS  # flat; -1 = the worker fills it in
    kv: KvCommands | None = None  # the connector's scheduler half to its worker half


# ---------------------------------------------------------------- worker -> engine core


class RowLogprobs(msgspec.Struct, array_like=True):
    """Log-probabilities of row `row` of the plan; `prompt_start` as in RequestLogprobs."""

    row: int
    tokens: list[TokenLogprobs]
    prompt_start: int | None = None


class RowError(msgspec.Struct, array_like=True):
    """Row `row` failed alone (for example: logits not finite); the others are sound."""

    row: int
    error: str


class StepResult(msgspec.Struct, tag="result", kw_only=True):
    """What a step produced. Row i sampled `num_sampled[i]` of the flat `token_ids`."""

    step: int
    num_sampled: Int32s  # [rows]; 0 where the plan did not ask for a token
    token_ids: Int32s
    num_drafts: Int32s = NO_TOKENS  # [rows] or empty: drafts proposed for the next step
    draft_token_ids: Int32s = NO_TOKENS
    num_verified: Int32s = NO_TOKENS  # [rows] or empty: drafts that it had, of those planned
    logprobs: list[RowLogprobs] = []
    errors: list[RowError] = []
    kv: KvReport | None = None
    started_s: float = 0.0
    ended_s: float = 0.0


# ---------------------------------------------------------------- encoding


def _encode_array(obj: Any) -> Any:
    if isinstance(obj, np.ndarray):
        return [obj.dtype.str, np.ascontiguousarray(obj).data.cast("B")]
    raise TypeError(f"a message holds {type(obj)}; of what msgpack lacks, arrays alone")


_ARRAY_DTYPES = frozenset(("<i4", "<i8", "<f8", "|u1", "|b1"))


def _decode_array(kind: type, obj: Any) -> Any:
    if getattr(kind, "__origin__", kind) is np.ndarray:
        dtype, data = obj
        if dtype not in _ARRAY_DTYPES:
            raise msgspec.ValidationError(f"array of type {dtype!r} is not allowed here")
        return np.frombuffer(data, dtype)
    raise TypeError(f"a message has a field of type {kind}; of what msgpack lacks, arrays alone")


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)


def encode(message: msgspec.Struct) -> bytes:
    """Encode any of the messages above with msgpack."""
    return _encoder.encode(message)


def decoder_for(kind: Any) -> "msgspec.msgpack.Decoder[Any]":
    """A decoder for one message type or a union of tagged ones.

    Raises msgspec.DecodeError on bytes that are not such a message. Arrays come out read-only and
    share the buffer they were decoded from.
    """
    return msgspec.msgpack.Decoder(kind, dec_hook=_decode_array)
