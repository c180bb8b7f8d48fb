"""Import rules as a fresh interpreter sees them: what a module drags in, all the way down.

The rules between our own packages are import-linter's (.importlinter, run by scripts/check).
"""

import subprocess
import sys

import pytest

PROGRAM = """
import importlib, sys
for name in sys.argv[2:]:
    importlib.import_module(name)
loaded = {name.partition(".")[0] for name in sys.modules} | set(sys.modules)
print(*sorted(loaded & set(sys.argv[1].split(","))))
"""


def loaded(modules: list[str], forbidden: list[str]) -> list[str]:
    """Which of `forbidden` are loaded once `modules` are, in a new interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, ",".join(forbidden), *modules],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


@pytest.mark.parametrize(
    "modules",
    [
        ["twostroke.core.loop", "twostroke.kv.manager"],
        ["twostroke.api.app", "twostroke.client.engine", "twostroke.client.llm"],
        ["twostroke.checkpoint", "twostroke.download", "twostroke.bench.serving", "twostroke.cli"],
    ],
    ids=["core", "api", "base"],
)
def test_only_worker_and_model_load_torch(modules):
    assert loaded(modules, ["torch", "transformers", "numba", "twostroke.worker"]) == []


def test_the_core_does_no_io():
    forbidden = ["asyncio", "multiprocessing", "socket", "subprocess", "zmq", "twostroke.transport"]
    assert loaded(["twostroke.core.loop", "twostroke.kv.manager"], forbidden) == []


def test_help_needs_nothing_slow():
    slow = ["numpy", "httpx", "msgspec", "rich", "zmq", "starlette", "huggingface_hub", "asyncio"]
    assert loaded(["twostroke.cli"], slow) == []
    assert loaded(["twostroke"], [*slow, "typer"]) == []
