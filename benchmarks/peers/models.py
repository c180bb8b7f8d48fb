"""The forms of one model that peers read: a GGUF file, and what is written from it in bf16.

The weights of a Hugging Face directory come through our GGUF reader, so that both sides multiply
the same numbers, and its tokenizer through transformers. Llama models only.
"""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer

from twostroke.checkpoint import open_checkpoint, resolve
from twostroke.config import EngineConfig
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


@dataclass(frozen=True)
class Forms:
    """Where each form of the model lies. Those in bf16 are written when they are first asked for.

    `llama_python` is the environment whose llama.cpp converts a GGUF file; empty: none does.
    """

    gguf: Path
    models: Path
    llama_python: str

    @classmethod
    def of(cls, model: str, models: Path, llama_python: str) -> "Forms":
        models.mkdir(parents=True, exist_ok=True)
        return cls(resolve(EngineConfig(model=model)).path, models.resolve(), llama_python)

    def path(self, form: str) -> Path:
        """The GGUF file itself, its bf16 copy ("bf16.gguf"), or a Hugging Face directory."""
        if form == "gguf":
            return self.gguf
        path = self.models / (f"{self.gguf.stem}-bf16" + (".gguf" if form == "bf16.gguf" else ""))
        if not path.exists():
            print(f"writing {path}", file=sys.stderr)
            if form == "bf16.gguf":
                runner = Path(__file__).with_name("run_llama_cpp.py")
                words = [self.llama_python, str(runner), str(self.gguf), "--to-bf16", str(path)]
                subprocess.run(words, check=True, stdout=sys.stderr)
            else:
                write_directory(self.gguf, path)
        return path

    def weights_bytes(self, weights: str) -> int:
        """Size of the weights in the file that ours reads."""
        if weights == "bf16":
            return (self.path("directory") / "model.safetensors").stat().st_size
        return self.gguf.stat().st_size
