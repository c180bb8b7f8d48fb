"""Shapes from config.json: published models, defaults, refusals, hostile values."""

import contextlib
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostroke.errors import ModelError, UnsupportedModelError
from twostroke.shape import (
    ARCHITECTURES,
    RopeScaling,
    from_hf_config,
    num_parameters,
    tensor_shapes,
    to_hf_config,
)
from twostroke.testing.tiny_model import tiny_config

LLAMA3_SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}

# config.json of published models (keys that matter), and their published parameter counts.
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "Llama-2-7b": (
        {
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "max_position_embeddings": 4096,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 32,
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-5,
            "rope_scaling": None,
            "vocab_size": 32000,
        },
        6_738_415_616,
    ),
    "Llama-3.1-8B": (
        {
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "max_position_embeddings": 131072,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_scaling": LLAMA3_SCALING,
            "rope_theta": 500000.0,
            "torch_dtype": "bfloat16",
            "vocab_size": 128256,
            "eos_token_id": [128001, 128008, 128009],
        },
        8_030_261_248,
    ),
    "SmolLM2-135M": (
        {
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": 576,
            "intermediate_size": 1536,
            "max_position_embeddings": 8192,
            "num_attention_heads": 9,
            "num_hidden_layers": 30,
            "num_key_value_heads": 3,
            "tie_word_embeddings": True,
            "vocab_size": 49152,
        },
        134_515_008,
    ),
    "Mistral-7B-v0.3": (
        {
            "architectures": ["MistralForCausalLM"],
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "max_position_embeddings": 32768,
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "sliding_window": None,
            "vocab_size": 32768,
        },
        7_248_023_552,
    ),
    "Qwen2.5-7B": (
        {
            "architectures": ["Qwen2ForCausalLM"],
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "max_position_embeddings": 131072,
            "max_window_layers": 28,
            "num_attention_heads": 28,
            "num_hidden_layers": 28,
            "num_key_value_heads": 4,
            "sliding_window": 131072,
            "use_sliding_window": False,
            "vocab_size": 152064,
        },
        7_615_616_512,
    ),
    "Qwen3-8B": (
        {
            "architectures": ["Qwen3ForCausalLM"],
            "head_dim": 128,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "max_position_embeddings": 40960,
            "num_attention_heads": 32,
            "num_hidden_layers": 36,
            "num_key_value_heads": 8,
            "sliding_window": None,
            "use_sliding_window": False,
            "vocab_size": 151936,
        },
        8_190_735_360,
    ),
    "Qwen3-30B-A3B": (
        {
            "architectures": ["Qwen3MoeForCausalLM"],
            "decoder_sparse_step": 1,
            "head_dim": 128,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "max_position_embeddings": 40960,
            "mlp_only_layers": [],
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "num_attention_heads": 32,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 48,
            "num_key_value_heads": 4,
            "vocab_size": 151936,
        },
        30_532_122_624,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_their_published_number_of_parameters(name: str) -> None:
    config, parameters = PUBLISHED[name]
    assert num_parameters(from_hf_config(config)) == parameters


def test_llama3_keeps_its_scaling_and_context() -> None:
    shape = from_hf_config(PUBLISHED["Llama-3.1-8B"][0])
    assert shape.rope_scaling is not None
    assert shape.rope_scaling.kind == "llama3"
    assert shape.rope_scaling.parameters["factor"] == 8
    assert shape.max_position_embeddings == 131072
    assert shape.eos_token_ids == (128001, 128008, 128009)
    assert shape.dtype == "bfloat16"


def test_qwen2_has_biases_on_q_k_v_only() -> None:
    names = tensor_shapes(from_hf_config(tiny_config("qwen2")))
    assert "model.layers.0.self_attn.k_proj.bias" in names
    assert "model.layers.0.self_attn.o_proj.bias" not in names


def test_llama_attention_bias_covers_the_output_projection() -> None:
    names = tensor_shapes(from_hf_config(tiny_config(attention_bias=True, mlp_bias=True)))
    assert "model.layers.1.self_attn.o_proj.bias" in names
    assert "model.layers.1.mlp.down_proj.bias" in names


def test_tied_embeddings_need_no_head() -> None:
    names = tensor_shapes(from_hf_config(tiny_config(tie_word_embeddings=True)))
    assert "lm_head.weight" not in names
    assert "lm_head.weight" in tensor_shapes(from_hf_config(tiny_config()))


def test_sparse_layers() -> None:
    config = tiny_config(
        "qwen3_moe", num_hidden_layers=6, mlp_only_layers=[3], decoder_sparse_step=2
    )
    shape = from_hf_config(config)
    assert [layer for layer in range(6) if shape.is_sparse(layer)] == [1, 5]
    assert "model.layers.3.mlp.up_proj.weight" in tensor_shapes(shape)


def test_experts_under_the_name_that_transformers_5_writes() -> None:
    config = tiny_config("qwen3_moe")
    config["num_local_experts"] = config.pop("num_experts")
    assert from_hf_config(config).num_experts == 8


def test_model_type_is_enough_without_architectures() -> None:
    config = tiny_config("qwen3")
    del config["architectures"]
    assert from_hf_config(config).architecture == "qwen3"


# ---------------------------------------------------------------- RoPE

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


def test_rope_parameters_of_transformers_5_equal_the_old_keys() -> None:
    new = tiny_config(rope_parameters=YARN | {"rope_theta": 500.0})
    del new["rope_theta"]
    old = tiny_config(rope_scaling=YARN, rope_theta=500.0)
    assert from_hf_config(new) == from_hf_config(old)
    assert from_hf_config(new).rope_theta == 500


@pytest.mark.parametrize("scaling", [{"type": "default"}, {"rope_type": "default"}, None, {}])
def test_default_rope_is_no_scaling(scaling: dict[str, Any] | None) -> None:
    assert from_hf_config(tiny_config(rope_scaling=scaling)).rope_scaling is None


def test_old_key_type_is_understood() -> None:
    shape = from_hf_config(tiny_config(rope_scaling={"type": "linear", "factor": 2}))
    assert shape.rope_scaling == RopeScaling("linear", {"factor": 2.0})


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ({"type": "linear", "factor": 2.0}, 1024),
        (YARN, 512),
        (YARN | {"factor": 16.0}, 2048),
        (LLAMA3_SCALING, 512),
    ],
)
def test_context_after_scaling(scaling: dict[str, Any], expected: int) -> None:
    config = tiny_config(rope_scaling=scaling, max_position_embeddings=512)
    assert from_hf_config(config).max_position_embeddings == expected


