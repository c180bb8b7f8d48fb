"""Loading safetensors and dummy weights: what is wrong is named."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from tests.cpu.model.causal import CPU, load, logits, random_tokens
from twostroke.checkpoint import open_checkpoint
from twostroke.errors import ModelError, UnsupportedModelError
from twostroke.model.registry import load_model
from twostroke.testing.tiny_model import write_tiny_checkpoint

LAYER = "model.layers.1.self_attn.k_proj.weight"


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_tiny_checkpoint(tmp_path / "tiny")


def edit_weights(path: Path, change: Any) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


def test_one_file_and_shards_give_the_same_model(tiny: Path, tmp_path: Path) -> None:
    sharded = write_tiny_checkpoint(tmp_path / "sharded", num_shards=4)
    token_ids = random_tokens(9)
    assert torch.equal(logits(load(tiny), token_ids), logits(load(sharded), token_ids))


def test_missing_tensor(tiny: Path) -> None:
    edit_weights(tiny, lambda tensors: tensors.pop(LAYER))
    with pytest.raises(ModelError, match=f"tensor {LAYER} is missing"):
        load(tiny)


def test_many_missing_tensors_are_counted(tiny: Path) -> None:
    edit_weights(tiny, lambda tensors: [tensors.pop(n) for n in list(tensors) if "layers.0" in n])
    with pytest.raises(ModelError, match=r"layers\.0\.input_layernorm\.weight, .* and 6 more are"):
        load(tiny)


def test_left_over_tensor(tiny: Path) -> None:
    def add(tensors: dict[str, Any]) -> None:
        tensors["model.layers.2.mlp.up_proj.weight"] = np.zeros((96, 64), np.float32)

    edit_weights(tiny, add)
    with pytest.raises(ModelError, match=r"layers\.2\.mlp\.up_proj\.weight is left over"):
        load(tiny)


def test_wrong_shape(tiny: Path) -> None:
    edit_weights(tiny, lambda tensors: tensors.update({LAYER: np.zeros((32, 65), np.float32)}))
    with pytest.raises(ModelError, match=rf"{LAYER} has shape \[32, 65\].*\[32, 64\]"):
        load(tiny)


def test_wrong_type(tiny: Path) -> None:
    edit_weights(tiny, lambda tensors: tensors.update({LAYER: np.zeros((32, 64), np.int8)}))
    with pytest.raises(UnsupportedModelError, match=f"{LAYER} has type I8.*BF16"):
        load(tiny)


def test_harmless_left_overs(tmp_path: Path) -> None:
    path = write_tiny_checkpoint(tmp_path, tie_word_embeddings=True)
    token_ids = random_tokens(3)
    before = logits(load(path), token_ids)

    def add(tensors: dict[str, Any]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(8, np.float32)
        tensors["lm_head.weight"] = np.zeros((259, 64), np.float32)

    edit_weights(path, add)
    assert torch.equal(logits(load(path), token_ids), before)


def test_tensor_in_two_shards(tmp_path: Path) -> None:
    path = write_tiny_checkpoint(tmp_path, num_shards=2)
    tensors = load_file(path / "model-00001-of-00002.safetensors")
    save_file(tensors, path / "model-00002-of-00002.safetensors")
    with pytest.raises(ModelError, match=r"00002-of-00002.* is in another shard too"):
        load(path)


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:5],
        lambda content: content[:-1],
        lambda content: b"\xff" * 8 + content[8:],
        lambda content: content[:8] + b"x" + content[9:],
        lambda content: b"\x80\x04" + content,  # a pickle
    ],
)
def test_damaged_file(tiny: Path, damage: Any) -> None:
    file = tiny / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ModelError, match=r"model\.safetensors is not a sound safetensors file"):
        load(tiny)


def test_config_for_another_architecture(tiny: Path) -> None:
    config = json.loads((tiny / "config.json").read_text())
    config["architectures"] = ["Qwen2ForCausalLM"]
    (tiny / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"q_proj\.bias.* missing"):
        load(tiny)


def test_progress_reaches_the_total(tiny: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    load_model(
        open_checkpoint(tiny),
        dtype=torch.float32,
        device=CPU,
        progress=lambda stage, done, total: seen.append((stage, done, total)),
    )
    size = (tiny / "model.safetensors").stat().st_size
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    assert seen[-1] == ("weights", size, size)
    assert len(seen) > 20


def test_loading_leaves_the_number_of_threads_as_it_was(tiny: Path) -> None:
    before = torch.get_num_threads()
    load(tiny)
    edit_weights(tiny, lambda tensors: tensors.pop(LAYER))
    with pytest.raises(ModelError):
        load(tiny)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3_moe"])
def test_dummy_weights_follow_the_seed(tmp_path: Path, architecture: str) -> None:
    path = write_tiny_checkpoint(tmp_path, architecture)
    (path / "model.safetensors").unlink()
    checkpoint = open_checkpoint(path, load_format="dummy")
    token_ids = random_tokens(5)
    one, same, other = (
        logits(load_model(checkpoint, dtype=torch.float32, device=CPU, seed=seed), token_ids)
        for seed in (1, 1, 2)
    )
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert one.isfinite().all()
