"""Step and transfer costs from what was measured, by non-negative least squares.

    batch     `fit_step_cost(samples)`, `fit_link_cost(...)`: robust, with the error that is left
    online    `OnlineFit`: a few sums, old samples forgotten, for a router that learns as it runs

Residuals are relative: a step of 1 ms counts as much as one of 1 s. Negative shares would predict
nonsense beyond what was measured, so there are none.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from twostroke.arrays import Float64s
from twostroke.cost import LinearStepCost, LinkCost, Regime, StepColumns, StepWork
from twostroke.messages import StepSample


@dataclass(frozen=True)
class FitError:
    """How far a fit is from what was measured; shares, 0.05 is 5 %."""

    num_samples: int
    median: float  # of |predicted - measured| / measured
    p90: float
    bias: float  # of the sums: predicted / measured - 1

    @classmethod
    def of(
        cls, predicted: Sequence[float] | Float64s, measured: Sequence[float] | Float64s
    ) -> "FitError":
        """Compare, sample by sample; `measured` values are over 0."""
        pairs = np.asarray(predicted, np.float64), np.asarray(measured, np.float64)
        if not len(pairs[1]):
            return cls(0, 0.0, 0.0, 0.0)
        share = np.abs(pairs[0] - pairs[1]) / pairs[1]
        bias = float(pairs[0].sum() / pairs[1].sum()) - 1
        return cls(len(share), float(np.median(share)), float(np.percentile(share, 90)), bias)

    def __str__(self) -> str:
        return (
            f"median {self.median:.1%}, P90 {self.p90:.1%}, in sum {self.bias:+.1%} "
            f"({self.num_samples:,} samples)"
        )


def non_negative_least_squares(gram: Float64s, moment: Float64s) -> Float64s:
    """The x >= 0 that minimises x'Gx - 2m'x, for `gram` G = A'A and `moment` m = A'b.

    Lawson and Hanson's active sets (Solving Least Squares Problems, 1974, chapter 23) on the normal
    equations, with columns scaled to unit length first. Columns of zeros get 0.
    """
    size = len(moment)
    scale = np.sqrt(np.diag(gram))
    used = scale > 0
    scale[~used] = 1.0
    g, m = gram / np.outer(scale, scale), moment / scale
    x = np.zeros(size)
    free = np.zeros(size, np.bool_)
    tolerance = 1e-10 * max(1.0, float(np.abs(m).max(initial=0.0)))
    for _ in range(10 * size):
        gradient = np.where(used & ~free, m - g @ x, -np.inf)
        best = int(gradient.argmax())
        if gradient[best] <= tolerance:
            break
        free[best] = True
        while True:
            z = np.zeros(size)
            z[free] = np.linalg.lstsq(g[np.ix_(free, free)], m[free], rcond=1e-12)[0]
            low = free & (z <= 0)
            if not low.any():
                x = z
                break
            with np.errstate(divide="ignore", invalid="ignore"):
                steps = np.where(low, x / (x - z), np.inf)
            x = x + min(1.0, float(np.nanmin(steps))) * (z - x)
            free &= x > tolerance * 1e-3
            x[~free] = 0.0
            if not free.any():
                break
    return x / scale


# ---------------------------------------------------------------- steps

# Candidates for the number of tokens up to which one regime of a LinearStepCost holds: kernels
# change at powers of two or halfway, and where arithmetic gets dearer than reading weights a factor
# of 1.5 is close enough.
KNEES = tuple(float(n) for i in range(12) for n in (2**i, 3 * 2**i) if n != 2**11 * 3)
MOST_KNEES = 4
TIME_POWER = 0.5  # 0: short and long steps count alike, 1: each by its time
BALANCE = 0.25  # 0: all steps count alike, 1: all sizes of steps do
KNEE_GAIN = 0.02  # a knee must lower the squared error by this share, or it is noise
# What takes up to twice as long as predicted counts in full: other processes of the server, which
# are part of any load, make some steps late. What takes longer is a pause of the machine.
DELAY = 1.0

# The same for a fit that keeps sums only and so cannot try. Without jumps: between two of these
# that are close a slope will do.
ONLINE_KNEES = (4.0, 8.0, 32.0, 64.0, 96.0, 256.0, 2048.0)

LAWSON_ROUNDS = 60
MEDIAN_ROUNDS = 30

NUM_SHARES = 6  # columns of a LinearStepCost without its regimes


def shares_of(samples: Sequence[StepSample]) -> tuple[Float64s, Float64s]:
    """[samples, 6] what each step did, and [samples] its seconds.

    Samples without tokens or without a positive, finite time say nothing and are left out.
    """
    rows = [
        (
            1.0,
            s.num_tokens,
            s.num_rows,
            s.num_sampled,
            s.context_tokens,
            s.attended_tokens,
            s.seconds,
        )
        for s in samples
        if s.num_tokens > 0 and 0 < s.seconds < np.inf
    ]
    table = np.array(rows, np.float64).reshape(-1, NUM_SHARES + 1)
    return table[:, :NUM_SHARES], table[:, NUM_SHARES]


def work_of(sample: StepSample) -> StepWork:
    """What a measured step did."""
    return StepWork(
        sample.num_tokens,
        sample.num_rows,
        sample.num_sampled,
        sample.context_tokens,
        sample.attended_tokens,
    )


def fit_step_cost(samples: Sequence[StepSample]) -> tuple[LinearStepCost, FitError]:
    """The step cost that fits best, and how far it is off.

    Raises ValueError when no sample says anything.
    """
    shares, seconds = shares_of(samples)
    if not len(seconds):
        raise ValueError("no step was measured: a sample needs tokens and a time over 0")
    knees: list[float] = []
    tokens = shares[:, 1]
    counts = _counts_by_size(tokens)
    fitted, best = _fit_steps(shares, seconds, counts)
    while len(knees) < MOST_KNEES:
        trials = [
            (_fit_steps(_with_regimes(shares, sorted([*knees, knee])), seconds, counts), knee)
            for knee in sorted(KNEES)
            if knee not in knees and tokens.min() <= knee < tokens.max()
        ]
        if not trials:
            break
        (trial, error), knee = min(trials, key=lambda each: each[0][1])
        if error > best * (1 - KNEE_GAIN):
            break
        knees, fitted, best = sorted([*knees, knee]), trial, error
    predicted = _with_regimes(shares, knees) @ fitted
    return step_cost_of(fitted, knees), FitError.of(predicted, seconds)


def _fit_steps(columns: Float64s, seconds: Float64s, counts: Float64s) -> tuple[Float64s, float]:
    """Long steps count for more than short ones, by the root of their time: it matters where a
    load's time goes, but each of the many short steps matters to somebody too."""
    return robust_fit(columns, seconds, counts, time_power=TIME_POWER, least_bound=DELAY)


