"""Draws follow the analytic distribution, and depend on nothing but their own row."""

import math

import numpy as np
import pytest
import torch

from twostroke.worker.sampler_draw import draw, pick, uniforms

DRAWS = 20_000
VOCAB = 50


def analytic(logits: np.ndarray, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> np.ndarray:
    """Probabilities by the textbook, one token at a time."""
    x = logits.astype(np.float64) / temperature
    p = np.exp(x - x.max())
    p[p < min_p] = 0
    order = np.argsort(-p, kind="stable")
    if top_k:
        p[order[top_k:]] = 0
    p /= p.sum()
    before = 0.0
    for token in order:
        if before >= top_p:
            p[token] = 0
        before += p[token]
    return p / p.sum()


def draw_many(logits: np.ndarray, seed: int, count: int = DRAWS, **params: float) -> np.ndarray:
    """Tokens at output positions 0, 1, ... of one request."""
    columns = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | params
    rows = torch.from_numpy(np.tile(logits.astype(np.float32), (count, 1)))
    return draw(
        rows,
        temperature=np.full(count, columns["temperature"], np.float64),
        top_k=np.full(count, columns["top_k"], np.int32),
        top_p=np.full(count, columns["top_p"], np.float64),
        min_p=np.full(count, columns["min_p"], np.float64),
        uniform=uniforms(np.full(count, seed, np.uint64), np.arange(count)),
    ).numpy()


def chi_square_is_plausible(counts: np.ndarray, p: np.ndarray) -> bool:
    """Below the 1 - 1e-6 quantile of chi-square, by Wilson and Hilferty's approximation."""
    expected = counts.sum() * p
    used = expected >= 5
    observed = np.append(counts[used], counts[~used].sum())
    expected = np.append(expected[used], expected[~used].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    statistic = ((observed - expected) ** 2 / expected).sum()
    k = max(1, len(expected) - 1)
    return statistic < k * (1 - 2 / (9 * k) + 4.75 * math.sqrt(2 / (9 * k))) ** 3


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0, "min_p": 0.1},
        {"top_k": 5},
        {"top_k": 1},
        {"top_p": 0.7},
        {"top_p": 1e-9},
        {"min_p": 0.3},
        {"top_k": 20, "top_p": 0.8, "temperature": 1.3, "min_p": 0.02},
        {"top_k": 1000},
    ],
)
def test_draws_follow_the_distribution(params: dict[str, float]):
    logits = np.random.default_rng(0).normal(0, 2, VOCAB)
    logits[7] = -np.inf
    counts = np.bincount(draw_many(logits, seed=11, **params), minlength=VOCAB)
    p = analytic(logits, **params)
    assert counts[p == 0].sum() == 0
    assert chi_square_is_plausible(counts, p)


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 0.3), (0, 0.9), (0, 0.999), (2000, 0.4)])
def test_a_flat_large_vocabulary_is_looked_at_as_a_whole(top_k: int, top_p: float):
    """Here 64 candidates do not hold what top-k and top-p keep."""
    logits = np.random.default_rng(1).normal(0, 0.1, 5000)
    tokens = draw_many(logits, seed=3, count=400, top_k=top_k, top_p=top_p)
    p = analytic(logits, top_k=top_k, top_p=top_p)
    assert (p[tokens] > 0).all()
    assert len(set(tokens.tolist())) > 200


def sorted_draw(logits: np.ndarray, top_k: int, top_p: float, uniform: float) -> int:
    """What sorting the whole row gives."""
    order = np.argsort(-logits, kind="stable")
    weights = np.exp(logits[order].astype(np.float64))
    weights[top_k:] = 0
    before = np.cumsum(weights) - weights
    weights[1:][before[1:] >= top_p * weights.sum()] = 0
    cumulative = np.cumsum(weights)
    return int(order[np.searchsorted(cumulative, uniform * cumulative[-1], "right")])


