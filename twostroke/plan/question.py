"""What a plan is asked for: model, GPU, load and bounds on latency. Parsed and checked here."""

import difflib
import math
import re
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from twostroke.arrays import Float64s
from twostroke.config_values import parse_rate
from twostroke.cost import StepCost
from twostroke.errors import ConfigError
from twostroke.kv_messages import DTYPE_BYTES
from twostroke.plan.layout import Demand, KvMode
from twostroke.shape import ModelShape
from twostroke.twin.hardware import Hardware, find_gpu
from twostroke.twin.models import find_shape
from twostroke.twin.workload import Workload, load

ATTAINMENT = 0.9  # share of requests that must stay within both bounds, as in DistServe
TRANSFER_BASE_S = 1e-3  # of a hand-off: ticket, messages and the step that notices it
MAX_GPUS = 4096

_UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}


@dataclass(frozen=True, kw_only=True)
class Slo:
    """Bounds on a request's time to first token and on its mean time per token after."""

    ttft_s: float = math.inf
    tpot_s: float = math.inf

    def __str__(self) -> str:
        bounds = {"TTFT": self.ttft_s, "TPOT": self.tpot_s}
        shown = [f"{k} <= {seconds(v)}" for k, v in bounds.items() if math.isfinite(v)]
        return " and ".join(shown) or "no bound on latency"


def parse_slo(text: str) -> Slo:
    """`ttft=2s,tpot=50ms`, either or both. ConfigError names what is wrong."""
    bounds: dict[str, float] = {}
    for part in filter(None, (it.strip() for it in text.split(","))):
        name, equals, value = part.partition("=")
        name = name.strip().lower()
        if name not in ("ttft", "tpot") or not equals:
            near = difflib.get_close_matches(name, ("ttft", "tpot"), 1, 0.4)
            meant = f"did you mean {near[0]}? " if near else ""
            raise ConfigError(
                f"--slo has {part!r}; known are ttft and tpot", hint=f"{meant}as ttft=2s,tpot=50ms"
            )
        if name in bounds:
            raise ConfigError(f"--slo gives {name} twice: {text!r}")
        bounds[name] = parse_seconds(value.strip(), f"--slo {name}")
    return Slo(ttft_s=bounds.get("ttft", math.inf), tpot_s=bounds.get("tpot", math.inf))


def parse_seconds(text: str, name: str) -> float:
    """A time with its unit: 50ms, 2s, 1min."""
    match = re.fullmatch(r"([0-9.eE+-]+)\s*(us|ms|s|min)", text)
    value = _number(match[1]) if match else math.nan
    if match is None or not 0 < value < math.inf:
        raise ConfigError(f"{name} is {text!r}; it must be a time over 0 with its unit: 2s, 50ms")
    return value * _UNITS_S[match[2]]


def seconds(value: float) -> str:
    """A time for people."""
    if value >= 1:
        return f"{value:.3g} s"
    return f"{value * 1e3:.3g} ms"


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


@dataclass(frozen=True, kw_only=True)
class Engines:
    """What every engine of a plan is started with, in vLLM's names."""

    dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"
    block_size: int = 16
    max_num_seqs: int = 512
    max_num_batched_tokens: int = 8192
    gpu_memory_utilization: float = 0.9
    kv_hold_share: float = 0.5
    kv_mode: KvMode = "pull"


@dataclass(frozen=True, kw_only=True)
class Question:
    """All that a plan depends on.

    `num_gpus` 0: as few as carry the load. `costs` replaces the roofline for the tensor-parallel
    sizes in it (from a profile); `cost_error` is the share by which step times may be off.
    """

    model: str
    shape: ModelShape
    gpu: Hardware
    workload: Workload
    slo: Slo
    num_gpus: int = 0
    nic_bytes_per_s: float
    engines: Engines = field(default_factory=Engines)
    costs: dict[int, StepCost] = field(default_factory=dict)
    cost_error: float = 0.07
    seed: int = 0

    @cached_property
    def demand(self) -> Demand:
        """The workload's lengths and mean rate."""
        return demand_of(self.workload)

    @cached_property
    def longest_tokens(self) -> int:
        """Of any request, prompt and output."""
        return int((self.workload.prompt_tokens + self.workload.output_tokens).max())


