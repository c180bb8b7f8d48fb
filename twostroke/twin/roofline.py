"""Step times and memory of a model on a GPU from first principles, before anything was measured.

A step is the sum of what its kernels take one after the other. Each kernel is as slow as the slower
of reading its weights and doing its arithmetic, plus a share of the other (they overlap only in
part). The terms, per tensor-parallel rank, for n tokens of which s are sampled, on c tokens of
context with a query-key products (`cost.StepWork`):

    dense      max(weights / bandwidth, 2 n weights / flops)          qkv, output, MLP, router
    experts    the same; weights are those of the experts that n tokens touch
    attention  c * KV bytes / bandwidth + 4 a heads head_dim / flops
    around     what norms, rotation, activations and routing read and write
    head       of s rows; and sampling them
    exchange   two all-reduces a layer (TP); all-gather and reduce-scatter of an expert group (DP)
    launches   a constant a layer
    host       what the serving program adds: `Software`

With uniform routing n tokens with k experts each touch E (1 - (1 - k / E)^n) of E experts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np

from twostroke.arrays import Float64s
from twostroke.cost import StepColumns, StepWork
from twostroke.errors import ConfigError
from twostroke.kv.sizing import KvLayout
from twostroke.kv_messages import DTYPE_BYTES
from twostroke.shape import ModelShape
from twostroke.twin.hardware import Hardware

# Fitted with the shares of `hardware`, the same for all GPUs.
DENSE_OVERLAP = 0.2  # share of the faster of reading and computing that does not overlap
EXPERT_OVERLAP = 0.6
AROUND = 2.0  # times the bytes that kernels around the products would move if none were fused

ACTIVATION_BYTES = 2  # of an element between two kernels
TOUCHED_TABLE = 1 << 14  # tokens from which on every expert is touched

T = TypeVar("T", float, Float64s)
_Kernels = tuple[float, float, float, float, float]  # dense, experts, around, head, exchange


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """How a model is spread over devices, in vLLM's terms.

    `data_parallel_size` counts the engines that share the experts of a MoE model and step together;
    engines that share nothing are separate ones. With `expert_parallel` whole experts are spread
    over all TP x DP ranks, else a slice of each.
    """

    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    expert_parallel: bool = False

    def __post_init__(self) -> None:
        if self.tensor_parallel_size < 1 or self.data_parallel_size < 1:
            raise ConfigError(
                f"parallel sizes are TP{self.tensor_parallel_size} and "
                f"DP{self.data_parallel_size}; each must be at least 1"
            )


@dataclass(frozen=True, kw_only=True)
class Software:
    """What the serving program makes of the kernels' time t: max(t / share, layers * layer_s) +
    rows * row_s + step_s.

    The default is a program that launches a step as one graph and plans the next one meanwhile.
    Without graphs a host launches each kernel (`layer_s`), and may be slower than the device.
    """

    kernel_share: float = 1.0  # of the speed of the kernels that `hardware` was fitted to
    layer_s: float = 0.0
    row_s: float = 0.0
    step_s: float = 0.0


ONE_DEVICE = Parallel()
GRAPHS = Software()

# vLLM 0.19 on an RTX PRO 6000: fitted to the first half of a recorded run of Llama-3.1-8B; the
# other half asks for the same, and a run of Qwen3-30B-A3B on two such GPUs for 0.859 and 0.880.
VLLM = Software(kernel_share=0.863)


class StepParts(NamedTuple):
    """Seconds of a step by what they are spent on, or columns of them."""

    dense: float
    experts: float
    attention: float
    around: float
    head: float
    exchange: float
    launches: float
    host: float


class Roofline:
    """A `StepCost` from the model's shape and a row of the hardware table.

    `dtype` is that of the weights.
    """

    def __init__(
        self,
        shape: ModelShape,
        hardware: Hardware,
        parallel: Parallel = ONE_DEVICE,
        *,
        dtype: str = "bfloat16",
        kv_dtype: str = "bfloat16",
        software: Software = GRAPHS,
    ) -> None:
        self.shape, self.hardware, self.parallel = shape, hardware, parallel
        tp, dp = parallel.tensor_parallel_size, parallel.data_parallel_size
        self._dp = dp if shape.num_experts else 1
        sizes = _Sizes(shape, tp, dp)
        memory = hardware.memory_bytes_per_s * hardware.memory_share
        flops = _flops(hardware, dtype)
        width = DTYPE_BYTES[dtype]

        self._dense = sizes.dense * width / memory, 2 * sizes.dense / flops / hardware.gemm_share
        self._head = sizes.head * width / memory, 2 * sizes.head / flops / hardware.gemm_share
        self._sample_s = 4 * 4 * shape.vocab_size / memory  # float32 logits, passed over four times
        self._around_s = AROUND * ACTIVATION_BYTES * sizes.around / memory
        kv = KvLayout(
            num_layers=shape.num_layers,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            dtype=kv_dtype,
            tensor_parallel_size=tp,
        )
        self._context_s = kv.token_bytes / memory
        products = 4 * shape.num_layers * shape.num_heads * shape.head_dim / tp
        self._attended_s = products / (hardware.bf16_flops * hardware.attention_share)
        self._launch_s = shape.num_layers * hardware.layer_s
        self._software = software
        self._host_s = shape.num_layers * software.layer_s

        expert_memory = hardware.memory_bytes_per_s * hardware.expert_memory_share
        per_token = 2 * sizes.expert * shape.num_experts_per_token
        self._experts = (
            sizes.expert * width / expert_memory,  # for each expert touched
            per_token / flops / hardware.expert_gemm_share,  # for each token of the group
        )
        self._touched_list: Sequence[float] = _touched_experts(shape).tolist()
        self._exchange = _exchange(shape, hardware, tp, self._dp)
        self._decodes: dict[float, _Kernels] = {}  # of steps that decode so many rows

    def parts(self, work: StepWork) -> StepParts:
        """Where the time of a step goes."""
        dense, experts, around, head, exchange = self._kernels_of(work)
        attention = self._attention_s(work.context_tokens, work.attended_tokens)
        kernels = (dense, experts, attention, around, head, exchange, self._launch_s)
        return StepParts(*kernels, host=self.step_s(work) - sum(kernels))

    def step_s(self, work: StepWork) -> float:
        """Seconds of one step. In a group of data-parallel engines all have the same work."""
        attention = self._attention_s(work.context_tokens, work.attended_tokens)
        return self._with_host(self._kernels_of(work), attention, work.num_rows, max)

    def group_step_s(self, works: Sequence[StepWork]) -> float:
        """Seconds of a step that data-parallel engines take together, one work each.

        They exchange tokens in every sparse layer, so all wait for the one with most to do, and the
        experts have the tokens of all. An engine without requests has no work but takes part.
        """
        tokens = sum(work.num_tokens for work in works)
        last = len(self._touched_list) - 1
        touched = self._touched_list[min(round(tokens), last)]
        mean = tokens / self._dp
        _, experts, _, _, exchange = self._kernels(mean, 0.0, touched)
        own_s, rows = 0.0, 0.0
        for work in works:
            dense, _, around, head, _ = self._kernels(work.num_tokens, work.num_sampled, 0.0)
            attention = self._attention_s(work.context_tokens, work.attended_tokens)
            own_s = max(own_s, dense + attention + around + head)
            rows = max(rows, work.num_rows)
        return self._with_host((own_s, experts, 0.0, 0.0, exchange), 0.0, rows, max)

    def step_s_many(self, works: StepColumns) -> Float64s:
        """[steps] Seconds of many steps: the same operations in the same order."""
        attention = self._attention_s(works.context_tokens, works.attended_tokens)
        return self._with_host(self._kernels_of(works), attention, works.num_rows, np.maximum)

    def _kernels_of(self, work: StepWork | StepColumns) -> _Kernels:
        decodes = work.num_tokens == work.num_sampled
        if decodes and (kernels := self._decodes.get(work.num_tokens)) is not None:
            return kernels
        last = len(self._touched_list) - 1
        touched = self._touched_list[min(round(work.num_tokens) * self._dp, last)]
        kernels = self._kernels(work.num_tokens, work.num_sampled, touched)
        if decodes:
            self._decodes[work.num_tokens] = kernels
        return kernels

    def _kernels(self, tokens: float, sampled: float, touched: float) -> _Kernels:
        """The terms of the module's docstring that contexts have no part in."""
        read_s, compute_s = self._dense
        dense = _kernel_s(read_s, tokens * compute_s, DENSE_OVERLAP)
        read_s, compute_s = self._experts
        experts = _kernel_s(touched * read_s, tokens * self._dp * compute_s, EXPERT_OVERLAP)
        read_s, compute_s = self._head
        head = _kernel_s(min(sampled, 1.0) * read_s, sampled * compute_s, DENSE_OVERLAP)
        return (
            dense,
            experts,
            tokens * self._around_s,
            head + sampled * self._sample_s,
            tokens * self._exchange[1] + self._exchange[0],
        )

    def _attention_s(self, context: T, attended: T) -> T:
        return context * self._context_s + attended * self._attended_s

    def _with_host(
        self,
        kernels: _Kernels,
        attention: T,
        rows: float,
        maximum: Callable[[T, float], T],
    ) -> T:
        dense, experts, around, head, exchange = kernels
        seconds = dense + experts + attention
        for kernel_s in (around, head, exchange, self._launch_s):
            seconds += kernel_s  # in place, where there are many
        seconds /= self._software.kernel_share
        seconds = maximum(seconds, self._host_s)
        seconds += rows * self._software.row_s
        seconds += self._software.step_s
        return seconds


