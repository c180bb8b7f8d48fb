"""Shapes by name have the sizes that the models are known for; files are read; others refused."""

import json
from pathlib import Path

import pytest

from twostroke.errors import ConfigError, ModelError
from twostroke.shape import num_parameters
from twostroke.twin.models import KNOWN, find_shape

PARAMETERS = {  # billions, as the model cards say
    "llama-2-7b": 6.74,
    "llama-2-70b": 68.98,
    "llama-3.1-8b": 8.03,
    "llama-3.1-70b": 70.55,
    "llama-3.1-405b": 405.85,
    "llama-3.2-1b": 1.236,
    "llama-3.2-3b": 3.213,
    "llama-3.3-70b": 70.55,
    "smollm2-135m": 0.1345,
    "smollm2-360m": 0.3618,
    "smollm2-1.7b": 1.711,
    "qwen2.5-7b": 7.616,
    "qwen2.5-14b": 14.77,
    "qwen2.5-32b": 32.76,
    "qwen2.5-72b": 72.71,
    "qwen3-0.6b": 0.596,
    "qwen3-1.7b": 1.721,
    "qwen3-4b": 4.022,
    "qwen3-8b": 8.191,
    "qwen3-14b": 14.77,
    "qwen3-32b": 32.76,
    "qwen3-30b-a3b": 30.53,
    "qwen3-coder-30b-a3b": 30.53,
    "qwen3-235b-a22b": 235.1,
    "qwen3-coder-480b-a35b": 480.2,
}


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_known_models_have_their_parameters(name: str) -> None:
    assert num_parameters(find_shape(name)) / 1e9 == pytest.approx(PARAMETERS[name], rel=0.002)


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3-30b-a3b"),
        ("meta-llama/Meta-Llama-3.1-8B", "llama-3.1-8b"),
        ("meta-llama/Llama-2-70b-chat-hf", "llama-2-70b"),
    ],
)
def test_variants_have_the_shape_of_their_model(name: str, known: str) -> None:
    assert find_shape(name) == find_shape(known)


def test_files(tmp_path: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 1000,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert find_shape(str(path)) == find_shape(str(tmp_path))
    assert find_shape(str(path)).num_layers == 2
    path.write_text("{")
    with pytest.raises(ModelError):
        find_shape(str(path))


@pytest.mark.parametrize("name", ["", "llama-9", "no/such/config.json", "qwen3-30b-a3b-fp8"])
def test_others_are_refused_with_what_is_known(name: str) -> None:
    with pytest.raises(ConfigError, match="one of llama-2-70b"):
        find_shape(name)