def _counts_by_size(tokens: Float64s) -> Float64s:
    """How much each step counts: of the many small ones that any load has each a little less, or
    they would drown the large ones. Sizes within a factor of 1.4 count together."""
    _, size, number = np.unique(
        np.round(2 * np.log2(tokens)), return_inverse=True, return_counts=True
    )
    counts: Float64s = 1 / number[size] ** BALANCE
    return counts


def step_cost_of(fitted: Float64s, knees: Sequence[float]) -> LinearStepCost:
    """The cost with these coefficients of the columns of `_with_regimes`."""
    values = [float(value) for value in fitted]
    beyond = values[NUM_SHARES : NUM_SHARES + len(knees)]
    *jumps, few_context_s = values[NUM_SHARES + len(knees) :] or [0.0] * (len(knees) + 1)
    return LinearStepCost(
        base_s=values[0],
        token_s=values[1],
        row_s=values[2],
        sampled_s=values[3],
        context_s=values[4],
        attended_s=values[5],
        few_context_s=few_context_s,
        regimes=tuple(map(Regime, knees, jumps, beyond)),
    )


def _with_regimes(shares: Float64s, knees: Sequence[float], *, jumps: bool = True) -> Float64s:
    """The six shares, of which tokens up to the first knee only; the tokens from each knee to the
    next; and, unless told otherwise, whether there are more than each knee, and the context of
    steps that are not beyond the first."""
    if not knees:
        return shares
    tokens, starts, ends = shares[:, 1:2], np.array([0.0, *knees]), np.array([*knees, np.inf])
    parts = np.clip(tokens, starts, ends) - starts
    columns = [shares[:, :1], parts[:, :1], shares[:, 2:], parts[:, 1:]]
    if jumps:
        columns += [tokens > starts[1:], shares[:, 4:5] * (tokens <= starts[1])]
    return np.column_stack(columns)


