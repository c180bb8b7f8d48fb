"""What can be asked of `twostroke twin`. The command line makes its flags from these fields, so
this file imports nothing slow."""

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twostroke.errors import ConfigError


def _option(default: Any, doc: str, *, minimum: float | None = None) -> Any:
    return dataclasses.field(default=default, metadata={"doc": doc, "minimum": minimum})


@dataclass(frozen=True, kw_only=True)
class TwinOptions:
    """A deployment and its load."""

    model: str = _option("", "config.json, model directory, GGUF file, or a well-known name")
    gpu: str = _option("H100", "row of the hardware table")
    prefill: str = _option("", "engines that prefill, as 4xTP8")
    decode: str = _option("", "engines that decode")
    both: str = _option("", "engines that do both; beside the others, a mix")
    workload: str = _option("", "a file (Mooncake, Azure, sessions, ServeGen, ledger) or a spec")
    num_requests: int = _option(0, "take the first so many; 0: all", minimum=0)
    speed: float = _option(1.0, "play the workload so many times as fast", minimum=0)
    seed: int = _option(0, "of arrivals and lengths that are drawn")
    link: str = _option(
        "",
        "of one engine each way: 50GB/s, 400Gb/s, or a file of seconds,bytes/s; default: its NICs",
    )
    fabric: str = _option("", "what all transfers share, likewise; default: no limit")
    link_latency_ms: float = _option(0.4, "of each transfer, before its bytes move", minimum=0)
    link_message_us: float = _option(0.0, "of each message of a transfer", minimum=0)
    kv_mode: str = _option("pull", "pull: D reads a whole prompt; stream: chunk by chunk")
    pd_policy: str = _option("always", "always, cost, or never hand over")
    cost: str = _option("roofline", "of steps: roofline, aic, or a file of twostroke profile")
    dtype: str = _option("bfloat16", "of weights")
    kv_cache_dtype: str = _option("bfloat16", "of KV: also float16, float8, int8 with its scales")
    gpu_memory_utilization: float = _option(0.9, "share of a GPU's memory that may be used")
    kv_gib: float = _option(0.0, "GiB of KV a GPU; 0: what weights leave", minimum=0)
    block_size: int = _option(16, "tokens of a KV block", minimum=1)
    max_num_seqs: int = _option(256, "requests that run at once on an engine", minimum=1)
    max_num_batched_tokens: int = _option(8192, "token budget of a step", minimum=1)
    max_model_len: int = _option(0, "longest prompt plus answer; 0: what the load needs", minimum=0)
    prefix_caching: bool = _option(True, "reuse the KV of equal prefixes")
    kv_hold_share: float = _option(0.5, "of P's pool, most that may wait to be fetched", minimum=0)
    until_s: float = _option(0.0, "stop there; 0: when all have ended", minimum=0)
    fast_forward: bool = _option(True, "take plain decode steps many at a time")
    goodput: str = _option("", "limits in ms of a good request: ttft:2000,tpot:50")
    html: Path | None = _option(None, "write a report to this file")
    trace: Path | None = _option(None, "write a Chrome trace of the engines to this file")
    save_ledger: Path | None = _option(None, "write each request's ledger, as JSON lines")


@dataclass(frozen=True)
class Engines:
    """So many engines of TP x DP devices each."""

    count: int = 1
    tp: int = 1
    dp: int = 1


def parse_engines(flag: str, text: str) -> Engines:
    """4xTP8, TP2, 3, 2xTP4xDP2: `count` engines, each of DP x TP devices."""
    match = re.fullmatch(
        r"(?:(?P<count>\d+)(?:x(?=[td])|$))?(?:TP(?P<tp>\d+))?(?:x?DP(?P<dp>\d+))?",
        text,
        re.IGNORECASE,
    )
    sizes = {name: int(size or 1) for name, size in match.groupdict().items()} if match else {}
    if not text or not sizes or not all(1 <= size <= 4096 for size in sizes.values()):
        raise ConfigError(f"{flag} is {text!r}", hint="write engines as 4xTP8, TP2 or 2xTP4xDP2")
    return Engines(sizes["count"], sizes["tp"], sizes["dp"])
