"""Recorded runs: read and checked, replayed with their settings, compared, and fitted."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from twostroke.cli import app
from twostroke.cost_profile import Profile
from twostroke.errors import ConfigError
from twostroke.twin.hardware import GPUS
from twostroke.twin.models import find_shape
from twostroke.twin.roofline import Parallel, Roofline, Software
from twostroke.twin.scenario import Scenario, simulate
from twostroke.twin.vllm_run import (
    VllmRun,
    compare,
    fit_software,
    profile_of,
    read_run,
    scenario_of,
)

SHAPE, GPU = find_shape("llama-3.1-8b"), GPUS["H100"]
META: dict[str, Any] = {
    "model": "meta-llama/Llama-3.1-8B",
    "vllm_version": "0.19.0",
    "engine_kwargs": {"max_num_seqs": 16, "max_num_batched_tokens": 1024, "max_model_len": None},
}


def rows(count: int = 20) -> list[dict[str, Any]]:
    """Requests half a second apart; the engine's clock is 1,000 s behind the wall's."""
    made = []
    for i in range(count):
        at = 5000.0 + i / 2
        made.append(
            {
                "request_id": f"bench-{i}",
                "input_toks": 100 + i,
                "output_toks": 20,
                "arrival_time": at,
                "queued_ts": at - 1000 + (i % 3) * 0.001,
                "scheduled_ts": at - 999.99,
                "first_token_ts": at - 999.9,
                "last_token_ts": at - 999.0,
            }
        )
    return made


def save(directory: Path, meta: Any = META, requests: list[dict[str, Any]] | None = None) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "meta.json").write_text(json.dumps(meta))
    lines = [json.dumps(row) for row in (rows() if requests is None else requests)]
    (directory / "requests.jsonl").write_text("\n".join(lines) + "\n")
    return directory


def replay(run: VllmRun, software: Software) -> Scenario:
    def make_cost(parallel: Parallel, software: Software) -> Roofline:
        return Roofline(SHAPE, GPU, parallel, software=software)

    return scenario_of(run, SHAPE, GPU, make_cost, software)


def test_times_count_from_the_first_arrival(tmp_path: Path) -> None:
    run = read_run(save(tmp_path / "H100__x"))
    assert run.name == "H100__x"
    assert run.arrival_s[:3] == pytest.approx([0, 0.5, 1.0])
    assert run.first_s[:2] == pytest.approx([0.1, 0.6])
    assert run.last_s[0] == pytest.approx(1.0)


def test_settings_become_the_twins(tmp_path: Path) -> None:
    kwargs = {"tensor_parallel_size": 2, "num_gpu_blocks_override": 777, "kv_cache_dtype": "fp8"}
    meta = META | {"engine_kwargs": META["engine_kwargs"] | kwargs}
    scenario = replay(read_run(save(tmp_path, meta)), Software())
    (engines,) = scenario.engines
    assert engines.config.num_blocks == 777
    assert (engines.config.max_num_seqs, engines.config.max_num_batched_tokens) == (16, 1024)
    assert engines.layout.tensor_parallel_size == 2
    assert engines.layout.dtype == "float8"
    assert not engines.steps_together


def test_engines_that_share_experts_step_together(tmp_path: Path) -> None:
    meta = META | {"engine_kwargs": {"data_parallel_size": 2, "enable_expert_parallel": True}}
    run = read_run(save(tmp_path, meta))
    shape = find_shape("qwen3-30b-a3b")

    def make_cost(parallel: Parallel, software: Software) -> Roofline:
        assert parallel.data_parallel_size == 2
        return Roofline(shape, GPUS["H200"], parallel, software=software)

    (engines,) = scenario_of(run, shape, GPUS["H200"], make_cost, Software()).engines
    assert engines.count == 2
    assert engines.steps_together


def test_a_run_that_the_twin_made_is_given_back(tmp_path: Path) -> None:
    """What was simulated with a share of 80 % compares as equal, and the share is found again."""
    truth = Software(kernel_share=0.8)
    run = read_run(save(tmp_path))
    result = simulate(replay(run, truth))
    requests = rows()
    for i, row in enumerate(requests):
        row["queued_ts"] = row["arrival_time"] - 1000
        row["first_token_ts"] = row["queued_ts"] + float(result.ttft_s[i])
        row["last_token_ts"] = row["queued_ts"] + float(result.e2e_s[i])
    run = read_run(save(tmp_path, requests=requests))
    figures = compare(run, result)
    assert [it.name for it in figures][:2] == ["mean TTFT ms", "P50 TTFT ms"]
    assert max(abs(it.error) for it in figures) < 1e-3
    found = fit_software(run, lambda software: replay(run, software), range(10))
    assert found.kernel_share == pytest.approx(0.8, abs=1e-4)
    half = compare(run, simulate(replay(run, found)), slice(10, 20))
    assert max(abs(it.error) for it in half) < 1e-3


def test_a_profile_of_a_run(tmp_path: Path) -> None:
    """Of a run that the twin made: the profile's own replay is close to it."""
    run = read_run(save(tmp_path / "H100__x"))
    result = simulate(replay(run, Software(kernel_share=0.7)))
    requests = rows()
    for i, row in enumerate(requests):
        row["queued_ts"] = row["arrival_time"] - 1000
        row["first_token_ts"] = row["queued_ts"] + float(result.ttft_s[i])
        row["last_token_ts"] = row["queued_ts"] + float(result.e2e_s[i])
    profile = profile_of(read_run(save(tmp_path / "H100__x", requests=requests)), SHAPE, GPU)
    assert profile.settings["kernel_share"] == "0.700"
    assert profile.step_error.num_samples == 10
    assert profile.held_out is not None
    assert profile.held_out.p90 < 0.05


def test_profile_reads_a_run(tmp_path: Path) -> None:
    directory, out = save(tmp_path / "H100__x"), tmp_path / "profile.json"
    command = ["profile", "--from", str(directory), "--out", str(out)]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert "meta-llama/Llama-3.1-8B on H100" in done.output
    assert Profile.load(out).settings["recorded"] == "H100__x"
    unknown = CliRunner().invoke(app, [*command, "--gpu", "H1000"])
    assert isinstance(unknown.exception, ConfigError)
    assert "did you mean H100?" in str(unknown.exception)


@pytest.mark.parametrize(
    ("meta", "requests", "problem"),
    [
        ([], None, "no run of vLLM"),
        ({"model": "x"}, None, "engine_kwargs"),
        (META | {"engine_kwargs": {"max_num_seqs": 0}}, None, "max_num_seqs"),
        (META, [], "0 requests"),
        (META, [{"input_toks": 1}], "output_toks"),
        (META, [rows(1)[0] | {"input_toks": -4}], "input_toks"),
    ],
)
def test_what_is_no_run(
    tmp_path: Path, meta: Any, requests: list[dict[str, Any]] | None, problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        read_run(save(tmp_path, meta, requests))


def test_no_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        read_run(tmp_path / "none")


def test_nothing_to_fit_to(tmp_path: Path) -> None:
    single = [row | {"output_toks": 1, "last_token_ts": row["first_token_ts"]} for row in rows()]
    run = read_run(save(tmp_path, requests=single))
    with pytest.raises(ConfigError, match="nothing to fit"):
        fit_software(run, lambda software: replay(run, software), range(10))
