"""A Hugging Face directory in bf16 from a GGUF file, for the peers that read no GGUF.

The weights come through our GGUF reader, so that both sides multiply
the same numbers, and its tokenizer through transformers. Llama models only.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer

from twostroke.checkpoint import open_checkpoint
from twostroke.model.gguf import GgufSource
from twostroke.shape import ModelShape


def config_of(shape: ModelShape) -> dict[str, object]:
    """config.json of a Llama model without RoPE scaling."""
    if shape.architecture != "llama" or shape.rope_scaling is not None:
        sys.exit(f"cannot write a config.json: a {shape.architecture} model; only plain Llama")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_position_embeddings,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": shape.tie_word_embeddings,
        "hidden_act": "silu",
        "bos_token_id": shape.bos_token_id,
        "eos_token_id": list(shape.eos_token_ids),
    }


def write_directory(gguf: Path, directory: Path) -> None:
    """`directory` with config.json, model.safetensors and the tokenizer's files."""
    directory.mkdir(parents=True, exist_ok=True)
    checkpoint = open_checkpoint(gguf)
    source = GgufSource(gguf, checkpoint.shape, torch.bfloat16)
    weights = {name: source.read(name)[0].contiguous() for name in source.shapes()}
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(directory)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config_of(checkpoint.shape), indent=2))
