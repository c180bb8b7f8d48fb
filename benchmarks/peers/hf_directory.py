"""A Hugging Face directory in bf16 from a GGUF file, for the peers that read no GGUF.

The weights come through our GGUF reader, so that both sides multiply
the same numbers, and its tokenizer through transformers.
"""

import json
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer

from twostroke.checkpoint import open_checkpoint
from twostroke.model.gguf import GgufSource
from twostroke.shape import to_hf_config


def write_directory(gguf: Path, directory: Path) -> None:
    """`directory` with config.json, model.safetensors and the tokenizer's files."""
    directory.mkdir(parents=True, exist_ok=True)
    checkpoint = open_checkpoint(gguf)
    source = GgufSource(gguf, checkpoint.shape, torch.bfloat16)
    weights = {name: source.read(name)[0].contiguous() for name in source.shapes()}
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(directory)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    config = to_hf_config(replace(checkpoint.shape, dtype="bfloat16"))
    (directory / "config.json").write_text(json.dumps(config, indent=2))
