"""The decoder: Llama, Mistral, Qwen2, Qwen3 and Qwen3-MoE are one class with options.

    embed ─▶ [ norm ─▶ qkv ─▶ (q,k norm) ─▶ rotate ─▶ attention ─▶ o ─+▶ norm ─▶ MLP ─+▶ ] x layers ─▶ norm
             h ───────────────────────────────────────────────────────┘              │
             h ──────────────────────────────────────────────────────────────────────┘

h, the sum of what the layers add, is kept in float32: in bfloat16 every addition would round it to
8 bits. So are the logits, whose steps in bfloat16 (0.125 for values over 16) make ties of tokens
that are none. The matrix products run in the model's type.

A rank of a tensor-parallel group holds its part of the weights; what it adds to `h` is then a
summand, and the ranks' sum is (see `parallel`).

It knows nothing of requests, blocks or batches: the step's tokens come as one row of T, and an
`Attention` looks after which may see which. Shape letters: see `layers`.
"""  # noqa: E501

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from twostroke.model.elementwise import make_elementwise
from twostroke.model.layers import Attention, Linear, Mlp, Rotary
from twostroke.model.moe import SparseMlp
from twostroke.model.parallel import ALONE, Group, Shard
from twostroke.shape import ModelShape


@dataclass(slots=True)
class Layer:
    """Weights of one decoder layer."""

    input_norm: Tensor  # [hidden] float32
    qkv: Linear
    qk_norm: Tensor | None  # [H + K, D]: the norm of each q and k head (Qwen3)
    output: Linear
    mlp_norm: Tensor  # [hidden] float32
    mlp: Mlp | SparseMlp


class DecoderModel:
    """A loaded model on one device. Not thread-safe against itself: one step at a time."""

    def __init__(
        self,
        shape: ModelShape,
        embedding: Tensor,
        layers: list[Layer],
        final_norm: Tensor,
        lm_head: Linear,
        group: Group = ALONE,
    ) -> None:
        """`embedding` is [vocab, hidden]; `lm_head` maps hidden to vocab. All are a rank's part."""
        self.shape = shape
        self.shard = Shard(shape, group.rank, group.size)
        self._group = group
        self.embedding = embedding
        self.layers = layers
        self.final_norm = final_norm
        self.lm_head = lm_head
        self.rotary = Rotary(shape, embedding.device)
        self.elementwise = make_elementwise(embedding.device, embedding.dtype)
        # Norms are left out: a thousandth of the rest.
        self.weight_bytes = embedding.nbytes + sum(
            linear.weight_bytes for linear in (*self.linears, lm_head)
        )

    @property
    def linears(self) -> list[Linear]:
        """Those inside the layers."""
        return [
            linear
            for layer in self.layers
            for linear in (layer.qkv, layer.output, *layer.mlp.linears)
        ]

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """token_ids and positions [T] int64 -> hidden states [T, hidden] after the final norm."""
        head_dim, eps = self.shape.head_dim, self.shape.rms_norm_eps
        num_heads, num_kv_heads = self.shard.num_heads, self.shard.num_kv_heads
        rotated = num_heads + num_kv_heads
        heads = (-1, rotated + num_kv_heads, head_dim)
        all_reduce, ops = self._group.all_reduce, self.elementwise
        rotations = self.rotary.rotations(positions)
        h = self.embed(token_ids).float()
        added: Tensor | None = None  # what the last layer adds to h
        for i, layer in enumerate(self.layers):
            qkv = layer.qkv(ops.add_norm(h, added, layer.input_norm, eps)).view(heads)
            ops.rotate(qkv, rotations, rotated, layer.qk_norm, eps)
            attended = attention(i, qkv[:, :num_heads], qkv[:, num_heads:rotated], qkv[:, rotated:])
            added = all_reduce(layer.output(attended))
            added = all_reduce(layer.mlp(ops.add_norm(h, added, layer.mlp_norm, eps), ops))
        return ops.add_norm(h, added, self.final_norm, eps)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [R, hidden] -> logits [R, vocab], float32; [0, vocab] but on rank 0."""
        vocab_size = self.shape.vocab_size
        parts = self._group.gather(self.lm_head.in_float32(hidden))
        if len(parts) == 1:
            return parts[0]
        if not parts:
            return hidden.new_empty((0, vocab_size), dtype=torch.float32)
        return torch.cat(parts, -1)[:, :vocab_size].contiguous()

    def embed(self, token_ids: Tensor) -> Tensor:
        """[T] -> [T, hidden], in the model's type."""
        if self.shard.size == 1:
            return F.embedding(token_ids, self.embedding)
        rows = token_ids - self.shard.rank * len(self.embedding)
        elsewhere = (rows < 0) | (rows >= len(self.embedding))
        embedded = F.embedding(rows.masked_fill_(elsewhere, 0), self.embedding)
        return self._group.all_reduce(embedded.masked_fill_(elsewhere[:, None], 0))
