"""What is known of a P/D deployment over some time, whatever it was learned from.

A ledger, a twin run, the metrics of a vLLM deployment and the router's own counters all fill the
same `Observation`; verdicts are functions of it alone. What a source cannot tell is NaN: arithmetic
carries it along, comparisons with it are false, and verdicts that need it say so.

Engines of a role are taken together: counts are sums over them, times are means over requests,
shares (0 to 1) are means over engines and time.
"""

import dataclasses
import math
from dataclasses import dataclass

from twostroke.errors import ConfigError

UNKNOWN = math.nan


@dataclass(frozen=True, kw_only=True)
class Observation:
    """Groups follow a request: demand, P, between them, D."""

    source: str = ""
    window_s: float = UNKNOWN
    # layout
    num_prefill: float = UNKNOWN
    num_decode: float = UNKNOWN
    prefill_tp: float = UNKNOWN
    decode_tp: float = UNKNOWN
    num_kv_heads: float = UNKNOWN
    kv_token_bytes: float = UNKNOWN  # all ranks of D, as often as it is stored
    kv_streams: float = UNKNOWN  # 1: D has blocks before P computes, and reads chunk by chunk
    # demand
    requests_per_s: float = UNKNOWN  # ended
    prompt_tokens: float = UNKNOWN
    cached_tokens: float = UNKNOWN  # of the prompt, found on P
    output_tokens: float = UNKNOWN
    # P
    prefill_busy: float = UNKNOWN  # share of time in which a P computes
    prefill_queue_s: float = UNKNOWN
    prefill_s: float = UNKNOWN
    prefill_waiting: float = UNKNOWN
    prefill_running: float = UNKNOWN
    prefill_kv_usage: float = UNKNOWN  # with what is pinned
    prefill_pin_wait_s: float = UNKNOWN  # prompts wait since too much is pinned for D
    prefill_pinned: float = UNKNOWN  # share of P's pool
    prefill_pin_limit: float = UNKNOWN  # the share at which new prompts wait
    prefill_tokens_per_s: float = UNKNOWN  # of one P while it computes
    # between
    room_wait_s: float = UNKNOWN  # P is done; D has no blocks yet
    transfer_s: float = UNKNOWN  # D has blocks; the KV is not there yet
    read_s: float = UNKNOWN  # of that, its bytes move
    transfer_bytes: float = UNKNOWN  # of one transfer
    transfer_messages: float = UNKNOWN
    transfer_bytes_per_s: float = UNKNOWN  # over all links
    link_bytes_per_s: float = UNKNOWN  # what one link does, at large messages
    link_low_bytes_per_s: float = UNKNOWN  # what it does in its worst tenth of the time
    link_message_s: float = UNKNOWN
    num_links: float = UNKNOWN
    # D
    decode_queue_s: float = UNKNOWN  # has its KV; not scheduled yet
    decode_s: float = UNKNOWN
    preempted_s: float = UNKNOWN
    tpot_s: float = UNKNOWN
    decode_busy: float = UNKNOWN
    decode_running: float = UNKNOWN  # of one D, while it decodes
    decode_loading: float = UNKNOWN
    decode_waiting: float = UNKNOWN
    decode_kv_usage: float = UNKNOWN  # of running and loading requests
    decode_pool_tokens: float = UNKNOWN  # of one D
    decode_max_num_seqs: float = UNKNOWN
    decode_elasticity: float = UNKNOWN  # dt/dB * B/t of a step at the batch seen
    preemptions_per_request: float = UNKNOWN
    # what to compare with
    tpot_slo_s: float = UNKNOWN
    turn_tokens: float = UNKNOWN  # new tokens of a conversation's next turn
    prefix_tokens: float = UNKNOWN  # length of a hit that lies on another engine

    def knows(self, *names: str) -> bool:
        """Whether all of these are known."""
        return not self.missing(*names)

    def missing(self, *names: str) -> tuple[str, ...]:
        """Those of `names` that are not known."""
        return tuple(name for name in names if math.isnan(getattr(self, name)))

    def with_facts(self, **facts: float | None) -> "Observation":
        """The same with facts that a user adds; None adds nothing."""
        given = {name: value for name, value in facts.items() if value is not None}
        return dataclasses.replace(self, **given)  # type: ignore[arg-type]

    def figures(self) -> dict[str, float]:
        """What is known, by name."""
        values = ((name, getattr(self, name)) for name in FIELDS if name != "source")
        return {name: value for name, value in values if not math.isnan(value)}

    def as_dict(self) -> dict[str, float | str]:
        """The same with the source."""
        return {"source": self.source, **self.figures()}


FIELDS = tuple(field.name for field in dataclasses.fields(Observation))

WORDS = {  # for people; what is not here is its own name with spaces
    "num_prefill": "how many prefill engines there are",
    "num_decode": "how many decode engines there are",
    "decode_tp": "D's tensor-parallel size",
    "num_kv_heads": "KV heads of the model",
    "kv_token_bytes": "bytes of a token's KV",
    "requests_per_s": "requests/s",
    "prompt_tokens": "lengths of prompts",
    "output_tokens": "lengths of answers",
    "prefill_busy": "share of the time that P computes",
    "prefill_queue_s": "time in P's queue",
    "prefill_waiting": "requests waiting on P",
    "prefill_running": "requests running on P",
    "prefill_kv_usage": "KV in use on P",
    "prefill_pin_wait_s": "how long prompts wait for KV that P keeps for D",
    "prefill_pinned": "share of P's KV that is kept for D",
    "prefill_tokens_per_s": "tokens/s of P while it computes",
    "room_wait_s": "how long prompts wait for room on D",
    "transfer_s": "how long requests wait for their transfer",
    "transfer_bytes": "bytes of a transfer",
    "transfer_messages": "messages of a transfer",
    "transfer_bytes_per_s": "bytes/s that move",
    "link_bytes_per_s": "rate of the link (--link)",
    "link_low_bytes_per_s": "rate of the link in its worst tenth of the time",
    "link_message_s": "what each message costs",
    "num_links": "how many links there are",
    "decode_s": "time spent decoding",
    "tpot_s": "time per output token",
    "decode_running": "rows of D's steps",
    "decode_loading": "requests whose KV is on its way",
    "decode_waiting": "requests waiting on D",
    "decode_kv_usage": "KV in use on D",
    "decode_pool_tokens": "size of D's KV pool",
    "decode_elasticity": "how step time grows with the batch (it hardly varied)",
    "tpot_slo_s": "bound on TPOT (--slo)",
    "turn_tokens": "new tokens of a usual next turn (--turn-tokens)",
    "prefix_tokens": "length of a usual prefix hit (--prefix-tokens)",
}


def words(name: str) -> str:
    """What a field says, for people."""
    return WORDS.get(name, name.replace("_", " "))


def from_dict(values: object) -> Observation:
    """Inverse of `as_dict`; ConfigError, naming the field, for anything else."""
    if not isinstance(values, dict):
        raise ConfigError("an observation must be a JSON object")
    for name, value in values.items():
        if name not in FIELDS:
            raise ConfigError(f"an observation has no field {name!r}")
        wanted: tuple[type, ...] = (str,) if name == "source" else (int, float)
        if isinstance(value, bool) or not isinstance(value, wanted):
            raise ConfigError(f"{name} of an observation is {value!r}; it must be a number")
    return Observation(**values)
