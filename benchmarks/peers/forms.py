"""The forms of one model that peers read: a GGUF file, and what is written from it in bf16."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from twostroke.checkpoint import resolve
from twostroke.config import EngineConfig


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
                from peers.hf_directory import write_directory  # brings torch

                write_directory(self.gguf, path)
        return path

    def weights_bytes(self, weights: str) -> int:
        """Size of the weights in the file that ours reads."""
        if weights == "bf16":
            return (self.path("directory") / "model.safetensors").stat().st_size
        return self.gguf.stat().st_size
