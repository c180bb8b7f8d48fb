"""Fits find what samples were made of, predict unseen steps, and survive what measuring does."""

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twostroke.cost import LinearStepCost, LinkCost, Regime, StepWork
from twostroke.cost_fit import (
    FitError,
    LearnedStepCost,
    OnlineFit,
    fit_link_cost,
    fit_step_cost,
    non_negative_least_squares,
)
from twostroke.messages import StepSample

TRUTH = LinearStepCost(
    base_s=4e-3, token_s=2e-5, row_s=3e-5, sampled_s=5e-5, context_s=1e-7, attended_s=2e-9
)


def samples_of(cost: LinearStepCost, count: int, seed: int, noise: float = 0.0) -> list[StepSample]:
    """Mixed steps: decodes of several contexts, with a chunk of a prompt in half of them."""
    draw = random.Random(seed)
    made = []
    for _ in range(count):
        rows, context = draw.randrange(0, 64), draw.randrange(1, 8192)
        chunk = draw.choice([0, 0, 16, 128, 512, 2048])
        before = draw.choice([0, 1024, 4096])
        if rows + chunk == 0:
            rows = 1
        work = StepWork(
            rows + chunk,
            rows + (chunk > 0),
            rows + (chunk > 0) * draw.randrange(2),
            rows * context + (chunk > 0) * before,
            round(rows * (context + 0.5) + chunk * (before + chunk / 2)),
        )
        seconds = cost.step_s(work) * max(0.1, draw.gauss(1, noise))
        made.append(StepSample(*map(int, work), seconds))
    return made


def predicted(cost: LinearStepCost, samples: list[StepSample]) -> list[float]:
    return [
        cost.step_s(
            StepWork(s.num_tokens, s.num_rows, s.num_sampled, s.context_tokens, s.attended_tokens)
        )
        for s in samples
    ]


def errors_on(cost: LinearStepCost, samples: list[StepSample]) -> FitError:
    return FitError.of(predicted(cost, samples), [s.seconds for s in samples])


@given(
    st.lists(st.lists(st.floats(0, 1), min_size=3, max_size=3), min_size=4, max_size=12),
    st.lists(st.floats(-1, 1), min_size=12, max_size=12),
)
def test_non_negative_least_squares_meets_its_conditions(
    rows: list[list[float]], right: list[float]
) -> None:
    """Kuhn and Tucker: x >= 0, no descent direction left, and none where x > 0."""
    a, b = np.array(rows), np.array(right[: len(rows)])
    gram, moment = a.T @ a, a.T @ b
    x = non_negative_least_squares(gram, moment)
    gradient = moment - gram @ x
    scale = np.sqrt(np.diag(gram)).max(initial=1e-3) * (1 + np.abs(b).sum())
    assert (x >= 0).all()
    assert (gradient <= 1e-6 * scale).all()
    assert np.abs(gradient * x).max() <= 1e-5 * scale * (1 + x.max())


def test_a_fit_finds_the_cost_that_made_the_samples() -> None:
    cost, error = fit_step_cost(samples_of(TRUTH, 400, seed=1))
    assert error.p90 < 1e-4
    assert errors_on(cost, samples_of(TRUTH, 200, seed=2)).p90 < 1e-3


def test_a_knee_is_found_and_none_is_invented() -> None:
    bent = LinearStepCost(base_s=5e-3, context_s=1e-8, regimes=(Regime(256.0, 0.0, 4e-5),))
    cost, _ = fit_step_cost(samples_of(bent, 400, seed=1, noise=0.02))
    (found,) = cost.regimes
    assert 191 <= found.beyond < 512, "no step was of a size between"
    assert errors_on(cost, samples_of(bent, 200, seed=2)).p90 < 0.03
    straight, _ = fit_step_cost(samples_of(TRUTH, 400, seed=1, noise=0.05))
    assert straight.regimes == ()