@pytest.mark.parametrize("shape", ["flat", "steep", "equal", "ties", "few finite"])
def test_ranks_and_masses_are_those_of_the_sorted_row(shape: str):
    rng = np.random.default_rng(5)
    vocab, rows = 3000, 60
    spread = {"flat": 0.1, "steep": 30.0, "equal": 0.0, "ties": 1.0, "few finite": 1.0}[shape]
    logits = rng.normal(0, spread, (rows, vocab)).astype(np.float32)
    if shape == "ties":
        logits = np.round(logits * 2) / 2
    if shape == "few finite":
        logits[:, rng.permutation(vocab)[:2800]] = -np.inf
    logits -= logits.max(-1, keepdims=True)
    top_k = rng.choice([65, 200, 2999], rows).astype(np.int32)  # more than 64: all of the row
    top_p = rng.choice([1.0, 0.999, 0.5, 1e-9], rows)
    uniform = rng.random(rows)
    uniform[:2] = 0.0, 1 - 2**-53
    tokens = draw(
        torch.from_numpy(logits.copy()),
        temperature=np.ones(rows),
        top_k=top_k,
        top_p=top_p,
        min_p=np.zeros(rows),
        uniform=uniform,
    )
    expected = [sorted_draw(*row) for row in zip(logits, top_k, top_p, uniform, strict=True)]
    same = tokens.numpy() == expected
    # Sums are rounded differently, so a number next to an edge may fall on its other side.
    assert same.sum() >= rows - 1
    assert np.isfinite(logits[np.arange(rows), tokens]).all()


def test_a_row_draws_the_same_token_in_any_company():
    rng = np.random.default_rng(2)
    count, vocab = 24, 3000
    logits = rng.normal(0, 3, (count, vocab)).astype(np.float32)
    columns = {
        "temperature": rng.choice([0.3, 1.0, 5.0], count),
        "top_k": rng.choice([0, 3, 64, 65, 900, 2000], count).astype(np.int32),
        "top_p": rng.choice([1.0, 0.9, 0.2], count),
        "min_p": rng.choice([0.0, 0.05], count),
        "uniform": uniforms(np.arange(count).astype(np.uint64), np.arange(count)),
    }
    together = draw(torch.from_numpy(logits.copy()), **columns)
    for subset in (np.arange(7), np.arange(5, 24)[::-1], *np.arange(count)[:, None]):
        some = draw(torch.from_numpy(logits[subset]), **{k: v[subset] for k, v in columns.items()})
        assert some.tolist() == together[torch.from_numpy(subset.copy())].tolist()


def test_a_weight_of_zero_is_never_picked():
    weights = torch.tensor([[0.0, 1.0, 0.0, 2.0, 0.0, 0.0]]).expand(5, -1)
    edges = torch.tensor([0.0, 1 / 3, np.nextafter(1 / 3, 0), 1 - 2**-53, 0.5], dtype=torch.float64)
    assert pick(weights, edges).tolist() == [1, 3, 1, 3, 3]


@pytest.mark.parametrize("length", [1025, 2048, 3000])
def test_long_rows_are_drawn_in_two_steps(length: int):
    rng = np.random.default_rng(4)
    weights = rng.exponential(1, length) * (rng.random(length) < 0.02)
    weights[256:1024] = 0
    uniform = torch.from_numpy(uniforms(np.full(DRAWS, 8, np.uint64), np.arange(DRAWS)))
    uniform[:3] = torch.tensor([0.0, 1 - 2**-53, np.nextafter(0.5, 1)])
    picked = pick(torch.from_numpy(weights).float().expand(DRAWS, -1), uniform)
    counts = np.bincount(picked.numpy(), minlength=length)
    assert counts[weights == 0].sum() == 0
    assert picked[0] == np.flatnonzero(weights)[0]
    assert picked[1] == np.flatnonzero(weights)[-1]
    assert chi_square_is_plausible(counts, weights / weights.sum())


def test_uniforms_are_uniform_and_independent():
    seeds, positions = np.meshgrid(np.arange(200).astype(np.uint64), np.arange(200))
    u = uniforms(seeds.ravel(), positions.ravel())
    assert u.min() >= 0
    assert u.max() < 1
    assert len(np.unique(u)) == u.size
    assert chi_square_is_plausible(np.histogram(u, 64, (0, 1))[0], np.full(64, 1 / 64))
    grid = u.reshape(200, 200)
    for a, b in (
        (grid[1:], grid[:-1]),
        (grid[:, 1:], grid[:, :-1]),
        (grid[1:, 1:], grid[:-1, :-1]),
    ):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 5 / math.sqrt(a.size)


def test_extreme_temperatures_stay_finite():
    logits = np.array([3e38, 1.0, -3e38, 0.0])
    assert set(draw_many(logits, 0, 50, temperature=1e-5).tolist()) == {0}
    assert set(draw_many(np.zeros(4), 0, 200, temperature=1e30).tolist()) == {0, 1, 2, 3}
