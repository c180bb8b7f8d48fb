"""GGUF files as llama.cpp's converter writes them: the same model as their safetensors."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray
from safetensors.numpy import load_file

from tests.cpu.model.causal import load, logits, random_tokens
from tests.cpu.reference import reference_smollm2
from twostroke.checkpoint import open_checkpoint
from twostroke.errors import ModelError
from twostroke.gguf_header import GGML_TYPES
from twostroke.model.dequantise import dequantise
from twostroke.model.gguf import GgufSource
from twostroke.shape import ModelShape
from twostroke.testing.tiny_model import write_tiny_checkpoint

Quant = gguf.GGMLQuantizationType

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
}


def permute(weights: NDArray[Any], heads: int) -> NDArray[Any]:
    """convert_hf_to_gguf.py's LlamaModel.permute."""
    split = weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return split.swapaxes(1, 2).reshape(weights.shape)


def write_gguf(path: Path, directory: Path, kind: Any = Quant.F32) -> Path:
    """The checkpoint in `directory` as a GGUF file; matrices are stored as `kind`."""
    shape = open_checkpoint(directory).shape
    arch = ARCHITECTURES[shape.architecture]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    write_metadata(writer, shape)
    names = gguf.get_tensor_name_map(arch, shape.num_layers)
    tensors = load_file(directory / "model.safetensors")
    for name, values in merge_experts(tensors, shape).items():
        if arch == gguf.MODEL_ARCH.LLAMA and ("q_proj" in name or "k_proj" in name):
            heads = shape.num_heads if "q_proj" in name else shape.num_kv_heads
            values = permute(values, heads)
        stored = kind if values.ndim > 1 else Quant.F32
        writer.add_tensor(
            names.get_name(name, try_suffixes=(".weight", ".bias")),
            quantize(values, stored),
            raw_dtype=stored,
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_metadata(writer: gguf.GGUFWriter, shape: ModelShape) -> None:
    writer.add_block_count(shape.num_layers)
    writer.add_context_length(shape.max_position_embeddings)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_feed_forward_length(shape.intermediate_size)
    writer.add_head_count(shape.num_heads)
    writer.add_head_count_kv(shape.num_kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(shape.rms_norm_eps)
    writer.add_rope_freq_base(shape.rope_theta)
    if shape.num_experts:
        writer.add_expert_count(shape.num_experts)
        writer.add_expert_used_count(shape.num_experts_per_token)
        writer.add_expert_feed_forward_length(shape.moe_intermediate_size)


def merge_experts(tensors: dict[str, NDArray[Any]], shape: ModelShape) -> dict[str, NDArray[Any]]:
    """Experts stacked into one tensor a layer, as the converter does."""
    merged = {name: values for name, values in tensors.items() if ".experts." not in name}
    for layer in range(shape.num_layers if shape.num_experts else 0):
        for part in ("gate_proj", "up_proj", "down_proj"):
            prefix = f"model.layers.{layer}.mlp.experts"
            merged[f"{prefix}.{part}.weight"] = np.stack(
                [tensors[f"{prefix}.{e}.{part}.weight"] for e in range(shape.num_experts)]
            )
    return merged


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("mistral", {}),
        ("qwen2", {}),
        ("qwen3", {"tie_word_embeddings": True}),
        ("qwen3_moe", {}),
    ],
    ids=str,
)
def test_the_same_model_as_its_safetensors(
    tmp_path: Path, architecture: str, changes: dict[str, Any]
) -> None:
    directory = write_tiny_checkpoint(tmp_path / "hf", architecture, **changes)
    path = write_gguf(tmp_path / "m.gguf", directory)
    token_ids = random_tokens(20)
    torch.testing.assert_close(
        logits(load(path), token_ids), logits(load(directory), token_ids), atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe"])
def test_weights_equal_the_dequantised_ones(tmp_path: Path, architecture: str, kind: str) -> None:
    directory = write_tiny_checkpoint(tmp_path / "hf", architecture, head_dim=32)
    path = write_gguf(tmp_path / "m.gguf", directory, Quant[kind])
    source = GgufSource(path, open_checkpoint(path).shape, torch.float32)
    tensors = load_file(directory / "model.safetensors")
    assert source.shapes() == {name: values.shape for name, values in tensors.items()}
    stored_bytes = 0
    for name, values in tensors.items():
        if values.ndim > 1:  # a block never crosses a row, so reordering rows changes nothing
            values = dequantize(quantize(values, Quant[kind]), Quant[kind])
        read, size = source.read(name)
        stored_bytes += size
        torch.testing.assert_close(read, torch.from_numpy(values), atol=0, rtol=0)
    assert stored_bytes == source.total_bytes


@pytest.mark.parametrize("type_id", GGML_TYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dequantising_equals_the_gguf_package(type_id: int, dtype: torch.dtype) -> None:
    """Any bytes, with scales that are finite, over more than one chunk."""
    kind = GGML_TYPES[type_id]
    generator = np.random.default_rng(type_id)
    count = 3 if kind.block_size == 1 else 40_000 // kind.block_size * 16
    blocks = generator.integers(0, 256, (count, kind.block_bytes), np.uint8)
    scales = {"Q6_K": [208], "F32": [], "F16": [], "BF16": []}.get(kind.name, [0, 2])
    for at in scales:
        blocks[:, at : at + 2] = generator.normal(size=(count, 1)).astype(np.float16).view(np.uint8)
    expected = torch.from_numpy(dequantize(blocks, Quant(type_id)).flatten()).to(dtype)
    ours = dequantise(torch.from_numpy(blocks.flatten()), kind, dtype)
    torch.testing.assert_close(ours, expected, atol=0, rtol=0, equal_nan=True)


def test_missing_left_over_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    directory = write_tiny_checkpoint(tmp_path / "hf", num_hidden_layers=1)
    path = write_gguf(tmp_path / "m.gguf", directory)
    content = path.read_bytes()
    path.write_bytes(content.replace(b"blk.0.attn_k.weight", b"blk.0.attn_x.weight"))
    with pytest.raises(ModelError, match=r"layers\.0\.self_attn\.k_proj\.weight is missing"):
        load(path)
    path.write_bytes(content.replace(b"blk.0.attn_q.weight", b"blk.1.attn_q.weight"))
    with pytest.raises(ModelError, match=r"q_proj"):
        load(path)
    two_layers = write_tiny_checkpoint(tmp_path / "hf2", num_hidden_layers=2)
    extra = write_gguf(tmp_path / "m2.gguf", two_layers).read_bytes()
    block_count = b"llama.block_count" + (4).to_bytes(4, "little")
    assert block_count + b"\2" in extra
    (tmp_path / "m2.gguf").write_bytes(extra.replace(block_count + b"\2", block_count + b"\1"))
    with pytest.raises(ModelError, match=r"layers\.1.* and 6 more are left over"):
        load(tmp_path / "m2.gguf")
    length = b"llama.feed_forward_length" + (4).to_bytes(4, "little")
    path.write_bytes(content.replace(length + b"\x60", length + b"\x40"))
    with pytest.raises(ModelError, match=r"gate_proj.weight has shape \[96, 64\].*\[64, 64\]"):
        load(path)


def test_the_real_model_has_the_logits_of_transformers(smollm2_path: Path) -> None:
    token_ids = random_tokens(100, 49152)
    with torch.inference_mode():
        expected = reference_smollm2(smollm2_path)(token_ids[None]).logits[0]
    # Logits reach 40 here: float32 keeps 7 digits.
    torch.testing.assert_close(logits(load(smollm2_path), token_ids), expected, atol=3e-4, rtol=0)


def test_in_bfloat16_the_real_model_stays_close_to_float32(smollm2_path: Path) -> None:
    """The sum of what the layers add is not rounded, so the error stays small."""
    token_ids = random_tokens(60, 49152)
    exact = logits(load(smollm2_path), token_ids)
    error = logits(load(smollm2_path, torch.bfloat16), token_ids) - exact
    assert error.pow(2).mean().sqrt() < 2e-2 * exact.pow(2).mean().sqrt()