WRITTEN: list[dict[str, Any]] = [
    *(config for config, _ in PUBLISHED.values()),
    *(tiny_config(architecture) for architecture in ARCHITECTURES),
    tiny_config(attention_bias=True, mlp_bias=True, rms_norm_eps=1e-3, rope_theta=7.5),
    tiny_config(bos_token_id=None, eos_token_id=[1, 2], tie_word_embeddings=True),
    tiny_config("qwen3_moe", num_hidden_layers=6, mlp_only_layers=[3], decoder_sparse_step=2),
    tiny_config("qwen3_moe", norm_topk_prob=False, attention_bias=True),
    *(
        tiny_config(rope_scaling=scaling)
        for scaling in (
            {"type": "linear", "factor": 2.5},
            {"type": "linear", "factor": 0.5},
            LLAMA3_SCALING,
            YARN,
            YARN | {"factor": 16.0, "truncate": False, "beta_fast": 16, "mscale": 0.7},
        )
    ),
]


@pytest.mark.parametrize("config", WRITTEN)
def test_a_shape_is_read_back_from_the_config_that_it_is_written_to(config: dict[str, Any]) -> None:
    shape = from_hf_config(config)
    written = json.loads(json.dumps(to_hf_config(shape)))
    assert from_hf_config(written) == shape


def test_rope_factors_of_a_gguf_file_cannot_be_written() -> None:
    scaling = RopeScaling("factors", factors=(1.0,) * 8)
    shape = replace(from_hf_config(tiny_config()), rope_scaling=scaling)
    with pytest.raises(UnsupportedModelError, match="cannot hold the RoPE factors"):
        to_hf_config(shape)


@pytest.mark.parametrize(
    ("scaling", "named"),
    [
        ({"type": "dynamic", "factor": 2.0}, "dynamic"),
        ({"rope_type": "longrope", "factor": 2.0}, "longrope"),
        ({"rope_type": ["yarn"]}, "yarn"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"full_attention": {"rope_type": "default"}}, "differs between layers"),
    ],
)
def test_other_rope_is_refused_by_name(scaling: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        from_hf_config(tiny_config(rope_scaling=scaling))


@pytest.mark.parametrize(
    "scaling",
    [
        "linear",
        {"type": "linear"},
        {"type": "linear", "factor": 0},
        {"type": "linear", "factor": float("nan")},
        LLAMA3_SCALING | {"high_freq_factor": 1.0},
        YARN | {"beta_fast": -3},
        YARN | {"original_max_position_embeddings": 0},
        YARN | {"truncate": "yes"},
    ],
)
def test_bad_rope_is_an_error(scaling: Any) -> None:
    with pytest.raises(ModelError, match="rope_scaling"):
        from_hf_config(tiny_config(rope_scaling=scaling))


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("architecture", "change", "named"),
    [
        ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "SequenceClassification"),
        ("llama", {"architectures": [["x"]]}, "architectures"),
        ("llama", {"architectures": None, "model_type": "gpt2"}, "gpt2"),
        ("llama", {"quantization_config": {"quant_method": "awq"}}, "quantization_config.*awq"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act.*gelu"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("llama", {"torch_dtype": "float8_e4m3fn"}, "torch_dtype.*float8"),
        ("mistral", {"sliding_window": 256}, "sliding_window.*256"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, "8"),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 8,
                   "layer_types": ["full_attention", "sliding_attention"]}, "sliding_window"),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 8}, "sliding_window"),
    ],
)  # fmt: skip
def test_features_are_refused_by_name(
    architecture: str, change: dict[str, Any], named: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        from_hf_config(tiny_config(architecture) | change)


@pytest.mark.parametrize(
    ("architecture", "change"),
    [
        ("mistral", {"sliding_window": None}),
        ("mistral", {"sliding_window": 512}),  # the whole context
        ("qwen2", {"use_sliding_window": False, "sliding_window": 8}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 8,
                   "layer_types": ["full_attention"] * 2}),
    ],
)  # fmt: skip
def test_a_window_that_never_applies_is_fine(architecture: str, change: dict[str, Any]) -> None:
    assert from_hf_config(tiny_config(architecture) | change).num_layers == 2


