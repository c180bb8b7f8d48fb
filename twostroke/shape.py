"""The shape of a model: the numbers that weights, KV sizing and cost models are computed from.

Read from a Hugging Face config.json (or from GGUF metadata translated to one) without torch, so
that the API process and the planner can use it too. What a shape cannot express is refused by
name here, before any weight is read. Defaults of missing keys are those of transformers, so that
a config means here what it means there.
"""

import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from twostroke.errors import ModelError, UnsupportedModelError

# Our names of architectures (`model_type` of config.json), and their classes in its
# `architectures`. A class for another task (classification, ...) is none of these and is refused,
# although its model_type would match.
HF_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
ARCHITECTURES = tuple(HF_CLASSES)
_CLASSES = {name: architecture for architecture, name in HF_CLASSES.items()} | {
    "LLaMAForCausalLM": "llama"
}

# Largest values taken at face value: well above any known model, small enough that a damaged or
# hostile file cannot make us allocate without bound.
MAX_VOCAB_SIZE = 1 << 24
MAX_HIDDEN_SIZE = 1 << 17
MAX_INTERMEDIATE_SIZE = 1 << 20
MAX_LAYERS = 1024
MAX_HEADS = 4096
MAX_HEAD_DIM = 1024
MAX_POSITIONS = 1 << 27
MAX_EXPERTS = 4096
MAX_EXPERTS_OF_ALL_LAYERS = 1 << 17


@dataclass(frozen=True)
class RopeScaling:
    """RoPE scaling as Hugging Face names it: `kind` is linear, llama3 or yarn.

    A fourth kind, "factors", is what GGUF files hold instead of llama3's parameters: each inverse
    frequency i is divided by `factors[i]` (head_dim / 2 of them).
    """

    kind: str
    parameters: Mapping[str, float] = field(default_factory=dict)
    factors: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder-only transformer of the Llama family.

    `architecture` is one of ARCHITECTURES. A dense model has `num_experts` 0; in a MoE model every
    layer is sparse unless named in `dense_layers`. `max_position_embeddings` includes what RoPE
    scaling adds.
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

    def is_sparse(self, layer: int) -> bool:
        """Whether the layer's MLP is a mixture of experts."""
        return self.num_experts > 0 and layer not in self.dense_layers


