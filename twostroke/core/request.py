"""One request as the core sees it: its states, its counters, and when it stops.

    add ─▶ WAITING ───────────────▶ RUNNING ─▶ FINISHED
             │  ▲                    │    ▲
             ▼  │                    ▼    │
       WAITING_FOR_REMOTE_KVS      PREEMPTED

There is no prefill state and no decode state: a request is behind by `num_tokens - num_computed`.
While it runs, its counters live in the columns of `core.seats`; `Seats.read` copies them here.
"""

from enum import IntEnum

import numpy as np

from twostroke.kv.manager import BlockTable
from twostroke.messages import AddRequest, FinishReason, Int32s, SamplingParams


class Status(IntEnum):
    """Where a request is. The two after WAITING are blocked: they wait for something outside."""

    WAITING = 0
    WAITING_FOR_GRAMMAR = 1
    WAITING_FOR_REMOTE_KVS = 2
    RUNNING = 3
    PREEMPTED = 4
    FINISHED = 5


PriorityKey = tuple[int, float, str, int]


class Request:
    """A request's settings, counters and block table.

    `tokens` are the tokens known so far while it has no seat (`slot` is -1). `num_placeholders`
    counts tokens that steps in flight will produce. `frames_to_discard` counts results in flight
    that a forced cache reset made void. `may_load` is whether the connector is asked for its KV,
    `num_passes` how many requests were admitted past it while it lacked blocks, `num_stalls` how
    often it preempted itself at length `stalled_at` with nobody else to preempt, `was_held_back`
    whether its prefill had to wait for what others left to be fetched.
    """

    __slots__ = (
        "arrival_s",
        "cached_tokens",
        "finish_reason",
        "frames_to_discard",
        "handle",
        "kv_receive",
        "kv_send",
        "load_failed",
        "load_reported",
        "max_tokens",
        "may_load",
        "min_tokens",
        "num_computed",
        "num_failed_loads",
        "num_known",
        "num_local_hit",
        "num_passes",
        "num_placeholders",
        "num_preemptions",
        "num_prompt_tokens",
        "num_stalls",
        "params",
        "place",
        "priority_key",
        "prompt",
        "request_id",
        "slot",
        "stalled_at",
        "status",
        "stop_ids",
        "table",
        "tokens",
        "uid",
        "was_admitted",
        "was_held_back",
    )

    def __init__(self, message: AddRequest, uid: int, table: BlockTable) -> None:
        self.uid = uid
        self.handle = message.handle
        self.request_id = message.request_id
        self.prompt: Int32s = message.prompt_token_ids
        self.tokens: Int32s = message.prompt_token_ids
        self.params: SamplingParams = message.params
        self.max_tokens = message.max_tokens
        self.min_tokens = message.params.min_tokens
        self.kv_send = message.kv_send
        self.kv_receive = message.kv_receive
        self.stop_ids = StopIds(message.eos_token_ids, message.params.stop_token_ids)
        self.arrival_s = message.arrival_s
        self.priority_key: PriorityKey = (
            message.priority,
            message.arrival_s,
            message.request_id,
            uid,
        )
        self.place: tuple[float | str, ...] = ()
        self.status = Status.WAITING
        self.slot = -1
        self.table = table
        self.num_prompt_tokens = len(self.prompt)
        self.num_known = self.num_prompt_tokens
        self.num_computed = 0
        self.num_placeholders = 0
        self.num_preemptions = 0
        self.num_local_hit = 0
        self.num_failed_loads = 0
        self.num_passes = 0
        self.num_stalls = 0
        self.stalled_at = -1
        self.cached_tokens = 0
        self.frames_to_discard = 0
        self.load_failed = False
        self.load_reported = False
        self.finish_reason: FinishReason | None = None
        self.may_load = True
        self.was_admitted = False
        self.was_held_back = False

    # What a connector may read (connector.base.KvRequest).

    @property
    def num_tokens(self) -> int:
        return self.num_known

    @property
    def token_ids(self) -> Int32s:
        return self.tokens

    def stop_reason(
        self, token: int, num_tokens: int, max_length: int
    ) -> tuple[FinishReason, int | None] | None:
        """Whether `token`, which made the sequence `num_tokens` long, ends the request.

        Order of the rules is vLLM's: `min_tokens` guards them all, then EOS, stop ids, length.
        """
        num_output = num_tokens - self.num_prompt_tokens
        if num_output < self.min_tokens:
            return None
        if token in self.stop_ids.eos:
            return FinishReason.STOP, None
        if token in self.stop_ids.stop:
            return FinishReason.STOP, token
        if num_tokens >= max_length or num_output >= self.max_tokens:
            return FinishReason.LENGTH, None
        return None


class StopIds:
    """Token ids that end a request: `eos` silently, `stop` as a reported reason."""

    __slots__ = ("all", "eos", "stop")

    def __init__(self, eos: tuple[int, ...], stop: tuple[int, ...]) -> None:
        self.eos = frozenset(eos)
        self.stop = frozenset(stop)
        self.all = tuple(self.eos | self.stop)


def append_tokens(tokens: Int32s, new: list[int]) -> Int32s:
    """`tokens` with `new` at its end."""
    return np.concatenate((tokens, np.array(new, np.int32)))
