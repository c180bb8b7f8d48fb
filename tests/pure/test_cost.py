"""What steps and transfers cost: work of plans, scalar and vectorised costs, curves, refusals."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostroke.cost import (
    CHANGE_FADES,
    BandwidthCurve,
    HostCost,
    LinearStepCost,
    LinkCost,
    Regime,
    StepColumns,
    StepWork,
)
from twostroke.errors import ConfigError

shares = st.floats(0, 1e-2)
costs = st.builds(
    LinearStepCost,
    base_s=shares,
    token_s=shares,
    row_s=shares,
    sampled_s=shares,
    context_s=shares,
    attended_s=shares,
    few_context_s=shares,
    regimes=st.lists(
        st.builds(Regime, st.floats(0, 4096), shares, shares),
        max_size=3,
        unique_by=lambda it: it.beyond,
    ).map(lambda regimes: tuple(sorted(regimes, key=lambda it: it.beyond))),
)


def test_work_of_a_plan() -> None:
    """A prompt's chunk of 100 after 50, and two decodes."""
    work = StepWork.of_rows(np.array([50, 7, 9], np.int32), np.array([100, 1, 1], np.int32), 2)
    assert work == (102, 3, 2, 66, 100 * (50 + 50) + 7.5 + 9.5)


def test_work_of_a_huge_plan_does_not_overflow() -> None:
    work = StepWork.of_rows(np.array([2**20], np.int32), np.array([2**17], np.int32), 1)
    assert work.attended_tokens == 2**17 * (2**20 + 2**16)


@given(costs, st.integers(1, 300), st.integers(0, 10**7), st.integers(1, 50))
def test_many_steps_cost_what_each_costs(
    cost: LinearStepCost, rows: int, context: int, steps: int
) -> None:
    """To the last bit: the twin advances by either."""
    works = StepColumns.of_decodes(rows, context, steps)
    each = []
    for step in range(steps):
        before = context + step * rows
        each.append(cost.step_s(StepWork(rows, rows, rows, before, before + rows / 2)))
    assert cost.step_s_many(works).tolist() == each


def test_regimes_by_hand() -> None:
    """Up to four tokens other kernels run; from 64 on each token is free."""
    cost = LinearStepCost(base_s=1.0, token_s=0.5, regimes=(Regime(4, 2.0, 0.25), Regime(64, 0, 0)))
    seconds = [cost.step_s(StepWork(tokens, 0, 0, 0, 0)) for tokens in (0, 1, 4, 5, 64, 1000)]
    assert seconds == [1.0, 1.5, 3.0, 5.25, 20.0, 20.0]


def test_context_of_few_tokens_by_hand() -> None:
    regimes = (Regime(2, 0.0, 0.0), Regime(64, 0.0, 0.0))
    cost = LinearStepCost(base_s=1.0, context_s=0.25, few_context_s=0.5, regimes=regimes)
    assert [cost.step_s(StepWork(n, n, n, 4, 4)) for n in (1, 2, 3, 100)] == [4.0, 4.0, 2.0, 2.0]


@given(costs, st.floats(0, 5000), st.floats(0, 100))
def test_more_tokens_never_cost_less(cost: LinearStepCost, tokens: float, more: float) -> None:
    few, many = (cost.step_s(StepWork(n, 1, 1, 0, 0)) for n in (tokens, tokens + more))
    assert many >= few * (1 - 1e-12)


@pytest.mark.parametrize("bad", [-1e-9, math.nan, math.inf])
def test_costs_refuse_what_is_no_time(bad: float) -> None:
    with pytest.raises(ConfigError):
        LinearStepCost(base_s=0.0, token_s=bad)
    with pytest.raises(ConfigError):
        LinearStepCost(base_s=0.0, regimes=(Regime(8, bad, 0.0),))
    with pytest.raises(ConfigError):
        HostCost(gap_s=bad)
    with pytest.raises(ConfigError):
        LinkCost(bytes_per_s=bad)


def test_regimes_come_in_order() -> None:
    with pytest.raises(ConfigError, match="sort"):
        LinearStepCost(base_s=0.0, regimes=(Regime(64, 0.0, 0.0), Regime(4, 0.0, 0.0)))


def test_a_row_that_joins_decodes() -> None:
    before, chunk = StepWork(2, 2, 2, 100, 101.0), StepWork(9, 2, 2, 100, 200.0)
    assert StepWork(3, 3, 3, 150, 151.5).joins_decodes(before)
    assert StepWork(2, 2, 2, 300, 301.0).joins_decodes(before)  # one has ended, too
    assert not StepWork(2, 2, 2, 102, 103.0).joins_decodes(before)
    assert not StepWork(1, 1, 1, 50, 50.5).joins_decodes(before)  # one has ended
    assert not chunk.joins_decodes(before)
    assert not StepWork(3, 3, 3, 150, 151.5).joins_decodes(chunk)