def tensor_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Every weight of the model: its name in a Hugging Face checkpoint, and its shape.

    Linear weights are [out, in]. A tied LM head is not listed.
    """
    hidden = shape.hidden_size
    q_size, kv_size = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    tensors: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocab_size, hidden)}

    def linear(name: str, rows: int, columns: int, bias: bool) -> None:
        tensors[f"{name}.weight"] = (rows, columns)
        if bias:
            tensors[f"{name}.bias"] = (rows,)

    def mlp(prefix: str, width: int) -> None:
        linear(f"{prefix}.gate_proj", width, hidden, shape.mlp_bias)
        linear(f"{prefix}.up_proj", width, hidden, shape.mlp_bias)
        linear(f"{prefix}.down_proj", hidden, width, shape.mlp_bias)

    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}"
        tensors[f"{prefix}.input_layernorm.weight"] = (hidden,)
        linear(f"{prefix}.self_attn.q_proj", q_size, hidden, shape.attention_bias)
        linear(f"{prefix}.self_attn.k_proj", kv_size, hidden, shape.attention_bias)
        linear(f"{prefix}.self_attn.v_proj", kv_size, hidden, shape.attention_bias)
        linear(f"{prefix}.self_attn.o_proj", hidden, q_size, shape.output_bias)
        if shape.qk_norm:
            tensors[f"{prefix}.self_attn.q_norm.weight"] = (shape.head_dim,)
            tensors[f"{prefix}.self_attn.k_norm.weight"] = (shape.head_dim,)
        tensors[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
        if shape.is_sparse(layer):
            linear(f"{prefix}.mlp.gate", shape.num_experts, hidden, False)
            for expert in range(shape.num_experts):
                mlp(f"{prefix}.mlp.experts.{expert}", shape.moe_intermediate_size)
        else:
            mlp(f"{prefix}.mlp", shape.intermediate_size)
    tensors["model.norm.weight"] = (hidden,)
    if not shape.tie_word_embeddings:
        tensors["lm_head.weight"] = (shape.vocab_size, hidden)
    return tensors


def num_parameters(shape: ModelShape) -> int:
    """Weights of the model; a tied LM head counts once."""
    return sum(math.prod(dims) for dims in tensor_shapes(shape).values())


def parallel_sizes(shape: ModelShape) -> list[int]:
    """Numbers of tensor-parallel ranks that can share the model.

    Each has as many query heads as the others, and the whole KV heads that those read; with more
    ranks than KV heads, one of them.
    """
    heads, kv_heads = shape.num_heads, shape.num_kv_heads
    return [
        size
        for size in range(1, heads + 1)
        if heads % size == 0
        and (kv_heads % size == 0 or size % kv_heads == 0)
        and size <= shape.intermediate_size
    ]


class _Keys:
    """Reads checked values from a config and names the key in every error.

    `shown` gives the name under which the file at hand knows a key.
    """

    def __init__(
        self, values: Mapping[str, Any], source: str, shown: Mapping[str, str] | None = None
    ) -> None:
        self.values = values
        self.source = source
        self.shown = shown or {}

    def name(self, key: str) -> str:
        return f"{self.source}: {self.shown.get(key, key)}"

    def get(self, key: str) -> Any:
        return self.values.get(key)

    def _value(self, key: str, default: Any) -> Any:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"{self.name(key)} is missing")
        return value

    def integer(self, key: str, maximum: int, *, default: int | None = None, least: int = 1) -> int:
        value = self._value(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= maximum:
            raise ModelError(
                f"{self.name(key)} is {_short(value)}; "
                f"it must be a whole number from {least:,} to {maximum:,}"
            )
        return value

    def number(
        self, key: str, *, default: float | None = None, above: float = 0.0, most: float = 1e12
    ) -> float:
        value = self._value(key, default)
        numeric = isinstance(value, int | float) and not isinstance(value, bool)
        if not numeric or not above < value <= most:  # NaN fails the comparison
            raise ModelError(
                f"{self.name(key)} is {_short(value)}; "
                f"it must be a number above {above:g}, at most {most:g}"
            )
        return float(value)

    def boolean(self, key: str, *, default: bool) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise ModelError(f"{self.name(key)} is {_short(value)}; it must be true or false")
        return value

    def refuse(self, key: str, hint: str = "") -> UnsupportedModelError:
        """The error for a sound value of `key` that this engine does not run."""
        value = _short(self.values.get(key))
        return UnsupportedModelError(f"{self.name(key)} {value} is not supported", hint=hint)


_brief = reprlib.Repr()
_brief.maxstring = _brief.maxother = 80
_brief.maxdict = 8


def _short(value: object) -> str:
    """For messages: whatever the file holds, however long or deep."""
    return _brief.repr(value)


def from_hf_config(
    config: Mapping[str, Any],
    *,
    source: str = "config.json",
    shown: Mapping[str, str] | None = None,
) -> ModelShape:
    """Translate a Hugging Face config.json.

    `source` and `shown` (key to the name that the file at hand has for it) serve the messages.
    Raises ModelError when a needed key is missing or not a sane number, and UnsupportedModelError,
    naming it, for an architecture or feature that this engine does not run.
    """
    if not isinstance(config, Mapping):
        raise ModelError(f"{source} holds {_short(config)}; it must be a JSON object")
    keys = _Keys(config, source, shown)
    architecture = _architecture(keys)
    qwen = architecture.startswith("qwen")
    vocab_size = keys.integer("vocab_size", MAX_VOCAB_SIZE)
    hidden = keys.integer("hidden_size", MAX_HIDDEN_SIZE)
    layers = keys.integer("num_hidden_layers", MAX_LAYERS)
    heads, kv_heads, head_dim = _heads(keys, architecture, hidden)
    positions = keys.integer("max_position_embeddings", MAX_POSITIONS)
    _refuse_unsupported(keys, architecture, layers, positions)
    rope_theta, scaling = _rope(keys, positions)
    # Qwen2 has biases on q, k and v by definition, Mistral and Qwen3-MoE follow their keys.
    bias = architecture != "mistral" and keys.boolean("attention_bias", default=False)
    return ModelShape(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=keys.integer("intermediate_size", MAX_INTERMEDIATE_SIZE),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=_scaled_positions(positions, scaling),
        rms_norm_eps=keys.number("rms_norm_eps", default=1e-6, most=1.0),
        rope_theta=rope_theta,
        rope_scaling=scaling,
        tie_word_embeddings=keys.boolean("tie_word_embeddings", default=False),
        attention_bias=bias or architecture == "qwen2",
        output_bias=bias and architecture != "qwen2",
        mlp_bias=not qwen and architecture != "mistral" and keys.boolean("mlp_bias", default=False),
        qk_norm=architecture in ("qwen3", "qwen3_moe"),
        dtype=_dtype(keys),
        bos_token_id=_token_id(keys, "bos_token_id"),
        eos_token_ids=token_ids(config.get("eos_token_id"), keys.name("eos_token_id"), vocab_size),
        **(_experts(keys, layers) if architecture == "qwen3_moe" else {}),
    )


_SAME_NAMES = (  # here and in config.json
    *("vocab_size", "hidden_size", "intermediate_size", "head_dim", "max_position_embeddings"),
    *("rms_norm_eps", "rope_theta", "tie_word_embeddings", "attention_bias", "mlp_bias"),
    "bos_token_id",
)


def to_hf_config(shape: ModelShape) -> dict[str, Any]:
    """The config.json that `from_hf_config` reads the shape from.

    Raises UnsupportedModelError for RoPE factors, which only GGUF files have.
    """
    config: dict[str, Any] = {name: getattr(shape, name) for name in _SAME_NAMES} | {
        "architectures": [HF_CLASSES[shape.architecture]],
        "model_type": shape.architecture,
        "torch_dtype": shape.dtype,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "hidden_act": "silu",
        "sliding_window": None,
        "eos_token_id": list(shape.eos_token_ids),
    }
    if (scaling := shape.rope_scaling) is not None:
        if scaling.kind == "factors":
            raise UnsupportedModelError("a config.json cannot hold the RoPE factors of a GGUF file")
        config["rope_scaling"] = {"rope_type": scaling.kind, **scaling.parameters}
        if scaling.kind == "linear":  # has the length before scaling: see `_scaled_positions`
            before = math.ceil(shape.max_position_embeddings / scaling.parameters["factor"])
            config["max_position_embeddings"] = min(shape.max_position_embeddings, before)
        if scaling.kind == "yarn":
            config["rope_scaling"]["truncate"] = bool(scaling.parameters["truncate"])
    if shape.num_experts:
        config |= {
            "num_experts": shape.num_experts,
            "num_experts_per_tok": shape.num_experts_per_token,
            "moe_intermediate_size": shape.moe_intermediate_size,
            "norm_topk_prob": shape.norm_topk_prob,
            "mlp_only_layers": sorted(shape.dense_layers),
        }
    return config


def _architecture(keys: _Keys) -> str:
    listed = keys.get("architectures")
    if isinstance(listed, list) and listed:
        found = _CLASSES.get(listed[0]) if isinstance(listed[0], str) else None
        if found is None:
            raise keys.refuse("architectures", f"supported: {', '.join(sorted(_CLASSES))}")
        return found
    model_type = keys.get("model_type")
    if model_type is None:
        raise ModelError(f"{keys.name('architectures')} and model_type are missing")
    if model_type not in ARCHITECTURES:
        raise keys.refuse("model_type", f"supported: {', '.join(ARCHITECTURES)}")
    return str(model_type)


def _heads(keys: _Keys, architecture: str, hidden: int) -> tuple[int, int, int]:
    """Heads, KV heads and head size; KV heads divide heads."""
    heads = keys.integer("num_attention_heads", MAX_HEADS)
    kv_heads = keys.integer("num_key_value_heads", MAX_HEADS, default=heads)
    if heads % kv_heads:
        raise ModelError(
            f"{keys.name('num_key_value_heads')} is {kv_heads}; it must divide the {heads} heads"
        )
    derived: int | None = None
    if architecture == "qwen3":
        derived = 128  # Qwen3's default, whatever the hidden size
    elif hidden % heads == 0:
        derived = hidden // heads
    elif keys.get("head_dim") is None:
        raise ModelError(
            f"{keys.name('hidden_size')} is {hidden}; "
            f"it must be a multiple of the {heads} heads where head_dim is not given"
        )
    head_dim = keys.integer("head_dim", MAX_HEAD_DIM, default=derived)
    if head_dim % 2:
        raise ModelError(f"{keys.name('head_dim')} is {head_dim}; rotary embedding needs it even")
    return heads, kv_heads, head_dim


def _refuse_unsupported(keys: _Keys, architecture: str, layers: int, positions: int) -> None:
    if keys.get("quantization_config"):
        raise keys.refuse("quantization_config", "use the unquantised checkpoint, or a GGUF file")
    if keys.get("hidden_act") not in (None, "silu", "swish"):
        raise keys.refuse("hidden_act", "supported: silu")
    if keys.number("partial_rotary_factor", default=1.0, most=1.0) != 1.0:
        raise keys.refuse("partial_rotary_factor", "supported: 1")
    if not _window_applies(keys, architecture, layers):
        return
    if keys.integer("sliding_window", MAX_POSITIONS, default=4096) < positions:
        raise keys.refuse(
            "sliding_window", "only models that attend to their whole context are supported"
        )


def _window_applies(keys: _Keys, architecture: str, layers: int) -> bool:
    """Whether any layer would attend to a window only, by the rules of transformers."""
    if architecture == "llama" or keys.values.get("sliding_window", 0) is None:
        return False
    if architecture == "mistral":  # a window unless its key is null
        return True
    if not keys.boolean("use_sliding_window", default=False):
        return False
    if architecture == "qwen3_moe":
        return True
    layer_types = keys.get("layer_types")
    if isinstance(layer_types, list):
        return "sliding_attention" in layer_types
    return keys.integer("max_window_layers", MAX_LAYERS, default=28, least=0) < layers


def _rope(keys: _Keys, positions: int) -> tuple[float, RopeScaling | None]:
    """Base and scaling, from `rope_parameters` (transformers 5) or rope_theta and rope_scaling."""
    key = "rope_parameters" if keys.get("rope_parameters") else "rope_scaling"
    values = keys.get(key) or {}
    if not isinstance(values, Mapping):
        raise ModelError(f"{keys.name(key)} is {_short(values)}; it must be an object")
    rope = _Keys(values, keys.name(key), keys.shown)
    if rope.number("partial_rotary_factor", default=1.0, most=1.0) != 1.0:
        raise rope.refuse("partial_rotary_factor", "supported: 1")
    base = rope if rope.get("rope_theta") is not None else keys
    theta = base.number("rope_theta", default=10000.0, above=1.0)
    kind_key = "rope_type" if rope.get("rope_type") is not None else "type"
    kind = rope.get(kind_key) or "default"
    if kind == "default":
        if any(isinstance(value, Mapping) for value in values.values()):
            raise keys.refuse(key, "RoPE that differs between layers is not supported")
        return theta, None
    if kind not in ("linear", "llama3", "yarn"):
        raise rope.refuse(kind_key, "supported: default, linear, llama3, yarn")
    return theta, RopeScaling(kind, _rope_parameters(rope, keys, kind, positions))


def _rope_parameters(rope: _Keys, keys: _Keys, kind: str, positions: int) -> dict[str, float]:
    original_key = "original_max_position_embeddings"
    parameters: dict[str, float] = {}
    if kind != "linear":
        # A value beside the rope settings wins over one inside, as in transformers.
        outer = keys if keys.get(original_key) is not None else rope
        parameters[original_key] = outer.integer(original_key, MAX_POSITIONS, default=positions)
    if kind == "yarn":
        implied = max(1.0, positions / parameters[original_key])
        parameters["factor"] = rope.number("factor", default=implied, most=1e6)
        for name in ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
            if rope.get(name):  # 0 means: the default
                parameters[name] = rope.number(name, most=1e6)
        parameters["truncate"] = float(rope.boolean("truncate", default=True))
        return parameters
    parameters["factor"] = rope.number("factor", most=1e6)
    if kind == "llama3":
        low = parameters["low_freq_factor"] = rope.number("low_freq_factor", most=1e6)
        parameters["high_freq_factor"] = rope.number("high_freq_factor", above=low, most=1e6)
    return parameters


def _scaled_positions(positions: int, scaling: RopeScaling | None) -> int:
    """Context length after scaling, by vLLM's rule: configs of linear and yarn models commonly
    keep the length before it, those of llama3 give the one after it."""
    if scaling is None or scaling.kind in ("llama3", "factors"):
        return positions
    before = scaling.parameters.get("original_max_position_embeddings", positions)
    return max(positions, min(MAX_POSITIONS, int(before * scaling.parameters["factor"])))


def _experts(keys: _Keys, layers: int) -> dict[str, Any]:
    count_key = "num_experts" if keys.get("num_experts") is not None else "num_local_experts"
    experts = keys.integer(count_key, MAX_EXPERTS)
    if experts * layers > MAX_EXPERTS_OF_ALL_LAYERS:
        raise ModelError(
            f"{keys.name(count_key)} is {experts} in each of {layers} layers; "
            f"at most {MAX_EXPERTS_OF_ALL_LAYERS:,} in all"
        )
    step = keys.integer("decoder_sparse_step", MAX_LAYERS, default=1)
    dense = keys.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(
        isinstance(layer, int) and 0 <= layer < layers for layer in dense
    ):
        raise ModelError(
            f"{keys.name('mlp_only_layers')} is {_short(dense)}; "
            f"it must be a list of layers from 0 to {layers - 1}"
        )
    unsparse = {layer for layer in range(layers) if (layer + 1) % step}
    return {
        "num_experts": experts,
        "num_experts_per_token": keys.integer("num_experts_per_tok", experts),
        "moe_intermediate_size": keys.integer("moe_intermediate_size", MAX_INTERMEDIATE_SIZE),
        "norm_topk_prob": keys.boolean("norm_topk_prob", default=False),
        "dense_layers": frozenset(dense) | unsparse,
    }


def _dtype(keys: _Keys) -> str:
    key = "dtype" if keys.get("dtype") is not None else "torch_dtype"
    value = keys.get(key) or "float32"
    if value not in ("float32", "bfloat16", "float16"):
        raise keys.refuse(key, "supported: float32, bfloat16, float16")
    return str(value)


def _token_id(keys: _Keys, key: str) -> int | None:
    if keys.get(key) is None:
        return None
    return keys.integer(key, MAX_VOCAB_SIZE, least=0)


def token_ids(value: object, name: str, vocab_size: int) -> tuple[int, ...]:
    """One id, a list of ids or None, as config.json and generation_config.json give them.

    Raises ModelError with `name` for anything else, ids outside the vocabulary included.
    """
    listed = [] if value is None else value if isinstance(value, list) else [value]
    for item in listed:
        if not isinstance(item, int) or isinstance(item, bool) or not 0 <= item < vocab_size:
            raise ModelError(
                f"{name} is {_short(value)}; it must be a token id below {vocab_size:,}, or a list"
            )
    return tuple(dict.fromkeys(listed))
