"""From a checkpoint to a model: picks the weights' source and fuses what runs fused.

q, k and v become one matrix, gate and up another. Each is allocated once in its final type and
place and filled piece by piece, so loading never holds more than a few tensors twice. A rank of a
tensor-parallel group reads its part alone (see `parallel`).
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from twostroke.checkpoint import Checkpoint, Progress, find_weights
from twostroke.config import Quantization
from twostroke.model import int8_rows
from twostroke.model.few_rows_quantised import can_multiply, works
from twostroke.model.gguf import GgufSource
from twostroke.model.int8_rows import Int8Rows
from twostroke.model.layers import Linear, Mlp, in_pairs
from twostroke.model.llama import DecoderModel, Layer
from twostroke.model.memory import give_back_freed_memory, keep_freed_memory, unmap_clean_pages_once
from twostroke.model.moe import SparseMlp
from twostroke.model.parallel import ALONE, Group, Shard
from twostroke.model.quantised import QuantisedWeight, quantise, stack
from twostroke.model.weights import (
    ALL,
    DummySource,
    Part,
    SafetensorsSource,
    WeightSource,
    check_tensors,
)
from twostroke.shape import ModelShape

Reorder = Callable[[int, Tensor], Tensor]  # of the i-th of several weights, its rows


def load_model(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
    progress: Progress | None = None,
    group: Group = ALONE,
    quantization: Quantization = "none",
    keep_dequantised: bool = True,
) -> DecoderModel:
    """Read a checkpoint's weights into a model in `dtype` on `device`: those of a rank of `group`.

    `seed` is that of dummy weights; `progress` gets ("weights", bytes read, bytes in all), where
    the other ranks are taken to be as far. `quantization` and `keep_dequantised`: see `Quantiser`.
    Raises ModelError naming the file and the tensor that
    is missing, left over or wrong.
    """
    if device.type == "cpu":
        keep_freed_memory()
        if dtype == torch.bfloat16:
            works()  # brings numba's libraries, the last that there are
        unmap_clean_pages_once()
    source = _open_source(checkpoint, dtype, seed)
    try:
        check_tensors(source, checkpoint.shape, checkpoint.path)
        on_cpu = device.type == "cpu" and dtype == torch.bfloat16 and group.size == 1
        quantiser = Quantiser(source, quantization if on_cpu else "none", keep_dequantised)
        builder = _Builder(checkpoint.shape, source, dtype, device, progress, group, quantiser)
        return builder.model()
    finally:
        source.close()
        if device.type == "cpu":
            give_back_freed_memory()


def _open_source(checkpoint: Checkpoint, dtype: torch.dtype, seed: int) -> WeightSource:
    if checkpoint.format == "dummy":
        return DummySource(checkpoint.shape, seed)
    if checkpoint.format == "gguf":
        return GgufSource(checkpoint.path, checkpoint.shape, dtype)
    return SafetensorsSource(find_weights(checkpoint.path))


def is_in_few_bits(checkpoint: Checkpoint) -> bool:
    """Whether all matrices are stored in forms that this processor multiplies as they are."""
    if checkpoint.format != "gguf":
        return False
    source = GgufSource(checkpoint.path, checkpoint.shape, torch.float32)
    try:
        return source.is_in_few_bits()
    finally:
        source.close()


class Quantiser:
    """Finds or makes the 4- and 8-bit forms of weights.

    auto: as the file has them, where it has; int8, int4: rounded on load; none: no such form. With
    `keep_dequantised` weights are kept in the model's type too, which many rows are faster with.
    int8 has another form for what is inside the layers, which is the faster for any number of rows.
    """

    def __init__(self, source: WeightSource, kind: Quantization, keep_dequantised: bool) -> None:
        self._source = source
        self._kind = kind
        self._keep_dequantised = keep_dequantised

    def find(self, names: Sequence[str], reorder: Reorder) -> QuantisedWeight | None:
        """The rows of these weights on top of each other, or None."""
        if self._kind == "none":
            return None
        shapes = [self._source.shapes()[name] for name in names]
        if not can_multiply(sum(rows for rows, _ in shapes), shapes[0][1]):
            return None
        parts = []
        for i, (name, (num_rows, _)) in enumerate(zip(names, shapes, strict=True)):
            part = self._one(name)
            if part is None:
                return None
            if reorder is not _as_they_are:
                part = part.rows(reorder(i, torch.arange(num_rows)))
            parts.append(part)
        return stack(parts) if len(parts) > 1 else parts[0]

    def _one(self, name: str) -> QuantisedWeight | None:
        if self._kind in ("int8", "int4"):
            return quantise(self._source.read(name)[0], 8 if self._kind == "int8" else 4)
        return self._source.read_quantised(name) if isinstance(self._source, GgufSource) else None

    def makes_int8(self, num_rows: int) -> bool:
        """Whether a weight of that many rows, inside a layer, is multiplied in 8 bits alone."""
        return self._kind == "int8" and int8_rows.can_multiply(num_rows)

    def keeps(self, quantised: QuantisedWeight | None) -> bool:
        """Whether the weight is wanted in the model's type."""
        return quantised is None or self._keep_dequantised


