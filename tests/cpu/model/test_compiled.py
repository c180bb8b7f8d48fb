"""The cache of compiled kernels."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
