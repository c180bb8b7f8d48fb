"""The forms of one model that peers read: a GGUF file, and what is written from it."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from twostroke.checkpoint import resolve
from twostroke.config import EngineConfig


@dataclass(frozen=True)
class Forms:
    """Where each form of the model lies. All but the file are written when first asked for.

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
        """The GGUF file itself, its bf16 copy ("bf16.gguf"), a Hugging Face directory in bf16
        ("directory"), or one in 8 bits ("w8a8")."""
        if form == "gguf":
            return self.gguf
        path = self.models / f"{self.gguf.stem}-{_SUFFIXES[form]}"
        if not path.exists():
            print(f"writing {path}", file=sys.stderr)
            if form == "bf16.gguf":
                runner = Path(__file__).with_name("run_llama_cpp.py")
                words = [self.llama_python, str(runner), str(self.gguf), "--to-bf16", str(path)]
                subprocess.run(words, check=True, stdout=sys.stderr)
            elif form == "w8a8":
                from peers.w8a8 import write_w8a8  # brings torch

                write_w8a8(self.path("directory"), path)
            else:
                from peers.hf_directory import write_directory  # brings torch

                write_directory(self.gguf, path)
        return path

    def weights_bytes(self, weights: str) -> int:
        """Size of a file that holds the weights in this format."""
        if weights == "q4_1":
            return self.gguf.stat().st_size
        form = "w8a8" if weights == "int8" else "directory"
        return (self.path(form) / "model.safetensors").stat().st_size


_SUFFIXES = {"bf16.gguf": "bf16.gguf", "directory": "bf16", "w8a8": "w8a8"}
