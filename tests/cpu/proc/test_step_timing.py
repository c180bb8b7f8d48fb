"""Timing the parts of a step on a tiny model: all are there, and add up to no less than they do."""

from pathlib import Path

import pytest

from tests.cpu.worker.driving import small_config
from twostroke.checkpoint import open_checkpoint
from twostroke.errors import ConfigError
from twostroke.model.int8_rows import works
from twostroke.proc import step_timing
from twostroke.proc.step_timing import StepTimer
from twostroke.testing.tiny_model import write_tiny_checkpoint

PARTS = ["norm", "qkv", "rotate", "attention", "output", "gate, up", "SiLU", "down"]


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_timing, "MIN_SECONDS", 0.0)
    monkeypatch.setattr(step_timing, "_READ_BYTES", 1 << 20)
    monkeypatch.setattr(step_timing, "_PRODUCT", 64)


def timer(directory: Path, architecture: str = "llama", **settings: object) -> StepTimer:
    write_tiny_checkpoint(directory, architecture)
    return StepTimer(small_config(**settings), open_checkpoint(directory))


@pytest.mark.parametrize("quantization", ["none", "int4", "int8"])
@pytest.mark.parametrize(("rows", "tokens"), [(1, 1), (4, 1), (8, 20)])
def test_every_part_is_measured(rows: int, tokens: int, quantization: str, tmp_path: Path) -> None:
    if quantization != "none" and not works():
        pytest.skip("no kernel for few bits on this processor")
    worker = timer(tmp_path, dtype="bfloat16", quantization=quantization)
    step = worker.measure(rows, tokens, 30)
    seconds = {part.name: part.seconds for part in step.parts}
    assert set(PARTS) | {"lm head", "sampler"} <= set(seconds)
    assert min(seconds.values()) > 0
    by_name = {part.name: part for part in step.parts}
    shape = worker.runner.model.shape
    assert by_name["down"].flops == (
        2 * rows * tokens * shape.num_layers * shape.hidden_size * shape.intermediate_size
    )
    kv = 2 * 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim  # bytes a token
    assert by_name["attention"].bytes_read == rows * (30 + tokens) * kv
    again = worker.measure(rows, tokens, 30)  # the seats were given back
    assert [part.name for part in again.parts] == [part.name for part in step.parts]
    ceilings = worker.ceilings()
    assert ceilings.read_gb_per_s > 0
    down, in_int8 = by_name["down"], quantization == "int8"
    assert (ceilings.int8_gflop_per_s > 0) == in_int8
    assert down.int8_flops == (down.flops if in_int8 else 0)


def test_experts_are_one_part(tmp_path: Path) -> None:
    step = timer(tmp_path, "qwen3_moe").measure(2, 1, 5)
    assert "mlp" in {part.name for part in step.parts}


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    worker = timer(tmp_path)
    with pytest.raises(ConfigError, match="9 requests; there are 8"):
        worker.measure(9, 1, 10)
    with pytest.raises(ConfigError, match="tokens a request; there are 96"):
        worker.measure(1, 1, 200)