def _as_they_are(_i: int, rows: Tensor) -> Tensor:
    return rows


class _Builder:
    """Assembles a model from a source, tensor by tensor."""

    def __init__(
        self,
        shape: ModelShape,
        source: WeightSource,
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress | None,
        group: Group,
        quantiser: Quantiser,
    ) -> None:
        self._quantiser = quantiser
        self._shape = shape
        self._group = group
        self._shard = Shard(shape, group.rank, group.size)
        self._source = source
        self._dtype = dtype
        self._device = device
        self._progress = progress
        self._done_bytes = 0
        self._lock = threading.Lock()

    def model(self) -> DecoderModel:
        """Each layer is built by one thread of a pool, with single-threaded operations: they never
        wait for one another, which on a busy machine makes loading ten times faster."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with ThreadPoolExecutor(threads, "load") as pool:
                ends = pool.submit(self._ends)
                layers = list(pool.map(self._layer, range(self._shape.num_layers)))
                embedding, final_norm, head = ends.result()
        finally:
            torch.set_num_threads(threads)
        if self._progress is not None:
            self._progress("weights", self._source.total_bytes, self._source.total_bytes)
        return DecoderModel(self._shape, embedding, layers, final_norm, head, self._group)

    @torch.inference_mode()
    def _ends(self) -> tuple[Tensor, Tensor, Linear]:
        """Embedding, final norm and LM head."""
        embedding = self._vocabulary("model.embed_tokens.weight")
        tied = self._shape.tie_word_embeddings
        name = "model.embed_tokens.weight" if tied else "lm_head.weight"
        quantised = self._quantiser.find([name], _as_they_are)
        if self._quantiser.keeps(quantised):
            head = Linear(embedding if tied else self._vocabulary(name), None, quantised)
        else:
            head = Linear(None, None, quantised)
        return embedding, self._tensor("model.norm.weight").float(), head

    def _vocabulary(self, name: str) -> Tensor:
        """The rank's rows of a matrix [vocab, hidden], padded with zeros."""
        rows, padded = self._shard.vocabulary, self._shard.padded_vocabulary
        count = rows.stop - rows.start
        if count == padded:
            return self._tensor(name, (rows,))
        size = (padded, self._shape.hidden_size)
        out = torch.zeros(size, dtype=self._dtype, device=self._device)
        if count:
            out[:count].copy_(self._read(name, (rows,)))
        return out

    @torch.inference_mode()
    def _layer(self, index: int) -> Layer:
        shape, prefix = self._shape, f"model.layers.{index}"
        attention = f"{prefix}.self_attn"
        q_rows, kv_rows = self._shard.q_rows, self._shard.kv_rows
        return Layer(
            input_norm=self._tensor(f"{prefix}.input_layernorm.weight").float(),
            qkv=self._fused(
                [f"{attention}.{name}_proj" for name in "qkv"],
                [q_rows, kv_rows, kv_rows],
                shape.attention_bias,
                lambda i, rows: in_pairs(rows, shape.head_dim) if i < 2 else rows,
            ),
            qk_norm=self._qk_norm(attention) if shape.qk_norm else None,
            output=self._summand(f"{attention}.o_proj", q_rows, shape.output_bias),
            mlp_norm=self._tensor(f"{prefix}.post_attention_layernorm.weight").float(),
            mlp=self._sparse_mlp(f"{prefix}.mlp")
            if shape.is_sparse(index)
            else self._mlp(f"{prefix}.mlp", self._shard.mlp_columns),
        )

    def _qk_norm(self, attention: str) -> Tensor:
        """The norm weights of q and k, one row for each head: [H + K, D]."""
        q, k = (
            in_pairs(self._tensor(f"{attention}.{name}_norm.weight"), self._shape.head_dim)
            for name in "qk"
        )
        return torch.cat(
            (q.expand(self._shard.num_heads, -1), k.expand(self._shard.num_kv_heads, -1))
        )

    def _mlp(self, prefix: str, columns: slice) -> Mlp:
        """The MLP's part of width `columns`."""
        bias = self._shape.mlp_bias
        return Mlp(
            self._fused([f"{prefix}.gate_proj", f"{prefix}.up_proj"], [columns] * 2, bias),
            self._summand(f"{prefix}.down_proj", columns, bias),
        )

    def _sparse_mlp(self, prefix: str) -> SparseMlp:
        shape, ours = self._shape, self._shard.experts
        whole = slice(0, shape.moe_intermediate_size)
        experts = [self._mlp(f"{prefix}.experts.{i}", whole) for i in ours]
        router = Linear(self._tensor(f"{prefix}.gate.weight"))
        top_k, normalise = shape.num_experts_per_token, shape.norm_topk_prob
        return SparseMlp(router, experts, top_k, normalise, ours.start)

    def _fused(
        self,
        names: list[str],
        parts: list[slice],
        bias: bool,
        reorder: Reorder = _as_they_are,
    ) -> Linear:
        """One linear layer from the rows `parts` of several, stacked along their outputs."""
        num_rows = sum(part.stop - part.start for part in parts)
        quantised = self._few_bits([f"{name}.weight" for name in names], num_rows, reorder)
        kinds = ["weight"] if self._quantiser.keeps(quantised) else []
        stacked: dict[str, Tensor] = {}
        for kind in [*kinds, "bias"] if bias else kinds:
            columns = self._source.shapes()[f"{names[0]}.{kind}"][1:]
            out = torch.empty((num_rows, *columns), dtype=self._dtype, device=self._device)
            row = 0
            for i, (name, part) in enumerate(zip(names, parts, strict=True)):
                rows = reorder(i, self._read(f"{name}.{kind}", (part,)))
                out[row : row + len(rows)].copy_(rows)
                row += len(rows)
            stacked[kind] = out
        return self._linear(stacked.get("weight"), stacked.get("bias"), quantised)

    def _summand(self, name: str, columns: slice, bias: bool) -> Linear:
        """A linear layer of some of the inputs; the bias is in the first rank's summand alone."""
        whole = self._source.shapes()[f"{name}.weight"][0]
        quantised = self._few_bits([f"{name}.weight"], whole, _as_they_are)
        weight = None
        if self._quantiser.keeps(quantised):
            weight = self._tensor(f"{name}.weight", (slice(0, whole), columns))
        with_bias = bias and self._group.rank == 0
        return self._linear(weight, self._tensor(f"{name}.bias") if with_bias else None, quantised)

    def _few_bits(
        self, names: list[str], num_rows: int, reorder: Reorder
    ) -> QuantisedWeight | None:
        """The form for few rows of what is inside a layer, unless int8 is for any number."""
        if self._quantiser.makes_int8(num_rows):
            return None
        return self._quantiser.find(names, reorder)

    def _linear(
        self, weight: Tensor | None, bias: Tensor | None, quantised: QuantisedWeight | None
    ) -> Linear:
        if weight is not None and self._quantiser.makes_int8(len(weight)):
            return Linear(None, bias, int8=Int8Rows(weight, bias))
        return Linear(weight, bias, quantised)

    def _tensor(self, name: str, part: Part = ALL) -> Tensor:
        """A tensor in the model's type and place, of its own: a source may unmap what it gives."""
        tensor = self._read(name, part)
        is_ours = (
            not self._source.is_mapped(name)
            and (tensor.dtype, tensor.device.type) == (self._dtype, self._device.type)
            and tensor.is_contiguous()
            and tensor.untyped_storage().nbytes() == tensor.nbytes  # not a part of something larger
        )
        if is_ours:
            return tensor
        return torch.empty(tensor.shape, dtype=self._dtype, device=self._device).copy_(tensor)

    def _read(self, name: str, part: Part = ALL) -> Tensor:
        tensor, stored_bytes = self._source.read(name, part)
        with self._lock:
            self._done_bytes += stored_bytes * self._group.size
            if self._progress is not None:
                total_bytes = self._source.total_bytes
                self._progress("weights", min(self._done_bytes, total_bytes), total_bytes)
        return tensor
