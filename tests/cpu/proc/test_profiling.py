"""`twostroke profile` around a real server with a tiny model; what cannot be measured."""

import json
import platform
import re
from pathlib import Path

import pytest
import torch
from llvmlite import binding
from typer.testing import CliRunner

from twostroke.cli import app
from twostroke.config import resolve
from twostroke.cost_host import Wave
from twostroke.cost_profile import Profile
from twostroke.errors import EngineDeadError
from twostroke.proc import profiling
from twostroke.proc.profiling import Piece, Server
from twostroke.twin.hardware import of_profile


@pytest.mark.parametrize(("shares", "kept"), [([0.0, 0.5, 0.01], [1, 3]), ([0.9] * 3, [1, 2, 3])])
def test_pieces_that_something_disturbed_are_left_out(
    shares: list[float], kept: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless hardly any is undisturbed."""
    each = iter(shares)
    monkeypatch.setattr(profiling, "LOOK_S", -1.0)
    monkeypatch.setattr(profiling.Others, "share", lambda self: next(each, 1.0))
    pieces = profiling.Pieces()
    for count in (1, 2, 3):
        pieces.add(Piece(0.0, 1.0, [Wave(count, 16, 0.0, 1.0)]))
    pieces.look()
    assert [piece.waves[0].num_requests for piece in pieces.of_use] == kept
    assert pieces.num_disturbed == sum(share > 0.1 for share in shares)


def test_what_came_before_the_measuring_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling.Others, "share", lambda self: 0.0)
    pieces = profiling.Pieces()
    for count in (1, 2):
        pieces.add(Piece(0.0, 1.0, [Wave(count, 16, 0.0, 1.0)]))
        if count == 1:
            pieces.forget()
    pieces.look()
    assert [piece.waves[0].num_requests for piece in pieces.of_use] == [2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is a GPU")
def test_a_processor_without_a_name_is_called_as_llvm_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda _: "model name\t: Some CPU @ 3 GHz\n")
    assert re.fullmatch(r"Some CPU @ 3 GHz, \d+ cores", profiling.device_name())
    monkeypatch.setattr(Path, "read_text", lambda _: "CPU implementer\t: 0x41\nCPU part\t: 0xd40\n")
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(binding, "get_host_cpu_name", lambda: "neoverse-v1")
    assert re.fullmatch(r"aarch64 neoverse-v1, \d+ cores", profiling.device_name())


def test_what_other_processes_take() -> None:
    others = profiling.Others()
    sum(range(10**6))
    assert 0.0 <= others.share() <= 1.0


def test_profile_measures_a_server(tiny_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "profile.json"
    flags = ("--max-num-seqs", "4", "--max-model-len", "256", "--num-gpu-blocks-override", "129")
    result = CliRunner().invoke(
        app, ["profile", str(tiny_dir), *flags, "--seconds", "5", "--out", str(out)]
    )
    assert result.exit_code == 0, result.output
    assert "a step" in result.output
    assert "error on a load that was not fitted to" in result.output
    profile = Profile.load(out)
    assert profile.step_error.num_samples > 50
    assert profile.held_out is not None
    host = profile.host
    assert 0 < host.frontend_s < 1
    assert 0 < host.deliver_s + host.deliver_row_s + host.egress_s + host.egress_row_s < 1
    assert profile.settings["tensor_parallel_size"] == "1"
    assert of_profile(profile).memory_bytes_per_s > 1e8
    assert of_profile(profile).bf16_flops > 1e9


def test_profile_reads_a_trace(tiny_dir: Path, tmp_path: Path) -> None:
    config, _ = resolve({"model": str(tiny_dir), "max_num_seqs": 2, "max_model_len": 256})
    with Server(config, tmp_path) as server:
        import httpx

        body = {"prompt": [65] * 20, "max_tokens": 40, "ignore_eos": True}
        assert httpx.post(server.url + "/v1/completions", json=body).is_success
    trace = server.read()
    steps = trace.steps
    assert trace.loads == []
    assert len(trace.inputs_s) >= 1
    assert steps[0].sample.num_tokens == 20
    assert len(steps) == 40
    out = tmp_path / "profile.json"
    result = CliRunner().invoke(
        app, ["profile", "--from", str(server.trace), "--json", "--out", str(out)]
    )
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["step_error"]["num_samples"] == 40


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    config, _ = resolve({"model": str(tmp_path / "none")})
    with pytest.raises(EngineDeadError, match=r"did not start.*does not exist"):
        Server(config, tmp_path).__enter__()