def _kernel_s(read_s: float, compute_s: float, overlap: float) -> float:
    return max(read_s, compute_s) + overlap * min(read_s, compute_s)


class _Sizes:
    """Weights in elements and traffic in elements a token, of one tensor-parallel rank.

    `expert`: of one expert in all sparse layers; ranks of an expert group hold a slice of each, or
    whole ones, which comes to the same in the mean.
    """

    def __init__(self, shape: ModelShape, tp: int, dp: int) -> None:
        hidden, layers = shape.hidden_size, shape.num_layers
        sparse = sum(map(shape.is_sparse, range(layers)))
        kv_heads = max(1, -(-shape.num_kv_heads // tp))
        q_size, kv_size = shape.num_heads * shape.head_dim / tp, kv_heads * shape.head_dim
        attention = hidden * (2 * q_size + 2 * kv_size)
        mlp = 3 * hidden * shape.intermediate_size / tp
        self.dense = layers * attention + (layers - sparse) * mlp
        self.dense += sparse * hidden * shape.num_experts  # routers
        self.expert = sparse * 3 * hidden * shape.moe_intermediate_size / (tp * dp)
        self.head = hidden * shape.vocab_size / tp
        # Norms and residuals; q, k, v in and out of rotation and cache; activations of the MLP.
        self.around = layers * (10 * hidden + 2 * q_size + 4 * kv_size)
        self.around += (layers - sparse) * 3 * shape.intermediate_size / tp
        routed = 3 * shape.moe_intermediate_size / tp + 2 * hidden
        self.around += sparse * shape.num_experts_per_token * routed


def _flops(hardware: Hardware, dtype: str) -> float:
    if dtype == "float8" and hardware.fp8_flops is not None:
        return hardware.fp8_flops
    return hardware.bf16_flops / (2 if dtype == "float32" else 1)  # TF32


def _touched_experts(shape: ModelShape) -> Float64s:
    """[tokens] Experts of a layer that so many tokens touch when each picks k of E at random."""
    if not shape.num_experts:
        return np.zeros(1)
    missed = 1 - shape.num_experts_per_token / shape.num_experts
    return np.asarray(
        shape.num_experts * (1 - missed ** np.arange(TOUCHED_TABLE, dtype=np.float64))
    )


def _exchange(shape: ModelShape, hardware: Hardware, tp: int, dp: int) -> tuple[float, float]:
    """Seconds a step that collectives take: in any case, and for each token of an engine.

    A ring all-reduce over g ranks sends 2 (g - 1) / g of the data, all-gather and reduce-scatter
    half of that each. Engines that share experts gather the tokens of all and what the router says
    of each, and scatter the results: three calls a sparse layer (vLLM's default,
    allgather_reducescatter).
    """
    constant = per_token = 0.0
    token_bytes = shape.hidden_size * ACTIVATION_BYTES
    if tp > 1:
        rate = _link_rate(hardware, tp) * hardware.reduce_share
        constant += 2 * shape.num_layers * hardware.reduce_s
        per_token += 2 * shape.num_layers * 2 * (tp - 1) / tp * token_bytes / rate
    if dp > 1:
        sparse = sum(map(shape.is_sparse, range(shape.num_layers)))
        rate = _link_rate(hardware, tp * dp) * hardware.reduce_share
        moved_bytes = 2 * token_bytes + shape.num_experts * ACTIVATION_BYTES
        constant += 3 * sparse * hardware.reduce_s
        per_token += sparse * (dp - 1) / dp * dp * moved_bytes / rate
    return constant, per_token


def _link_rate(hardware: Hardware, span: int) -> float:
    if span <= hardware.devices_per_node:
        return hardware.peer_bytes_per_s
    if hardware.nic_bytes_per_s is None:
        raise ConfigError(
            f"{span} devices of {hardware.name} span nodes, which have no network card",
            hint=f"use at most {hardware.devices_per_node}",
        )
    return min(hardware.nic_bytes_per_s, hardware.peer_bytes_per_s)


# ---------------------------------------------------------------- memory

# What vLLM 0.19 holds beside weights, activations and KV: CUDA context, graphs, workspaces of
# attention and of NCCL. With it an RTX 4090 with Llama-3.1-8B in bf16 keeps 41 thousand tokens.
OTHER_BYTES = 1_200_000_000
NCCL_BYTES = 400_000_000


class KvBudget(NamedTuple):
    """Memory of one device: what the KV pool gets, and what went before it, in bytes."""

    weights_bytes: int
    activations_bytes: int
    other_bytes: int
    kv_bytes: int
    num_blocks: int
    num_tokens: int


def kv_budget(
    shape: ModelShape,
    hardware: Hardware,
    parallel: Parallel = ONE_DEVICE,
    *,
    memory_share: float = 0.9,
    max_num_batched_tokens: int = 8192,
    max_num_seqs: int = 256,
    block_size: int = 16,
    dtype: str = "bfloat16",
    kv_dtype: str = "bfloat16",
) -> KvBudget:
    """What is left for KV of `memory_share` of a device (vLLM's --gpu-memory-utilization).

    Raises ConfigError when nothing is.
    """
    tp = parallel.tensor_parallel_size
    dp = parallel.data_parallel_size if shape.num_experts else 1
    sizes = _Sizes(shape, tp, dp)
    tables = 1 if shape.tie_word_embeddings else 2
    elements = sizes.dense + sizes.expert * shape.num_experts + tables * sizes.head
    weights = round(elements * DTYPE_BYTES[dtype])
    kv = KvLayout(
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        dtype=kv_dtype,
        block_size=block_size,
        tensor_parallel_size=tp,
    )
    # The widest moment of a step: an MLP's input and activations; then the logits in float32.
    width = 3 * shape.intermediate_size / tp
    if shape.num_experts:
        per_expert = 3 * shape.moe_intermediate_size / tp + shape.hidden_size
        width = max(width, shape.num_experts_per_token * per_expert)
    step = max_num_batched_tokens * (width + 4 * shape.hidden_size) * ACTIVATION_BYTES
    activations = round(max(step, 2 * 4 * max_num_seqs * shape.vocab_size))
    other = OTHER_BYTES + (NCCL_BYTES if tp * dp > 1 else 0)
    left = int(hardware.memory_bytes * memory_share) - weights - activations - other
    if left < kv.block_bytes:
        raise ConfigError(
            f"weights of {weights / 1e9:.1f} GB, activations of {activations / 1e9:.1f} GB and "
            f"{other / 1e9:.1f} GB beside leave no room for KV; limit: {memory_share:.0%} of the "
            f"{hardware.memory_bytes / 1e9:.1f} GB of {hardware.name}",
            hint="use more devices a model (TP), a smaller dtype, or a larger share",
        )
    blocks = kv.blocks_in(left)
    return KvBudget(weights, activations, other, left, blocks, blocks * block_size)