def test_a_mistral_that_does_not_say_has_transformers_default_window() -> None:
    config = tiny_config("mistral", max_position_embeddings=8192)
    del config["sliding_window"]
    with pytest.raises(UnsupportedModelError, match="sliding_window"):
        from_hf_config(config)


# ---------------------------------------------------------------- hostile values


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", None),
        ("hidden_size", -3),
        ("hidden_size", 64.0),
        ("hidden_size", 1 << 40),
        ("vocab_size", True),
        ("vocab_size", "259"),
        ("num_hidden_layers", 0),
        ("num_hidden_layers", 10**9),
        ("num_attention_heads", 3),
        ("num_key_value_heads", 3),
        ("head_dim", 15),
        ("head_dim", 1 << 20),
        ("max_position_embeddings", 1 << 60),
        ("rms_norm_eps", 0),
        ("rms_norm_eps", float("nan")),
        ("rope_theta", float("inf")),
        ("tie_word_embeddings", "yes"),
        ("eos_token_id", 259),
        ("eos_token_id", [1, -1]),
        ("eos_token_id", {"a": 1}),
        ("bos_token_id", "x"),
        ("num_experts_per_tok", 9),
        ("mlp_only_layers", [7]),
        ("mlp_only_layers", "all"),
    ],
)
def test_bad_values_are_named(key: str, value: Any) -> None:
    config = tiny_config("qwen3_moe") | {key: value}
    if key == "num_attention_heads":  # 64 is no multiple of 3
        del config["head_dim"], config["num_key_value_heads"]
        config["architectures"], key = ["LlamaForCausalLM"], "hidden_size"
    with pytest.raises(ModelError, match=key):
        from_hf_config(config)


@pytest.mark.parametrize("content", [None, [], "x", 3])
def test_not_an_object(content: Any) -> None:
    with pytest.raises(ModelError, match="JSON object"):
        from_hf_config(content)


def test_a_deep_value_is_shown_briefly() -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ModelError) as caught:
        from_hf_config(tiny_config(hidden_size=deep))
    assert len(str(caught.value)) < 300


def test_layers_times_experts_are_bounded() -> None:
    with pytest.raises(ModelError, match="num_experts is 4096 in each of 1000 layers"):
        from_hf_config(tiny_config("qwen3_moe", num_hidden_layers=1000, num_experts=4096))


def test_errors_use_the_names_of_the_file_at_hand() -> None:
    with pytest.raises(ModelError, match=r"^x\.gguf: llama\.block_count is 0; .*1 to 1,024"):
        from_hf_config(
            tiny_config(num_hidden_layers=0),
            source="x.gguf",
            shown={"num_hidden_layers": "llama.block_count"},
        )


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=5,
)
ROPE_KEYS = ["type", "rope_type", "factor", "rope_theta", "beta_fast", "mscale"]


@given(
    st.sampled_from(["llama", "mistral", "qwen2", "qwen3", "qwen3_moe"]),
    st.dictionaries(st.sampled_from(sorted(tiny_config("qwen3_moe"))), JSON, max_size=3),
    st.dictionaries(st.sampled_from(ROPE_KEYS), JSON | st.sampled_from(["yarn", "linear"])),
)
def test_any_config_is_a_shape_or_a_model_error(
    architecture: str, changes: dict[str, Any], rope: dict[str, Any]
) -> None:
    config = tiny_config(architecture, rope_scaling=rope) | changes
    with contextlib.suppress(ModelError):
        shape = from_hf_config(json.loads(json.dumps(config)))
        assert num_parameters(shape) > 0