def robust_fit(
    columns: Float64s,
    seconds: Float64s,
    counts: Float64s | None = None,
    *,
    time_power: float = 0.0,
    least_bound: float = 0.0,
) -> tuple[Float64s, float]:
    """Non-negative coefficients of `columns`, and the mean of what is left, squared; `counts` says
    how much each sample counts, and `time_power` how much for its time.

    Weighted by the prediction, not by the measurement: weights of 1 / measured would favour what
    happened to be fast. Residuals beyond four robust deviations, and beyond `least_bound`, count
    only in proportion (Huber): a pause of the machine is no property of the step.
    """
    counts = np.ones(len(seconds)) if counts is None else counts
    weights = np.sqrt(counts) / seconds
    coefficients = np.zeros(columns.shape[1])
    loss = 0.0
    for _ in range(5):
        scaled = columns * weights[:, None]
        coefficients = non_negative_least_squares(scaled.T @ scaled, scaled.T @ (seconds * weights))
        predicted = np.maximum(columns @ coefficients, 1e-12)
        residual = np.abs(seconds - predicted) / predicted
        most = max(4 * 1.4826 * float(np.median(residual)), least_bound, 1e-9)
        importance = counts * predicted**time_power
        loss = float(np.average(np.minimum(residual, most) ** 2, weights=importance))
        bounded = np.minimum(1.0, most / np.maximum(residual, 1e-300))
        weights = np.sqrt(importance * bounded) / predicted
    return coefficients, loss


class OnlineFit:
    """A step cost learned while an engine runs, from its `StepSample`s, in bounded memory.

    Keeps the normal equations only; each sample takes a few microseconds and old ones fade
    (`half_life_samples`). `cost` answers once the error of predicting each next step, before it is
    learned from, is below `largest_error`.
    """

    def __init__(
        self,
        *,
        half_life_samples: float = 4096,
        least_samples: int = 64,
        largest_error: float = 0.25,
        refit_every: int = 32,
    ) -> None:
        size = NUM_SHARES + len(ONLINE_KNEES)
        self._gram = np.zeros((size, size))
        self._moment = np.zeros(size)
        self._fade = 0.5 ** (1 / half_life_samples)
        self._least, self._largest_error, self._every = least_samples, largest_error, refit_every
        self._cost: LinearStepCost | None = None
        self._errors = 0.0  # faded sum of relative errors, and of how many
        self._tested = 0.0
        self.num_samples = 0

    def add(self, sample: StepSample) -> None:
        """Learn from a step. One without tokens or a positive, finite time teaches nothing."""
        shares, seconds = shares_of([sample])
        if not len(seconds):
            return
        measured = expected = float(seconds[0])
        if self._cost is not None:
            expected = self._cost.step_s(work_of(sample))
            error = abs(expected - measured) / measured
            self._errors = self._errors * self._fade + min(error, 1.0)
            self._tested = self._tested * self._fade + 1
        # By the larger of both: neither a pause of the machine nor a poor first fit counts much.
        row = _with_regimes(shares, ONLINE_KNEES, jumps=False)[0] / max(measured, expected)
        self._gram = self._gram * self._fade + np.outer(row, row)
        self._moment = self._moment * self._fade + row * (measured / max(measured, expected))
        self.num_samples += 1
        if self.num_samples % self._every == 0:
            fitted = non_negative_least_squares(self._gram, self._moment)
            self._cost = step_cost_of(fitted, ONLINE_KNEES)

    @property
    def error(self) -> float | None:
        """Mean relative error of predicting the next step; None before anything was predicted."""
        return self._errors / self._tested if self._tested else None

    def cost(self) -> LinearStepCost | None:
        """The fit, or None while there are too few samples or it predicts too poorly."""
        error = self.error
        if error is None or self.num_samples < self._least or error > self._largest_error:
            return None
        return self._cost


class LearnedStepCost:
    """A `StepCost` out of an `OnlineFit`: no step has an end until the fit can be trusted."""

    def __init__(self) -> None:
        self._fit = OnlineFit()
        self.add = self._fit.add

    def step_s(self, work: StepWork) -> float:
        cost = self._fit.cost()
        return math.inf if cost is None else cost.step_s(work)

    def step_s_many(self, works: StepColumns) -> Float64s:
        cost = self._fit.cost()
        if cost is None:
            return np.full(len(works.context_tokens), math.inf)
        return cost.step_s_many(works)


# ---------------------------------------------------------------- links

EXACT = 1e-6  # a loss below which the sum says all: few points fit both forms exactly


