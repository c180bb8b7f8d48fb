"""The shape of a model: the numbers that weights, KV sizing and cost models are computed from.

Read from a Hugging Face config.json (or from GGUF metadata translated to one) without torch, so
that the API process and the planner can use it too. What a shape cannot express is refused by
name here, before any weight is read.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")


@dataclass(frozen=True)
class RopeScaling:
    """RoPE scaling as Hugging Face names it: `kind` is linear, llama3 or yarn."""

    kind: str
    parameters: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder-only transformer of the Llama family.

    `architecture` is one of ARCHITECTURES. A dense model has `num_experts` 0; in a MoE model every
    layer is sparse unless named in `dense_layers`.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False  # q, k, v (Qwen2)
    output_bias: bool = False  # attention output projection
    mlp_bias: bool = False
    qk_norm: bool = False  # RMS norm of each q and k head (Qwen3)
    num_experts: int = 0
    num_experts_per_token: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = True
    dense_layers: frozenset[int] = frozenset()
    dtype: str = "bfloat16"  # of the checkpoint
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()


def from_hf_config(config: Mapping[str, Any]) -> ModelShape:
    """Translate a Hugging Face config.json.

    Raises ModelError when a needed key is missing or not a sane number, and UnsupportedModelError,
    naming it, for an architecture or feature that this engine does not run.
    """
    raise NotImplementedError
