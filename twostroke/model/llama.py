"""The decoder: Llama, Mistral, Qwen2, Qwen3 and Qwen3-MoE are one class with options.

    embed ─▶ [ norm ─▶ qkv ─▶ (q,k norm) ─▶ rotate ─▶ attention ─▶ o ─+▶ norm ─▶ MLP ─+▶ ] x layers ─▶ norm
             h ───────────────────────────────────────────────────────┘              │
             h ──────────────────────────────────────────────────────────────────────┘

h, the sum of what the layers add, is kept in float32: in bfloat16 every addition would round it to
8 bits. So are the logits, whose steps in bfloat16 (0.125 for values over 16) make ties of tokens
that are none. The matrix products run in the model's type.

It knows nothing of requests, blocks or batches: the step's tokens come as one row of T, and an
`Attention` looks after which may see which. Shape letters: see `layers`.
"""  # noqa: E501

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from twostroke.model.layers import Attention, Linear, Mlp, Rotary, rms_norm, rotate
from twostroke.model.moe import SparseMlp
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
    ) -> None:
        """`embedding` is [vocab, hidden]; `lm_head` maps hidden to vocab."""
        self.shape = shape
        self._embedding = embedding
        self._layers = layers
        self._final_norm = final_norm
        self._lm_head = lm_head
        self._rotary = Rotary(shape, embedding.device)
        linears = sum(
            layer.qkv.weight_bytes + layer.output.weight_bytes + layer.mlp.weight_bytes
            for layer in layers
        )
        # Norms are left out: a thousandth of the rest.
        self.weight_bytes = embedding.nbytes + linears + lm_head.weight_bytes

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """token_ids and positions [T] int64 -> hidden states [T, hidden] after the final norm."""
        shape, eps = self.shape, self.shape.rms_norm_eps
        rotated = shape.num_heads + shape.num_kv_heads
        heads = (-1, rotated + shape.num_kv_heads, shape.head_dim)
        rotations = self._rotary.rotations(positions)
        dtype = self._embedding.dtype
        h = F.embedding(token_ids, self._embedding).float()
        for i, layer in enumerate(self._layers):
            qkv = layer.qkv(rms_norm(h, layer.input_norm, eps).to(dtype)).view(heads)
            qk, v = qkv[:, :rotated], qkv[:, rotated:]
            if layer.qk_norm is not None:
                qk = F.rms_norm(qk, (shape.head_dim,), None, eps) * layer.qk_norm
            qk = rotate(qk, rotations)
            attended = attention(i, qk[:, : shape.num_heads], qk[:, shape.num_heads :], v)
            h += layer.output(attended)
            h += layer.mlp(rms_norm(h, layer.mlp_norm, eps).to(dtype))
        return rms_norm(h, self._final_norm, eps).to(dtype)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [R, hidden] -> logits [R, vocab], float32."""
        return self._lm_head.in_float32(hidden)