def ask(
    model: str,
    gpu: str,
    workload: str,
    slo: str,
    *,
    gpus: int = 0,
    link: str = "",
    engines: Engines | None = None,
    seed: int = 0,
) -> Question:
    """A question from what a user typed. ConfigError names the flag that is wrong."""
    for flag, value in (("--model", model), ("--gpu", gpu), ("--workload", workload)):
        if not value:
            raise ConfigError(
                f"{flag} is missing",
                hint="as twostroke plan --model qwen3-30b-a3b --gpu H100 "
                "--workload poisson:65/s,in=8192,out=1024,n=325 --slo ttft=2s,tpot=50ms",
            )
    if gpus > MAX_GPUS:
        raise ConfigError(f"--gpus is {gpus:,}; at most {MAX_GPUS:,}")
    engines = engines or Engines()
    for flag, dtype in (("--dtype", engines.dtype), ("--kv-cache-dtype", engines.kv_dtype)):
        if dtype not in DTYPE_BYTES:
            raise ConfigError(f"{flag} is {dtype!r}; known: {', '.join(DTYPE_BYTES)}")
    if not 0 < engines.gpu_memory_utilization <= 1:
        share = engines.gpu_memory_utilization
        raise ConfigError(f"--gpu-memory-utilization is {share}; it must be in (0, 1]")
    if engines.max_num_batched_tokens < engines.max_num_seqs:
        raise ConfigError(
            f"--max-num-batched-tokens is {engines.max_num_batched_tokens}, less than "
            f"--max-num-seqs {engines.max_num_seqs}",
            hint="a step must hold one token of each running request",
        )
    hardware = find_gpu(gpu)
    rate = parse_rate(link, "--link") if link else hardware.nic_bytes_per_s
    if rate is None:
        raise ConfigError(
            f"an {hardware.name} has no network card of its own", hint="give one: --link 12.5GB/s"
        )
    loaded = load(workload, seed=seed)
    shape = find_shape(model)
    longest = int((loaded.prompt_tokens + loaded.output_tokens).max())
    if longest > shape.max_position_embeddings:
        raise ConfigError(
            f"the longest request has {longest:,} tokens; {model} takes "
            f"{shape.max_position_embeddings:,}"
        )
    return Question(
        model=model,
        shape=shape,
        gpu=hardware,
        workload=loaded,
        slo=parse_slo(slo),
        num_gpus=gpus,
        nic_bytes_per_s=rate,
        engines=engines,
        seed=seed,
    )


def demand_of(workload: Workload) -> Demand:
    """Lengths and mean rate of a workload, and what a prefix cache that never evicts finds."""
    spans = float(workload.arrival_s[-1] - workload.arrival_s[0])
    rate = (len(workload) - 1) / spans if spans > 0 else math.inf
    return Demand.of(
        workload.prompt_tokens.astype(np.float64),
        workload.output_tokens.astype(np.float64),
        rate,
        shared_tokens(workload),
    )


def shared_tokens(workload: Workload) -> Float64s:
    """[requests] Leading tokens of each prompt, piece by piece, that an earlier one begins with."""
    seen: set[tuple[int, int, int]] = set()
    found = np.zeros(len(workload))
    for index in range(len(workload)):
        start, end = int(workload.piece_starts[index]), int(workload.piece_starts[index + 1])
        if end - start < 2:
            continue
        chain, shared, is_known = 0, 0, True
        values = workload.values[start:end].tolist()
        counts = workload.counts[start:end].tolist()
        for value, count in zip(values, counts, strict=True):
            key = (chain, value, count)
            is_known = is_known and key in seen
            if is_known:
                shared += count
            seen.add(key)
            chain = hash(key)
        found[index] = shared
    return found
