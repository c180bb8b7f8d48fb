"""How steps of one size differ from each other, as recorded: what a mean does not say.

    measured / predicted     0.97 1.02 0.99 | 1.90 2.05 1.97 | 1.01 0.98 ...
                                             a core that is shared for a while

Late steps come in runs, so the ratios are kept in the order in which they were measured, by size of
step. The twin reads on from a place that its seed decides: its n-th step takes the n-th ratio from
there, whatever came between, so many steps at once are as late as one by one.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from twostroke.arrays import Float64s
from twostroke.errors import ConfigError

# Steps of up to so many tokens, and more than the size before, are alike. What lasts longer is less
# often late: a core that is shared for 10 ms does not show.
SIZES = (1, 2, 4, 16, 64, 256, 1 << 31)
LEAST_RATIOS = 16  # fewer say nothing of how steps of a size differ
MOST_RATIOS, RUN = 2048, 128  # kept of a size, in runs of so many as far apart as can be


@dataclass(frozen=True, kw_only=True)
class StepSpread:
    """`percents[i]`: ratios of steps of up to `most_tokens[i]` tokens, in percent, in order, with
    spaces between. Sizes beyond the last, and a size without any, take what is predicted."""

    most_tokens: tuple[int, ...] = ()
    percents: tuple[str, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        if len(self.most_tokens) != len(self.percents):
            raise ConfigError(
                f"a spread of steps has {len(self.most_tokens)} sizes and {len(self.percents)} "
                "series; it must have as many of each"
            )
        if any(
            after <= before
            for before, after in zip(self.most_tokens, self.most_tokens[1:], strict=False)
        ):
            raise ConfigError("the sizes of a spread of steps do not grow; sort them")
        for series in self.ratios:
            if not (series > 0).all():
                raise ConfigError("a spread of steps has a ratio of 0 %; all must be over 0")

    @cached_property
    def ratios(self) -> tuple[Float64s, ...]:
        """The series as shares of what is predicted."""
        try:
            return tuple(np.array(it.split(), np.int64) / 100 for it in self.percents)
        except (ValueError, OverflowError):
            raise ConfigError("a spread of steps is not made of whole percents") from None

    @classmethod
    def of(cls, num_tokens: Sequence[int], ratios: Sequence[float] | Float64s) -> "StepSpread":
        """Of steps of so many tokens, in the order in which they were measured."""
        tokens, shares = np.array(num_tokens), np.array(ratios, np.float64)
        percents, least = [], 0
        for most in SIZES:
            found = shares[(tokens > least) & (tokens <= most)]
            kept = _runs(found) if len(found) >= LEAST_RATIOS else found[:0]
            whole = np.maximum(np.rint(kept * 100), 1).astype(np.int64)
            percents.append(" ".join(map(str, whole.tolist())))
            least = most
        return cls(most_tokens=SIZES, percents=tuple(percents))


def _runs(series: Float64s) -> Float64s:
    """All of it, or runs from begin to end that are as many as may be kept."""
    if len(series) <= MOST_RATIOS:
        return series
    starts = np.linspace(0, len(series) - RUN, MOST_RATIOS // RUN).astype(np.int64)
    kept: Float64s = np.concatenate([series[start : start + RUN] for start in starts])
    return kept


class SpreadReader:
    """The ratios of one engine's steps, by their number and size."""

    def __init__(self, spread: StepSpread, engine: int) -> None:
        draw = random.Random(f"{spread.seed} {engine}")
        self._sizes = spread.most_tokens
        self._series = [
            np.roll(series, -draw.randrange(len(series))) if len(series) else np.ones(1)
            for series in spread.ratios
        ]

    def ratio(self, number: int, num_tokens: float) -> float:
        """Of the step of this number."""
        series = self._of(num_tokens)
        return 1.0 if series is None else float(series[number % len(series)])

    def ratios(self, first: int, count: int, num_tokens: float) -> Float64s:
        """[count] Of so many steps in a row that all have so many tokens."""
        series = self._of(num_tokens)
        if series is None:
            return np.ones(count)
        found: Float64s = series[np.arange(first, first + count) % len(series)]
        return found

    def _of(self, num_tokens: float) -> Float64s | None:
        for most, series in zip(self._sizes, self._series, strict=True):
            if num_tokens <= most:
                return series
        return None
