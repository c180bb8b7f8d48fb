"""A model split over ranks computes what the whole model does."""

import itertools
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from tests.cpu.model.causal import CPU, load, logits, random_tokens
from tests.cpu.model.ranks import ThreadGroup, on_ranks
from tests.cpu.model.test_gguf import write_gguf
from twostroke.checkpoint import Checkpoint, open_checkpoint
from twostroke.model.llama import DecoderModel
from twostroke.model.parallel import Shard
from twostroke.model.registry import load_model
from twostroke.shape import ModelShape, from_hf_config, parallel_sizes
from twostroke.testing.tiny_model import tiny_config, write_tiny_checkpoint

SMOL = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72, "head_dim": 8}

MODELS: list[tuple[int, str, dict[str, Any]]] = [
    (2, "llama", {}),
    (4, "llama", {"tie_word_embeddings": True}),  # 2 KV heads; the last rank has no tokens
    (3, "llama", SMOL),
    (9, "llama", SMOL),
    (2, "llama", {"attention_bias": True, "mlp_bias": True}),
    (4, "mistral", {"intermediate_size": 101}),
    (2, "qwen2", {"tie_word_embeddings": True}),
    (2, "qwen3", {}),
    (4, "qwen3", {}),
    (2, "qwen3_moe", {}),
    (4, "qwen3_moe", {"num_experts": 3, "norm_topk_prob": False, "mlp_only_layers": [0]}),
]


def shape_of(architecture: str = "llama", **changes: Any) -> ModelShape:
    return from_hf_config(tiny_config(architecture, **changes))


def load_rank(path: Path, group: ThreadGroup) -> DecoderModel:
    checkpoint = open_checkpoint(path)
    return load_model(checkpoint, dtype=torch.float32, device=CPU, group=group)


def logits_on_ranks(path: Path, size: int, token_ids: torch.Tensor) -> torch.Tensor:
    first, *others = on_ranks(size, lambda group: logits(load_rank(path, group), token_ids))
    assert all(part.shape == (0, first.shape[1]) for part in others)
    return first


@pytest.mark.parametrize(("size", "architecture", "changes"), MODELS, ids=str)
def test_logits_equal_those_of_one_rank(
    tmp_path: Path, size: int, architecture: str, changes: dict[str, Any]
) -> None:
    path = write_tiny_checkpoint(tmp_path, architecture, **changes)
    token_ids = random_tokens(60)
    whole = logits(load(path), token_ids)
    assert whole.std() > 0.5  # else closeness would say little
    split = logits_on_ranks(path, size, token_ids)
    assert split.is_contiguous()
    torch.testing.assert_close(split, whole, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe"])
def test_parts_of_a_gguf_file(tmp_path: Path, architecture: str, kind: str) -> None:
    """Parts begin and end within blocks: 96 columns on 2 ranks are 48 each, a block is 32."""
    directory = write_tiny_checkpoint(tmp_path / "hf", architecture, num_key_value_heads=4)
    quant = gguf.GGMLQuantizationType[kind]
    path = write_gguf(tmp_path / "model.gguf", directory, quant)
    token_ids = random_tokens(20)
    whole = logits(load(path), token_ids)
    split = logits_on_ranks(path, 2, token_ids)
    torch.testing.assert_close(split, whole, atol=1e-4, rtol=0)


def test_dummy_weights_do_not_depend_on_the_number_of_ranks() -> None:
    checkpoint = Checkpoint("none", Path("none"), "dummy", shape_of(), None, "none")

    def run(group: ThreadGroup) -> torch.Tensor:
        model = load_model(checkpoint, dtype=torch.float32, device=CPU, seed=3, group=group)
        return logits(model, random_tokens(9))

    (whole,), (split, _) = on_ranks(1, run), on_ranks(2, run)
    torch.testing.assert_close(split, whole, atol=1e-4, rtol=0)


@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe"])
def test_a_rank_holds_and_reads_its_share(tmp_path: Path, architecture: str) -> None:
    path = write_tiny_checkpoint(tmp_path, architecture, vocab_size=512, num_key_value_heads=4)
    whole = load(path).weight_bytes
    seen: list[tuple[int, int]] = []

    def run(group: ThreadGroup) -> int:
        model = load_model(
            open_checkpoint(path),
            dtype=torch.float32,
            device=CPU,
            group=group,
            progress=lambda stage, done, total: seen.append((done, total)),
        )
        return model.weight_bytes

    for part in on_ranks(4, run):
        assert whole / 4 <= part < 1.05 * whole / 4  # routers are on every rank
    assert all(done <= total for done, total in seen)


def test_which_sizes_are_possible() -> None:
    assert parallel_sizes(shape_of(**SMOL)) == [1, 3, 9]
    assert parallel_sizes(shape_of(num_attention_heads=4, num_key_value_heads=2)) == [1, 2, 4]
    # 4 divides neither: a rank's 3 query heads would read 2 KV heads unevenly.
    assert parallel_sizes(
        shape_of(num_attention_heads=12, num_key_value_heads=6, hidden_size=96)
    ) == [1, 2, 3, 6, 12]


@pytest.mark.parametrize("size", [1, 2, 4, 8, 32])
@pytest.mark.parametrize(("width", "vocab_size"), [(96, 259), (1536, 49152), (6144, 151936)])
def test_shares_cover_the_whole_once(size: int, width: int, vocab_size: int) -> None:
    shape = shape_of(
        num_attention_heads=32,
        num_key_value_heads=4,
        hidden_size=64,
        intermediate_size=width,
        vocab_size=vocab_size,
    )
    shards = [Shard(shape, rank, size) for rank in range(size)]
    for parts, total in (
        ([shard.mlp_columns for shard in shards], width),
        ([shard.vocabulary for shard in shards], vocab_size),
        ([shard.q_rows for shard in shards], 32 * 16),
    ):
        assert parts[0].start == 0
        assert all(a.stop == b.start for a, b in itertools.pairwise(parts))
        assert parts[-1].stop == total
    widths = [shard.mlp_columns.stop - shard.mlp_columns.start for shard in shards]
    assert max(widths) - min(widths) <= max(1, width / size / 8)
    # Query head h reads KV head h // 8: each rank has those of its own.
    for shard in shards:
        heads = range(shard.q_rows.start // 16, shard.q_rows.stop // 16)
        kv_heads = range(shard.kv_rows.start // 16, shard.kv_rows.stop // 16)
        assert {head // 8 for head in heads} == set(kv_heads)
        assert len(kv_heads) == shard.num_kv_heads