def test_a_step_that_only_decodes_on() -> None:
    decodes = StepWork(3, 3, 3, 100, 101.5)
    assert StepWork(3, 3, 3, 103, 104.5).decodes_on(decodes)
    others = StepWork(3, 3, 3, 90, 91.5), StepWork(2, 2, 2, 102, 103), StepWork(4, 4, 4, 103, 105)
    assert not any(other.decodes_on(decodes) for other in others)
    chunk = StepWork(64, 3, 3, 100, 9000.0)
    assert not chunk.decodes_on(decodes)
    assert not StepWork(3, 3, 3, 164, 165.5).decodes_on(chunk)
    verified = StepWork(9, 3, 3, 100, 913.5)
    assert all(StepWork(9, 3, 3, 100 + n, 1000.0).decodes_on(verified) for n in (3, 5, 9))
    assert not StepWork(9, 3, 3, 110, 1000.0).decodes_on(verified)
    assert StepColumns.of_decodes(3, 100, 2).work(1) == StepWork(3, 3, 3, 103, 104.5)


def test_a_step_after_a_pause_is_longer_by_a_share_at_most() -> None:
    host = HostCost(cold_s=0.01)
    assert host.after_pause_s(0.05, 1.0) == 0.0
    assert host.after_pause_s(1.0, 1.0) == 0.01
    assert host.after_pause_s(1.0, 0.02) == pytest.approx(0.005)


def test_changes_fade_and_add_up() -> None:
    host = HostCost(changed_s=0.01)
    level = total = 0.0
    for step in range(4000):
        level = level * CHANGE_FADES + (step % 4 == 0)
        total += host.changed_s * level
    assert host.changes_s(0.25) == pytest.approx(total / 4000, rel=1e-3)


def test_links() -> None:
    summed = LinkCost(base_s=1.0, message_s=0.5, bytes_per_s=100)
    assert summed.transfer_s(2, 300) == 5.0
    piped = LinkCost(base_s=1.0, message_s=0.5, bytes_per_s=100, pipelined=True)
    assert piped.transfer_s(2, 300) == 4.0
    assert piped.transfer_s(20, 300) == 11.0


def test_a_curve_by_hand() -> None:
    curve = BandwidthCurve((0.0, 2.0, 3.0), (10.0, 0.0, 5.0))
    assert [curve.rate_at(t) for t in (-1, 0, 1.9, 2, 2.5, 3, 100)] == [10, 10, 10, 0, 0, 5, 5]
    assert curve.moved_bytes(1, 5) == 20
    assert curve.end_s(1, 10) == 2.0
    assert curve.end_s(1, 15) == 4.0
    assert curve.end_s(2.5, 0) == 2.5
    assert BandwidthCurve((0.0,), (0.0,)).end_s(0, 1) == math.inf
    assert BandwidthCurve((0.0,), (4.0,)).end_s(3, 8) == 5.0


def test_a_curve_with_a_period_by_hand() -> None:
    curve = BandwidthCurve((0.0, 1.0), (10.0, 0.0), period_s=2.0)
    assert curve.moved_bytes(0, 20) == 100
    assert curve.end_s(0, 10) == 1.0
    assert curve.end_s(0, 15) == 2.5
    assert curve.end_s(1.5, 10) == 3.0
    assert curve.rate_at(6.5) == 10
    assert BandwidthCurve((0.0,), (0.0,), 1.0).end_s(0, 1) == math.inf


@st.composite
def curves(draw: st.DrawFn) -> BandwidthCurve:
    spans = draw(st.lists(st.floats(0.01, 10), min_size=1, max_size=5))
    rates = draw(st.lists(st.floats(1, 1e3) | st.just(0.0), min_size=len(spans), max_size=5))
    rates = (rates * 5)[: len(spans)]
    times = tuple(float(t) for t in np.cumsum([0.0, *spans[:-1]]))
    period = times[-1] + spans[-1] if draw(st.booleans()) else None
    return BandwidthCurve(times, tuple(rates), period)


@given(curves(), st.floats(0, 50), st.floats(0.1, 1e4))
def test_a_transfer_ends_when_its_bytes_have_moved(
    curve: BandwidthCurve, start_s: float, num_bytes: float
) -> None:
    end_s = curve.end_s(start_s, num_bytes)
    assert end_s >= start_s
    if end_s == math.inf:
        assert max(curve.bytes_per_s) == 0 or curve.bytes_per_s[-1] == 0
    else:
        assert curve.moved_bytes(start_s, end_s) == pytest.approx(num_bytes, rel=1e-6, abs=1e-6)


def test_a_curve_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "link.csv"
    path.write_text("time_s,bytes_per_s\n0,25e9  # idle\n\n1.5,5e9\n")
    assert BandwidthCurve.from_file(path) == BandwidthCurve((0.0, 1.5), (25e9, 5e9))


@pytest.mark.parametrize(
    "text",
    ["", "a,b\n", "0,1\nx,2\n", "0,1,2\n", "0,1\n0,2\n", "0,-1\n", "0,nan\n", "1,1\n0,1\n", "\xff"],
)
def test_a_file_that_is_no_curve(tmp_path: Path, text: str) -> None:
    path = tmp_path / "link.csv"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError):
        BandwidthCurve.from_file(path)


def test_curves_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="period"):
        BandwidthCurve((0.0, 2.0), (1.0, 1.0), 1.0)
    with pytest.raises(ConfigError, match="as many"):
        BandwidthCurve((), ())
