"""The layouts that a plan looks at, and those that cannot be, with the reason.

An engine of each tensor-parallel size is sized once: weights, activations and the rest first, KV
from what is left. Heads are counted as they are stored, which is more than once where there are
more ranks than KV heads.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from twostroke.cost import LinkCost
from twostroke.errors import ConfigError
from twostroke.kv.sizing import KvLayout
from twostroke.plan.analysis import analyse
from twostroke.plan.layout import Demand, Layout, Pool
from twostroke.plan.question import TRANSFER_BASE_S, Question
from twostroke.twin.roofline import Parallel, Roofline, kv_budget

MAX_LAYOUTS = 4000
SLACK_ENGINES = 2  # beyond the balanced number, on either side


@dataclass(frozen=True)
class Unfit:
    """What cannot be run, and why."""

    name: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Sized:
    """Engines of each TP size that fit, one each; and those that do not."""

    engines: dict[int, Pool]
    unfit: list[Unfit]
    notes: list[str]


def size_engines(question: Question) -> Sized:
    """One engine of each tensor-parallel size that a node allows and the heads divide."""
    engines: dict[int, Pool] = {}
    unfit: list[Unfit] = []
    notes: list[str] = []
    size = 1
    most = question.num_gpus or question.gpu.devices_per_node
    while size <= min(question.gpu.devices_per_node, most):
        try:
            engines[size] = _engine(question, size)
        except ConfigError as error:
            unfit.append(Unfit(f"TP{size}", str(error)))
        else:
            if size > question.shape.num_kv_heads:
                copies = size / question.shape.num_kv_heads
                notes.append(
                    f"TP{size}: {question.shape.num_kv_heads} KV heads are stored "
                    f"{copies:.3g} times each, and as much of the KV pool is lost to it"
                )
        size *= 2
    return Sized(engines=engines, unfit=unfit, notes=notes)


def _engine(question: Question, size: int) -> Pool:
    shape, with_ = question.shape, question.engines
    if shape.num_heads % size:
        raise ConfigError(f"{shape.num_heads} heads cannot be shared among {size} GPUs")
    parallel = Parallel(tensor_parallel_size=size)
    budget = kv_budget(
        shape,
        question.gpu,
        parallel,
        memory_share=with_.gpu_memory_utilization,
        max_num_batched_tokens=with_.max_num_batched_tokens,
        max_num_seqs=with_.max_num_seqs,
        block_size=with_.block_size,
        dtype=with_.dtype,
        kv_dtype=with_.kv_dtype,
    )
    layout = kv_layout(question, size)
    longest = question.longest_tokens
    if budget.num_tokens < longest:
        raise ConfigError(
            f"beside weights of {budget.weights_bytes / 1e9:.1f} GB and activations of "
            f"{budget.activations_bytes / 1e9:.1f} GB there is KV for {budget.num_tokens:,} "
            f"tokens, and the longest request has {longest:,}"
        )
    cost = question.costs.get(size) or Roofline(
        shape, question.gpu, parallel, dtype=with_.dtype, kv_dtype=with_.kv_dtype
    )
    return Pool(
        count=1,
        tensor_parallel_size=size,
        kv_tokens=budget.num_tokens,
        kv_token_bytes=layout.token_bytes * size,
        max_num_seqs=with_.max_num_seqs,
        max_num_batched_tokens=with_.max_num_batched_tokens,
        cost=cost,
        block_size=with_.block_size,
        pin_share=with_.kv_hold_share,
    )


def kv_layout(question: Question, size: int) -> KvLayout:
    """How an engine of that size lays KV out."""
    shape = question.shape
    return KvLayout(
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        dtype=question.engines.kv_dtype,
        block_size=question.engines.block_size,
        tensor_parallel_size=size,
    )


def link_of(question: Question, layout: Layout) -> LinkCost | None:
    """What joins one P and one D: as many network cards as the smaller of them has GPUs."""
    if layout.prefill is None or layout.decode is None:
        return None
    cards = min(layout.prefill.tensor_parallel_size, layout.decode.tensor_parallel_size)
    return LinkCost(base_s=TRANSFER_BASE_S, bytes_per_s=question.nic_bytes_per_s * cards)


def layouts(question: Question, sized: Sized) -> list[Layout]:
    """Aggregated ones and P/D ones, of every pair of sizes, within the number of GPUs."""
    found: list[Layout] = []
    for layout in _all_layouts(question, sized):
        found.append(layout)
        if len(found) >= MAX_LAYOUTS:
            break
    return found


def _all_layouts(question: Question, sized: Sized) -> Iterator[Layout]:
    demand, gpus = question.demand, question.num_gpus
    for pool in sized.engines.values():
        yield from _aggregated(pool, demand, question, gpus)
    for prefill in sized.engines.values():
        for decode in sized.engines.values():
            yield from _disaggregated(prefill, decode, demand, question, gpus)


def _aggregated(pool: Pool, demand: Demand, question: Question, gpus: int) -> Iterator[Layout]:
    size = pool.tensor_parallel_size
    if gpus:
        counts = range(1, gpus // size + 1)
    else:
        one = analyse(Layout(both=pool), demand, tpot_slo_s=question.slo.tpot_s).capacity_per_s
        needed = _needed(demand.rate_per_s, one)
        counts = range(needed, needed + SLACK_ENGINES)
    for count in counts:
        yield Layout(both=replace(pool, count=count))


def _disaggregated(
    prefill: Pool, decode: Pool, demand: Demand, question: Question, gpus: int
) -> Iterator[Layout]:
    """Around the balanced ratio: to be far from it is to pay for engines that idle."""
    pair = Layout(prefill=prefill, decode=decode)
    link = link_of(question, pair)
    one = analyse(pair, demand, link, tpot_slo_s=question.slo.tpot_s)
    by_prefill = min(
        (it.capacity_per_s for it in one.constraints if it.name == "prefill compute"), default=0.0
    )
    by_decode = min(
        (it.capacity_per_s for it in one.constraints if it.name.startswith("decode")), default=0.0
    )
    if by_prefill <= 0 or by_decode <= 0:
        return
    sizes = prefill.tensor_parallel_size, decode.tensor_parallel_size
    if gpus:
        counts = range(1, (gpus - sizes[1]) // sizes[0] + 1)
    else:
        needed = _needed(demand.rate_per_s, by_prefill)
        counts = range(needed, needed + SLACK_ENGINES)
    for count in counts:
        balanced = count * by_prefill / by_decode
        if not gpus:
            balanced = demand.rate_per_s / by_decode
        low = max(1, math.floor(balanced) - (SLACK_ENGINES if gpus else 0))
        for decoders in range(low, math.ceil(balanced) + SLACK_ENGINES + 1):
            if not gpus or count * sizes[0] + decoders * sizes[1] <= gpus:
                yield Layout(
                    prefill=replace(prefill, count=count), decode=replace(decode, count=decoders)
                )


def _needed(rate_per_s: float, each_per_s: float) -> int:
    """Engines that carry a rate; one when there is no rate to carry."""
    if not math.isfinite(rate_per_s) or each_per_s <= 0:
        return 1
    return max(1, math.ceil(rate_per_s / each_per_s))
