"""The cache of compiled kernels, and what numba cannot say."""

import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from llvmlite import binding, ir

from twostroke.model import compiled

KERNEL = """
import numpy as np
from twostroke.model.compiled import kernel, use_kernel_cache

@kernel(cache=use_kernel_cache(__file__))
def double(values):
    for i in range(len(values)):
        values[i] *= 2

values = np.arange(3)
double(values)
print(values.tolist(), dict(double.stats.cache_hits) != {})
"""


def run(file: Path) -> tuple[str, str]:
    environment = os.environ | {"TWOSTROKE_CACHE": str(file.parent / "cache")}
    command = [sys.executable, str(file)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    return done.stdout, done.stderr


@pytest.mark.parametrize("ending", ["nbi", "nbc"])
def test_a_damaged_file_is_said_and_compiled_again(tmp_path: Path, ending: str) -> None:
    file = tmp_path / "kernels.py"
    file.write_text(KERNEL)
    assert run(file) == ("[0, 2, 4] False\n", "")
    damaged = list((tmp_path / "cache").rglob(f"*.{ending}"))
    assert damaged
    for path in damaged:
        path.write_bytes(path.read_bytes()[:10])
    out, said = run(file)
    assert out == "[0, 2, 4] False\n"
    assert "a compiled kernel is damaged" in said
    assert run(file) == ("[0, 2, 4] True\n", "")


@pytest.mark.parametrize(
    ("machine", "word"), [("x86_64", "pause"), ("aarch64", "isb"), ("riscv64", None)]
)
def test_a_thread_says_that_it_waits_in_each_processors_own_word(
    machine: str, word: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    module = ir.Module()
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), []), "wait")
    builder = ir.IRBuilder(function.append_basic_block())
    _, generate = compiled.pause._defn(None)
    generate(SimpleNamespace(get_dummy_value=lambda: None), builder, None, ())
    builder.ret_void()
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    triple = f"{machine if word else 'x86_64'}-unknown-linux-gnu"
    target = binding.Target.from_triple(triple).create_target_machine()
    code = target.emit_assembly(binding.parse_assembly(str(module)))
    assert re.findall(r"\t(pause|isb|yield)\b", code) == ([word] if word else [])
