"""Logits of tiny random models equal those of transformers in float32."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.cpu.model.causal import CausalAttention, load, logits, random_tokens
from twostroke.testing.tiny_model import write_tiny_checkpoint

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "factor": 2.0}

MODELS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"tie_word_embeddings": True}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"num_key_value_heads": 4, "num_hidden_layers": 1}),
    ("llama", {"rope_scaling": LLAMA3}),
    ("llama", {"rope_scaling": YARN, "max_position_embeddings": 256}),
    ("llama", {"rope_scaling": LINEAR}),
    ("mistral", {"head_dim": 32}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("qwen3", {}),
    ("qwen3_moe", {}),
    ("qwen3_moe", {"norm_topk_prob": False, "mlp_only_layers": [0]}),
]


def reference(path: Path, token_ids: torch.Tensor) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        return model(token_ids[None]).logits[0]


@pytest.mark.parametrize(("architecture", "changes"), MODELS, ids=str)
def test_logits_equal_those_of_transformers(
    tmp_path: Path, architecture: str, changes: dict[str, Any]
) -> None:
    path = write_tiny_checkpoint(tmp_path, architecture, **changes)
    token_ids = random_tokens(150)
    expected = reference(path, token_ids)
    assert expected.std() > 0.5  # else closeness would say little
    torch.testing.assert_close(logits(load(path), token_ids), expected, atol=1e-4, rtol=0)


def test_float16_checkpoint_and_bfloat16_arithmetic(tmp_path: Path) -> None:
    path = write_tiny_checkpoint(tmp_path, torch_dtype="float16", num_shards=3)
    token_ids = random_tokens(40)
    expected = reference(path, token_ids)
    torch.testing.assert_close(logits(load(path), token_ids), expected, atol=1e-4, rtol=0)
    rounded = logits(load(path, torch.bfloat16), token_ids)
    assert rounded.dtype == torch.float32
    assert (rounded - expected).abs().mean() < 0.05 * expected.std()


@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe"])
def test_a_row_does_not_depend_on_the_rows_beside_it(tmp_path: Path, architecture: str) -> None:
    """What greedy tokens that are the same whatever the batch rest on."""
    model = load(write_tiny_checkpoint(tmp_path, architecture))

    class OnlyItself:
        """Each token attends to itself, so that rows are independent."""

        def __call__(
            self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
        ) -> torch.Tensor:
            return v.repeat_interleave(q.shape[1] // v.shape[1], 1).flatten(1)

    token_ids, positions = random_tokens(64), torch.arange(64)
    together = model.logits(model.forward(token_ids, positions, OnlyItself()))
    for rows in (slice(0, 1), slice(5, 8), slice(30, 63)):
        part = model.logits(model.forward(token_ids[rows], positions[rows], OnlyItself()))
        torch.testing.assert_close(part, together[rows], atol=2e-5, rtol=0)


def test_attention_sees_each_layer_once_in_order(tmp_path: Path) -> None:
    model = load(write_tiny_checkpoint(tmp_path, num_hidden_layers=3))
    seen = []

    class Recorder(CausalAttention):
        def __call__(
            self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
        ) -> torch.Tensor:
            seen.append((layer, tuple(q.shape), tuple(k.shape), tuple(v.shape)))
            assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
            return super().__call__(layer, q, k, v)

    hidden = model.forward(random_tokens(5), torch.arange(5), Recorder())
    assert hidden.shape == (5, 64)
    assert seen == [(layer, (5, 4, 16), (5, 2, 16), (5, 2, 16)) for layer in range(3)]
    assert model.logits(hidden[-1:]).shape == (1, 259)


def test_weight_bytes_count_both_copies_of_tied_embeddings(tmp_path: Path) -> None:
    model = load(write_tiny_checkpoint(tmp_path, num_hidden_layers=1, tie_word_embeddings=True))
    layer = 64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 96
    assert model.weight_bytes == 4 * (2 * 259 * 64 + layer)
