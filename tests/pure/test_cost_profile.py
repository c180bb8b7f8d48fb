"""Profiles survive the way to a file and back; files that are none are refused with the reason."""

from pathlib import Path

import pytest

from twostroke.config import EngineConfig
from twostroke.cost import HostCost, LinearStepCost, LinkCost, Regime
from twostroke.cost_fit import FitError
from twostroke.cost_profile import Profile, default_path, profiled_step_cost
from twostroke.errors import ConfigError

PROFILE = Profile(
    model="tiny",
    device="this CPU",
    step=LinearStepCost(base_s=1e-3, token_s=1e-5, regimes=(Regime(64.0, 1e-3, 2e-5),)),
    step_error=FitError(100, 0.03, 0.09, -0.01),
    host=HostCost(gap_s=1e-4, beside_s=1e-3),
    link=LinkCost(base_s=1e-4, bytes_per_s=1e9),
    link_error=FitError(10, 0.01, 0.02, 0.0),
    settings={"threads": "2"},
)


def test_there_and_back(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "profile.json"
    PROFILE.save(path)
    assert Profile.load(path) == PROFILE


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ('"base_s": 0.001', '"base_s": -1.0', "base|step cost"),
        ('"base_s": 0.001', '"base_s": "x"', "base_s"),
        ('"version": 3', '"version": 7', "version 7"),
        ('"bytes_per_s": 1000000000.0', '"bytes_per_s": 0.0', "rate"),
        ('"model"', '"modle"', "model"),
        ("{", "", "not a profile"),
    ],
)
def test_files_that_are_no_profile(tmp_path: Path, old: str, new: str, problem: str) -> None:
    path = tmp_path / "profile.json"
    PROFILE.save(path)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ConfigError, match=problem):
        Profile.load(path)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="twostroke profile"):
        Profile.load(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="cannot write"):
        PROFILE.save(Path("/proc/none/profile.json"))


def test_the_default_path_names_model_and_device() -> None:
    path = default_path("org/Model 1.5", "AMD EPYC (2 cores)")
    assert path.name == "org-Model-1.5--AMD-EPYC-2-cores.json"


def test_steps_are_as_the_profile_says_where_cost_decides(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    PROFILE.save(path)
    assert profiled_step_cost(EngineConfig()) is None
    assert profiled_step_cost(EngineConfig(profile=str(path))) == PROFILE.step
    assert profiled_step_cost(EngineConfig(profile=str(path), pd_policy="always")) is None
    with pytest.raises(ConfigError, match="size 1, and this is 2"):
        profiled_step_cost(EngineConfig(profile=str(path), tensor_parallel_size=2))
    with pytest.raises(ConfigError, match="cannot read"):
        profiled_step_cost(EngineConfig(profile=str(tmp_path / "none")))
