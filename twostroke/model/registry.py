"""From a checkpoint to a model: picks the weights' source and fuses what runs fused.

q, k and v become one matrix, gate and up another. Each is allocated once in its final type and
place and filled piece by piece, so loading never holds more than a few tensors twice.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from twostroke.checkpoint import Checkpoint, Progress, find_weights
from twostroke.model.gguf import GgufSource
from twostroke.model.layers import Linear, Mlp, in_pairs
from twostroke.model.llama import DecoderModel, Layer
from twostroke.model.memory import keep_freed_memory
from twostroke.model.moe import SparseMlp
from twostroke.model.weights import DummySource, SafetensorsSource, WeightSource, check_tensors
from twostroke.shape import ModelShape


def load_model(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
    progress: Progress | None = None,
) -> DecoderModel:
    """Read a checkpoint's weights into a model in `dtype` on `device`.

    `seed` is that of dummy weights; `progress` gets ("weights", bytes read, bytes in all). Raises
    ModelError naming the file and the tensor that is missing, left over or wrong.
    """
    if device.type == "cpu":
        keep_freed_memory()
    source = _open_source(checkpoint, dtype, seed)
    try:
        check_tensors(source, checkpoint.shape, checkpoint.path)
        return _Builder(checkpoint.shape, source, dtype, device, progress).model()
    finally:
        source.close()


def _open_source(checkpoint: Checkpoint, dtype: torch.dtype, seed: int) -> WeightSource:
    if checkpoint.format == "dummy":
        return DummySource(checkpoint.shape, seed)
    if checkpoint.format == "gguf":
        return GgufSource(checkpoint.path, checkpoint.shape, dtype)
    return SafetensorsSource(find_weights(checkpoint.path))


class _Builder:
    """Assembles a model from a source, tensor by tensor."""

    def __init__(
        self,
        shape: ModelShape,
        source: WeightSource,
        dtype: torch.dtype,
        device: torch.device,
        progress: Progress | None,
    ) -> None:
        self._shape = shape
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
        return DecoderModel(self._shape, embedding, layers, final_norm, head)

    @torch.inference_mode()
    def _ends(self) -> tuple[Tensor, Tensor, Linear]:
        """Embedding, final norm and LM head."""
        embedding = self._tensor("model.embed_tokens.weight")
        tied = self._shape.tie_word_embeddings
        head = Linear(embedding if tied else self._tensor("lm_head.weight"))
        return embedding, self._tensor("model.norm.weight").float(), head

    @torch.inference_mode()
    def _layer(self, index: int) -> Layer:
        shape, prefix = self._shape, f"model.layers.{index}"
        attention = f"{prefix}.self_attn"
        return Layer(
            input_norm=self._tensor(f"{prefix}.input_layernorm.weight").float(),
            qkv=self._fused(
                [f"{attention}.{name}_proj" for name in "qkv"],
                shape.attention_bias,
                lambda i, rows: in_pairs(rows, shape.head_dim) if i < 2 else rows,
            ),
            qk_norm=self._qk_norm(attention) if shape.qk_norm else None,
            output=self._fused([f"{attention}.o_proj"], shape.output_bias),
            mlp_norm=self._tensor(f"{prefix}.post_attention_layernorm.weight").float(),
            mlp=self._sparse_mlp(f"{prefix}.mlp")
            if shape.is_sparse(index)
            else self._mlp(f"{prefix}.mlp"),
        )

    def _qk_norm(self, attention: str) -> Tensor:
        """The norm weights of q and k, one row for each head: [H + K, D]."""
        q, k = (
            in_pairs(self._tensor(f"{attention}.{name}_norm.weight"), self._shape.head_dim)
            for name in "qk"
        )
        return torch.cat(
            (q.expand(self._shape.num_heads, -1), k.expand(self._shape.num_kv_heads, -1))
        )

    def _mlp(self, prefix: str) -> Mlp:
        bias = self._shape.mlp_bias
        return Mlp(
            self._fused([f"{prefix}.gate_proj", f"{prefix}.up_proj"], bias),
            self._fused([f"{prefix}.down_proj"], bias),
        )

    def _sparse_mlp(self, prefix: str) -> SparseMlp:
        shape = self._shape
        experts = [self._mlp(f"{prefix}.experts.{i}") for i in range(shape.num_experts)]
        router = Linear(self._tensor(f"{prefix}.gate.weight"))
        return SparseMlp(router, experts, shape.num_experts_per_token, shape.norm_topk_prob)

    def _fused(
        self,
        names: list[str],
        bias: bool,
        reorder: Callable[[int, Tensor], Tensor] = lambda i, rows: rows,
    ) -> Linear:
        """One linear layer from several stacked along their outputs."""
        kinds = ("weight", "bias") if bias else ("weight",)
        stacked = []
        for kind in kinds:
            shapes = [self._source.shapes()[f"{name}.{kind}"] for name in names]
            out = torch.empty(
                (sum(dims[0] for dims in shapes), *shapes[0][1:]),
                dtype=self._dtype,
                device=self._device,
            )
            row = 0
            for i, name in enumerate(names):
                rows = reorder(i, self._read(f"{name}.{kind}"))
                out[row : row + len(rows)].copy_(rows)
                row += len(rows)
            stacked.append(out)
        return Linear(*stacked)

    def _tensor(self, name: str) -> Tensor:
        """A copy of a tensor in the model's type and place: a source may unmap its own."""
        return self._read(name).to(self._device, self._dtype, copy=True).contiguous()

    def _read(self, name: str) -> Tensor:
        tensor, stored_bytes = self._source.read(name)
        with self._lock:
            self._done_bytes += stored_bytes
            if self._progress is not None:
                self._progress("weights", self._done_bytes, self._source.total_bytes)
        return tensor