def decodes_of(cost: LinearStepCost, count: int, seed: int, noise: float) -> list[StepSample]:
    """Decodes of 1 to 128 requests, small batches as often as large ones."""
    draw = random.Random(seed)
    made = []
    for _ in range(count):
        rows = round(2 ** draw.uniform(0, 7))
        context = rows * draw.randrange(1, 512)
        work = StepWork(rows, rows, rows, context, context + rows / 2)
        made.append(StepSample(*map(int, work), cost.step_s(work) * draw.gauss(1, noise)))
    return made


def test_regimes_with_jumps_are_found() -> None:
    """Other kernels up to 4 tokens, and others beyond 64, whose tokens are cheaper than before."""
    regimes = Regime(4.0, 4e-3, 2e-4), Regime(64.0, 6e-3, 5e-5)
    kernels = LinearStepCost(base_s=5e-3, token_s=1e-3, context_s=1e-8, regimes=regimes)
    cost, error = fit_step_cost(decodes_of(kernels, 600, seed=1, noise=0.03))
    assert {4.0, 64.0} <= {it.beyond for it in cost.regimes}
    assert error.median < 0.03
    assert errors_on(cost, decodes_of(kernels, 200, seed=2, noise=0.0)).p90 < 0.03


def test_context_that_costs_one_or_two_rows_more() -> None:
    regimes = (Regime(2.0, 4e-3, 2e-4),)
    kernels = LinearStepCost(
        base_s=5e-3, token_s=5e-4, context_s=1e-6, few_context_s=4e-6, regimes=regimes
    )
    cost, _ = fit_step_cost(decodes_of(kernels, 600, seed=1, noise=0.03))
    assert cost.regimes[0].beyond == 2.0
    assert cost.few_context_s == pytest.approx(4e-6, rel=0.2)
    assert errors_on(cost, decodes_of(kernels, 200, seed=2, noise=0.0)).p90 < 0.03


def test_late_transfers_do_not_move_the_median_one() -> None:
    """Every third waits for a processor: as long again as it takes, or longer."""
    link = LinkCost(base_s=2e-4, bytes_per_s=1.2e9)
    draw = random.Random(1)
    sizes = [draw.randrange(1 << 18, 1 << 25) for _ in range(90)]
    seconds = [link.transfer_s(1, size) for size in sizes]
    late = [taken * draw.uniform(2, 8) if i % 3 == 0 else taken for i, taken in enumerate(seconds)]
    cost, error = fit_link_cost([1.0] * 90, sizes, late)
    assert [cost.transfer_s(1, size) for size in sizes] == pytest.approx(seconds, rel=0.03)
    assert error.median < 0.02


def test_online_bends_where_kernels_change() -> None:
    regimes = Regime(4.0, 4e-3, 2e-4), Regime(64.0, 6e-3, 5e-5)
    kernels = LinearStepCost(base_s=5e-3, token_s=1e-3, context_s=1e-8, regimes=regimes)
    online = OnlineFit()
    for sample in decodes_of(kernels, 1000, seed=1, noise=0.03):
        online.add(sample)
    cost = online.cost()
    assert cost is not None
    assert errors_on(cost, decodes_of(kernels, 200, seed=2, noise=0.0)).p90 < 0.1


def test_noise_gives_no_bias_and_pauses_hardly_any() -> None:
    samples = samples_of(TRUTH, 600, seed=3, noise=0.1)
    for i in range(0, 600, 40):
        samples[i].seconds *= 30  # the machine did something else
    cost, _ = fit_step_cost(samples)
    assert abs(errors_on(cost, samples_of(TRUTH, 300, seed=4)).bias) < 0.03


def test_samples_of_one_kind_still_predict_that_kind() -> None:
    """Decodes of one batch size cannot tell base, rows and tokens apart."""
    samples = [StepSample(8, 8, 8, 8 * c, 8 * c + 4, 5e-3 + 8 * c * 1e-7) for c in range(500)]
    cost, error = fit_step_cost(samples)
    assert error.p90 < 1e-3
    assert cost.step_s(StepWork(8, 8, 8, 80_000, 80_004)) == pytest.approx(13e-3, rel=0.01)


