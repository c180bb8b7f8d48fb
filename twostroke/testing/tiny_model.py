"""Tiny checkpoints with random weights, in Hugging Face's format: config.json, safetensors and a
byte-level tokenizer with a chat template. For tests and demonstrations; needs no torch.
"""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from twostroke import shape as shapes

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tiny_config(architecture: str = "llama", **overrides: Any) -> dict[str, Any]:
    """A small config.json of one of `shape.ARCHITECTURES`; overrides use its own key names."""
    config: dict[str, Any] = {
        "architectures": [shapes.HF_CLASSES[architecture]],
        "model_type": architecture,
        "vocab_size": 256 + len(SPECIAL_TOKENS),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 256,
        "eos_token_id": 258,
        "torch_dtype": "float32",
    }
    if architecture == "mistral":
        config["sliding_window"] = None
    if architecture == "qwen3_moe":
        config |= {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
        }
    return config | overrides


def write_tiny_checkpoint(
    directory: Path | str,
    architecture: str = "llama",
    *,
    seed: int = 0,
    num_shards: int = 1,
    **overrides: Any,
) -> Path:
    """Write a random model of `tiny_config(architecture, **overrides)` and return its directory.

    Ids 0-255 are the bytes, then come SPECIAL_TOKENS; any text round-trips. Weights are float32
    (float16 with torch_dtype="float16"), of a scale at which logits differ clearly.
    """
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    config = tiny_config(architecture, **overrides)
    tensors = random_weights(shapes.from_hf_config(config), seed)
    _write_json(path / "config.json", config)
    _write_json(path / "tokenizer.json", byte_tokenizer_json())
    _write_json(
        path / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|endoftext|>",
            "eos_token": "<|im_end|>",
            "chat_template": CHAT_TEMPLATE,
            "model_max_length": config["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
        },
    )
    _write_weights(path, tensors, num_shards)
    return path


def random_weights(shape: shapes.ModelShape, seed: int) -> dict[str, NDArray[Any]]:
    """Seeded weights by name; activations keep about unit size from layer to layer."""
    generator = np.random.default_rng(seed)
    dtype = np.float16 if shape.dtype == "float16" else np.float32
    tensors: dict[str, NDArray[Any]] = {}
    for name, dims in shapes.tensor_shapes(shape).items():
        values = generator.standard_normal(dims, np.float32)
        if name.endswith("norm.weight"):
            values = 1 + 0.1 * values
        elif name.endswith(".bias"):
            values *= 0.1
        elif name == "model.embed_tokens.weight":
            values *= 0.5
        else:
            values /= math.sqrt(dims[-1])
        tensors[name] = values.astype(dtype)
    return tensors


def _write_weights(path: Path, tensors: dict[str, NDArray[Any]], num_shards: int) -> None:
    """One model.safetensors, or shards with an index, as transformers writes them."""
    if num_shards == 1:
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        return
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        part = {name: tensors[name] for name in names[shard::num_shards]}
        save_file(part, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    _write_json(
        path / "model.safetensors.index.json",
        {"metadata": {"total_size": total}, "weight_map": weight_map},
    )


def byte_tokenizer_json() -> dict[str, Any]:
    """tokenizer.json of a byte-level BPE without merges: one token a byte, then the specials."""
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,
    }
    vocab = {character: byte for byte, character in enumerate(_byte_characters())}
    added = [
        {
            "id": 256 + i,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for i, token in enumerate(SPECIAL_TOKENS)
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": [],
        },
    }


def _byte_characters() -> list[str]:
    """GPT-2's printable stand-in of each byte: itself where it prints, else from U+0100 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(moved)) for byte in range(256)]


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
