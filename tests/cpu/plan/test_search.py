"""Closed forms against the twin, and the search that uses both."""

import importlib.util
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from twostroke.errors import ConfigError
from twostroke.plan.check import check, run_at
from twostroke.plan.question import Question, ask
from twostroke.plan.search import Plan, search

ROOT = Path(__file__).parents[3]
TOLERANCE = 0.08  # of a subset with few requests; the benchmark's 100 cases have more


def load_benchmark() -> ModuleType:
    path = ROOT / "benchmarks" / "closed_forms_vs_twin.py"
    spec = importlib.util.spec_from_file_location("closed_forms_vs_twin", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


GRID = load_benchmark()
CASES = list(GRID.cases())


def test_the_grid_has_a_hundred_cases() -> None:
    assert len(CASES) == 104


@pytest.mark.parametrize("index", [1, 2, 9, 34, 56, 78])
def test_closed_forms_agree_with_the_twin(index: int) -> None:
    case = CASES[index]
    analysis, result = case.predict(), GRID.run(case, seed=7)
    compared = 0
    for figure, measured in GRID.figures(case, analysis, result).values():
        if figure.applies:
            compared += 1
            assert figure.value == pytest.approx(measured, rel=TOLERANCE)
    assert compared


@pytest.fixture(scope="module")
def question() -> Question:
    return ask(
        "llama-3.1-8b", "H100", "poisson:6/s,in=1024,out=64,n=60", "ttft=1s,tpot=50ms", gpus=4
    )


@pytest.fixture(scope="module")
def told() -> list[tuple[str, float]]:
    """What the bar of `plan` was told."""
    return []


@pytest.fixture(scope="module")
def plan(question: Question, told: list[tuple[str, float]]) -> Plan:
    return search(question, checks=2, progress=lambda *what: told.append(what))


def test_the_best_layout_carries_the_load_on_few_gpus(plan: Plan) -> None:
    assert plan.carries_the_load
    assert plan.best.num_gpus <= 2
    assert plan.best.checked is not None
    assert plan.best.checked.is_attained
    assert plan.num_layouts >= 15
    low, high = plan.ratio_interval
    assert low <= plan.ratio <= high


def test_progress_goes_from_nothing_to_all(plan: Plan, told: list[tuple[str, float]]) -> None:
    shares = [share for _, share in told]
    assert shares == sorted(shares)
    assert shares[0] == 0.0
    assert shares[-1] == 1.0
    # Within a layout's run it moves too.
    assert len({share for label, share in told if label.startswith("twin, 1 of 2: ")}) > 20


def test_the_bar_moves_through_runs_at_lower_rates(question: Question, plan: Plan) -> None:
    shares: list[float] = []
    strict = replace(question, slo=replace(question.slo, ttft_s=1e-6))
    check(strict, plan.best.layout, 6.0, shares.append)
    assert shares == sorted(shares)
    assert 0.99 < shares[-1] < 1.0


def test_a_slow_layout_is_run_at_less_until_it_keeps_the_slo(
    question: Question, plan: Plan
) -> None:
    checked = run_at(question, plan.best.layout, 6.0)
    assert checked.failed == 0
    assert np.isfinite(checked.ttft_p99_s)
    assert checked.goodput_per_s <= 6.0


def test_a_bound_that_nothing_keeps_leaves_all_out() -> None:
    question = ask("llama-3.1-8b", "H100", "poisson:1/s,in=8192,out=8,n=5", "ttft=1ms", gpus=2)
    plan = search(question, checks=1)
    assert not plan.options
    assert all("TTFT" in item.reason for item in plan.unfit)


def test_a_model_that_fits_nowhere_is_named() -> None:
    question = ask("llama-3.1-405b", "L40S", "poisson:1/s,in=512,out=8,n=5", "", gpus=8)
    plan = search(question, checks=1)
    assert not plan.options
    assert "leave no room for KV" in plan.unfit[0].reason


def test_a_load_without_end_is_refused() -> None:
    with pytest.raises(ConfigError, match="rate"):
        ask("llama-3.1-8b", "H100", "poisson:0/s,in=1,out=1,n=1", "")