def test_a_fit_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no step"):
        fit_step_cost([StepSample(0, 0, 0, 0, 0, 1.0), StepSample(1, 1, 1, 0, 0, 0.0)])


def test_online_trusts_itself_once_it_predicts() -> None:
    online = OnlineFit()
    samples = samples_of(TRUTH, 600, seed=5, noise=0.05)
    for sample in samples[:40]:
        online.add(sample)
    assert online.cost() is None  # too few
    for sample in samples[40:]:
        online.add(sample)
    cost = online.cost()
    assert cost is not None
    assert errors_on(cost, samples_of(TRUTH, 200, seed=6)).median < 0.05


def test_a_learned_cost_knows_no_end_before_it_knows() -> None:
    learned = LearnedStepCost()
    samples = samples_of(TRUTH, 600, seed=5)
    work = StepWork(1, 1, 1, 500, 500)
    assert learned.step_s(work) == math.inf
    for sample in samples:
        learned.add(sample)
    assert learned.step_s(work) == pytest.approx(TRUTH.step_s(work), rel=0.1)


def test_online_does_not_trust_what_it_cannot_predict() -> None:
    online, draw = OnlineFit(), random.Random(0)
    for _ in range(500):
        online.add(StepSample(8, 8, 8, 800, 804, draw.choice([1e-3, 1e-1])))
    assert online.error is not None
    assert online.error > 0.25
    assert online.cost() is None


def test_online_forgets() -> None:
    """The device becomes twice as slow; after some half-lives the old times are gone."""
    online = OnlineFit(half_life_samples=200)
    slow = LinearStepCost(**{name: 2 * getattr(TRUTH, name) for name in COEFFICIENTS})
    for sample in samples_of(TRUTH, 1000, seed=7) + samples_of(slow, 1500, seed=8):
        online.add(sample)
    cost = online.cost()
    assert cost is not None
    assert errors_on(cost, samples_of(slow, 200, seed=9)).median < 0.1


COEFFICIENTS = ("base_s", "token_s", "row_s", "sampled_s", "context_s", "attended_s")


@settings(max_examples=50)
@given(st.floats(0, 1e-3), st.floats(0, 1e-5), st.floats(1e8, 1e11), st.booleans())
def test_a_link_fit_predicts_its_transfers(
    base_s: float, message_s: float, rate: float, pipelined: bool
) -> None:
    link = LinkCost(base_s=base_s, message_s=message_s, bytes_per_s=rate, pipelined=pipelined)
    cases = [(n, n * size) for n in (1, 10, 100, 1000) for size in (4096, 65536, 1 << 20)]
    seconds = [link.transfer_s(*case) for case in cases]
    messages, moved = zip(*cases, strict=True)
    _, error = fit_link_cost(messages, moved, seconds)
    assert error.median < 0.02
    assert error.p90 < 0.15


def test_link_fits_refuse_what_says_nothing() -> None:
    with pytest.raises(ValueError, match="no transfer"):
        fit_link_cost([1], [0], [1.0])
    with pytest.raises(ValueError, match="grow"):
        fit_link_cost([1, 1], [100, 200], [2.0, 1.0])


def test_clean_points_are_fitted_to_their_worst() -> None:
    """Between the robust fit, which lets one size go, and the least worst error lies some."""
    sizes = [2.0**i for i in range(12, 24)]
    wobble = [1.05, 0.95] * 6
    seconds = [(1e-4 + size / 1e9) * factor for size, factor in zip(sizes, wobble, strict=True)]
    cost, _ = fit_link_cost([0.0] * 12, sizes, seconds, clean=True)
    worst = max(
        abs(cost.transfer_s(0, round(size)) / measured - 1)
        for size, measured in zip(sizes, seconds, strict=True)
    )
    assert worst == pytest.approx(0.05, abs=0.002)