def fit_link_cost(
    num_messages: Sequence[float],
    num_bytes: Sequence[float],
    seconds: Sequence[float],
    *,
    clean: bool = False,
) -> tuple[LinkCost, FitError]:
    """The link cost of measured transfers: as a sum, or pipelined where that fits better.

    Of single transfers many are late, because the thread that reads has to wait for a processor:
    the median one counts. `clean` points, each the mean or the best of many, have no outliers: the
    worst error is made small. Raises ValueError when none took a positive, finite time, or time
    does not grow with bytes.
    """
    table = np.array([num_messages, num_bytes, seconds], np.float64).T.reshape(-1, 3)
    table = table[(table[:, 1] > 0) & (table[:, 2] > 0) & np.isfinite(table).all(axis=1)]
    if not len(table):
        raise ValueError("no transfer was measured: one needs bytes and a time over 0")
    fit = least_worst_fit if clean else median_fit
    messages, moved, measured = table.T
    ones = np.ones(len(table))
    summed, sum_loss = fit(np.column_stack([ones, messages, moved]), measured)
    piped, pipe_loss = _fit_pipelined(messages, moved, measured, fit)
    pipelined = sum_loss > EXACT and pipe_loss < sum_loss * (1 - KNEE_GAIN)
    base_s, message_s, byte_s = map(float, piped if pipelined else summed)
    if byte_s <= 0:
        raise ValueError("the time of these transfers does not grow with their bytes")
    cost = LinkCost(base_s=base_s, message_s=message_s, bytes_per_s=1 / byte_s, pipelined=pipelined)
    predicted = [cost.transfer_s(*row) for row in table[:, :2].tolist()]
    return cost, FitError.of(predicted, measured)


def _fit_pipelined(
    messages: Float64s,
    moved: Float64s,
    measured: Float64s,
    fit: Callable[[Float64s, Float64s], tuple[Float64s, float]],
) -> tuple[Float64s, float]:
    """Coefficients of base + max(messages * each, bytes * per byte), and its loss.

    Which of the two counts is decided by the bytes of a message: below a size the issue of messages
    does, above it the bytes. Every such size among the samples is tried.
    """
    ones = np.ones(len(measured))
    size = moved / np.maximum(messages, 1e-9)
    best: tuple[Float64s, float] = np.zeros(3), np.inf
    for threshold in np.unique(size):
        small = size < threshold
        columns = np.column_stack([ones, messages * small, moved * ~small])
        fitted, loss = fit(columns, measured)
        predicted = fitted[0] + np.maximum(messages * fitted[1], moved * fitted[2])
        # Where the size is not where the two really meet, the maximum is not what was fitted.
        loss += float(np.abs(predicted / (columns @ fitted) - 1).max())
        if loss < best[1]:
            best = fitted, loss
    return best


def median_fit(columns: Float64s, seconds: Float64s) -> tuple[Float64s, float]:
    """Non-negative coefficients that make the mean relative error small, not squared, and that
    error: half of the samples may be late by as much as they like.

    By least squares again and again, each sample divided by the root of how far off it was.
    """
    weights = 1 / seconds
    coefficients, loss = np.zeros(columns.shape[1]), np.inf
    for _ in range(MEDIAN_ROUNDS):
        scaled = columns * weights[:, None]
        coefficients = non_negative_least_squares(scaled.T @ scaled, scaled.T @ (seconds * weights))
        predicted = np.maximum(columns @ coefficients, 1e-12)
        residual = np.abs(seconds - predicted) / predicted
        loss = float(residual.mean())
        weights = 1 / (predicted * np.sqrt(np.maximum(residual, 1e-3)))
    return coefficients, loss


def least_worst_fit(columns: Float64s, seconds: Float64s) -> tuple[Float64s, float]:
    """Non-negative coefficients that make the largest relative error small, and its square.

    Lawson's weights: each round, points count in proportion to how far off they were.
    """
    scaled = columns / seconds[:, None]
    weights = np.full(len(seconds), 1 / len(seconds))
    best: tuple[Float64s, float] = np.zeros(columns.shape[1]), np.inf
    for _ in range(LAWSON_ROUNDS):
        weighted = scaled * weights[:, None]
        fitted = non_negative_least_squares(scaled.T @ weighted, weighted.sum(axis=0))
        residual = np.abs(scaled @ fitted - 1)
        if (worst := float(residual.max() ** 2)) < best[1]:
            best = fitted, worst
        weights = weights * residual
        if not weights.sum() > 1e-12:
            break
        weights /= weights.sum()
    return best
