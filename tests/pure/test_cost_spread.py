"""Ratios of measured to predicted steps: kept in order, read on from where a seed decides."""

import numpy as np
import pytest

from twostroke.cost_spread import LEAST_RATIOS, MOST_RATIOS, RUN, SpreadReader, StepSpread
from twostroke.errors import ConfigError


def test_ratios_are_kept_by_size_and_in_order() -> None:
    tokens = [1, 100] * 40
    ratios = [value for i in range(40) for value in (1 + i / 100, 2 - i / 100)]
    spread = StepSpread.of(tokens, ratios)
    kept = dict(zip(spread.most_tokens, spread.ratios, strict=True))
    assert kept[1].tolist() == pytest.approx([1 + i / 100 for i in range(40)])
    assert kept[256].tolist() == pytest.approx([2 - i / 100 for i in range(40)])
    assert all(not len(series) for most, series in kept.items() if most not in (1, 256))


def test_few_ratios_say_nothing() -> None:
    spread = StepSpread.of([1] * (LEAST_RATIOS - 1), [2.0] * (LEAST_RATIOS - 1))
    assert SpreadReader(spread, 0).ratio(5, 1) == 1.0


def test_of_many_ratios_runs_are_kept() -> None:
    """From begin to end, and each as it was: late steps come in runs."""
    count = 10 * MOST_RATIOS
    spread = StepSpread.of([1] * count, np.arange(1, count + 1) / 100)
    (series,) = (it for it in spread.ratios if len(it))
    assert len(series) == MOST_RATIOS
    assert series[0] == pytest.approx(0.01)
    assert series[-1] == pytest.approx(count / 100)
    steps = np.diff(series.reshape(-1, RUN), axis=1).ravel()
    assert steps.tolist() == pytest.approx([0.01] * len(steps))


def test_steps_one_by_one_and_many_at_once_are_as_late() -> None:
    draw = np.random.default_rng(1)
    spread = StepSpread.of([1] * 50 + [8] * 70, draw.uniform(0.8, 2.0, 120))
    reader = SpreadReader(spread, 0)
    for tokens in (1, 8, 1000):
        each = [reader.ratio(number, tokens) for number in range(30, 130)]
        assert reader.ratios(30, 100, tokens).tolist() == each


def test_seeds_and_engines_begin_at_other_places() -> None:
    spread = StepSpread.of([1] * 100, np.arange(1, 101) / 100)
    other = StepSpread(most_tokens=spread.most_tokens, percents=spread.percents, seed=1)
    read = [
        SpreadReader(it, engine).ratios(0, 100, 1).tolist()
        for it, engine in ((spread, 0), (spread, 1), (other, 0))
    ]
    assert read[0] == SpreadReader(spread, 0).ratios(0, 100, 1).tolist()
    assert len({tuple(it) for it in read}) == 3
    assert sorted(read[0]) == sorted(read[1]) == sorted(read[2])


@pytest.mark.parametrize(
    ("most_tokens", "percents", "problem"),
    [
        ((1, 2), ("100",), "as many"),
        ((2, 1), ("100", "100"), "sort"),
        ((1,), ("100 0",), "over 0"),
        ((1,), ("100 1.5",), "whole percents"),
        ((1,), ("a",), "whole percents"),
    ],
)
def test_what_is_no_spread_is_refused(
    most_tokens: tuple[int, ...], percents: tuple[str, ...], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        StepSpread(most_tokens=most_tokens, percents=percents)
