"""Kernels made for lesser processors than this one give what its own give, and the start says which
they are. The functions of AVX-512 are asked for where it is named, and nowhere else.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cpu.other_processor import run
from twostroke.model import compiled, few_rows
from twostroke.model.compiled import has
from twostroke.model.few_rows_quantised import works

# Name; features that this machine must have as well; those that are told of.
AVX2_FEATURES = ("avx2", "f16c", "fma")
AVX2 = "haswell", AVX2_FEATURES, ",".join(f"+{name}" for name in AVX2_FEATURES)
VNNI_FEATURES = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512vnni")
VNNI = "cascadelake", VNNI_FEATURES, ",".join(f"+{name}" for name in VNNI_FEATURES)
ANY = "generic", (), ""


def run_on(processor: tuple[str, tuple[str, ...], str], *arguments: str) -> dict[str, Any]:
    name, needed, told = processor
    if not has(*needed):
        pytest.skip(f"this processor has no {' and '.join(needed)}")
    environment = os.environ | {"NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": told}
    command = [sys.executable, "-m", "tests.cpu.other_processor", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def here(directory: Path, dtype: str, quantization: str) -> dict[str, Any]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return run(directory, dtype, quantization)
    finally:
        torch.set_num_threads(before)


@pytest.mark.timeout(400)  # what is not in the cache is compiled
def test_with_avx2_all_is_as_here(tiny_dir: Path) -> None:
    found, expected = (
        run_on(AVX2, str(tiny_dir), "float32", "none"),
        here(tiny_dir, "float32", "none"),
    )
    assert found["tokens"] == expected["tokens"]
    torch.testing.assert_close(found["hidden"], expected["hidden"], atol=1e-4, rtol=1e-4)
    assert found["kernels"] == [
        "layer by layer",
        "products: torch; attention: compiled for haswell",
    ]


@pytest.mark.timeout(400)
def test_with_avx2_products_of_few_bits_are_the_same_to_the_last_bit(tiny_dir: Path) -> None:
    arguments = str(tiny_dir), "auto", "int4"
    found, expected = run_on(AVX2, *arguments), here(tiny_dir, "bfloat16", "int4")
    if not works():
        pytest.skip("no kernel for few bits on this processor to compare with")
    assert found["products"] == expected["products"]
    torch.testing.assert_close(found["hidden"], expected["hidden"], atol=0.05, rtol=0.05)
    assert found["kernels"] == [
        "a step is one program",
        "products: 4 and 8 bits by AVX2; attention: compiled for haswell",
    ]


@pytest.mark.timeout(400)
def test_few_bits_need_no_products_of_bfloat16(tiny_dir: Path) -> None:
    arguments = str(tiny_dir), "bfloat16", "int4"
    found, expected = run_on(VNNI, *arguments), here(tiny_dir, "bfloat16", "int4")
    torch.testing.assert_close(found["hidden"], expected["hidden"], atol=0.05, rtol=0.05)
    assert found["kernels"] == [
        "a step is one program",
        "products: 4 and 8 bits by AVX512-VNNI; attention: compiled for cascadelake",
    ]


@pytest.fixture
def beside_amx(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Our kernels have no AMX in them, so a processor without it can pretend: oneDNN takes other
    instructions there, with the sums of ours."""
    if not has("avx512bf16"):
        pytest.skip("this processor has no AVX512-BF16")
    monkeypatch.setattr(compiled, "has", lambda *names: names == ("amx-bf16",) or has(*names))
    few_rows.most_rows.cache_clear()
    yield
    few_rows.most_rows.cache_clear()


@pytest.mark.parametrize(
    ("quantization", "products"),
    [
        ("none", "bfloat16 by AVX512-BF16 up to 16 rows, then by AMX"),
        ("int8", "4 and 8 bits by AVX512-VNNI"),
    ],
)
def test_beside_amx_few_rows_alone_are_ours(
    tiny_dir: Path, quantization: str, products: str, request: pytest.FixtureRequest
) -> None:
    expected = here(tiny_dir, "bfloat16", quantization)
    request.getfixturevalue("beside_amx")
    found = here(tiny_dir, "bfloat16", quantization)
    assert (found["tokens"], found["hidden"]) == (expected["tokens"], expected["hidden"])
    assert found["kernels"][0] == "a step is one program"
    assert found["kernels"][1].split(";")[0] == f"products: {products}"


@pytest.mark.timeout(400)
def test_what_names_no_instructions_is_code_for_aarch64_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path))
    found = run_on(ANY)
    # What `compiled.pause` leaves out there, and what LLVM makes of numba's own counting.
    assert set(found["x86"]) <= {"llvm.x86.sse2.pause", "llvm.x86.atomic.sub.cc.i64"}
    assert len(found["bytes"]) == 6
    assert min(found["bytes"]) > 1000
    # Plain loads and stores of other threads' words would do on x86, and there alone.
    assert found["orders"] == [["ldar", "ldaxr", "stlr", "stlxr"]] * 2
