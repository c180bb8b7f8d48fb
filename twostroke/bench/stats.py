"""Figures of a load run, under the keys of vLLM's `bench serve` so that scripts read both.

Definitions are vLLM's (benchmarks/serve.py): TPOT excludes the first token; ITL is over all gaps of
all requests; throughput is over the whole duration; failed requests count only as failed.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from twostroke.arrays import Float64s, Int64s, quantiles
from twostroke.errors import ConfigError

if TYPE_CHECKING:  # it brings an HTTP client, which a run that was simulated does not need
    from twostroke.bench.load import Outcome

METRICS = ("ttft", "tpot", "itl", "e2el")
GOODPUT_METRICS = ("ttft", "tpot", "e2el")

_BINS = 1 << 14  # of times between pieces of output

Result = dict[str, float | int | str | None]


def parse_goodput(pairs: Sequence[str]) -> dict[str, float]:
    """`ttft:200 tpot:50` (separate, or in one text with spaces or commas) to limits in ms."""
    limits: dict[str, float] = {}
    for pair in " ".join(pairs).replace(",", " ").split():
        name, _, text = pair.partition(":")
        if name not in GOODPUT_METRICS:
            choices = ", ".join(GOODPUT_METRICS)
            raise ConfigError(f"--goodput names {name!r}; choices: {choices}")
        try:
            limits[name] = float(text)
        except ValueError:
            raise ConfigError(
                f"--goodput is {pair!r}", hint="write a limit in ms, as ttft:200"
            ) from None
    return limits


def parse_names(text: str) -> list[str]:
    """Comma-separated metric names."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if unknown := [name for name in names if name not in METRICS]:
        raise ConfigError(
            f"--percentile-metrics names {unknown[0]!r}; choices: {', '.join(METRICS)}"
        )
    return names


def parse_percentiles(text: str) -> list[float]:
    """Comma-separated percentiles, each in [0, 100]."""
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(
            f"--metric-percentiles is {text!r}", hint="write numbers: 50,99"
        ) from None
    if bad := [value for value in values if not 0 <= value <= 100]:
        raise ConfigError(f"--metric-percentiles has {bad[0]}; it must be in [0, 100]")
    return values


@dataclass(frozen=True, kw_only=True)
class Columns:
    """A run in columns: one entry for each request that was answered, in seconds and tokens.

    `itl_s[i]` is a time between two pieces of output that came itl_counts[i] times.
    """

    num_failed: int
    input_tokens: int
    output_tokens: int
    ttft_s: Float64s
    tpot_s: Float64s  # 0 for an answer of one token
    e2el_s: Float64s
    has_tpot: Sequence[bool]  # more than one token
    itl_s: Float64s
    itl_counts: Int64s
    max_output_tokens_per_s: float
    max_concurrent_requests: int


def summarise(
    outcomes: "Sequence[Outcome]",
    duration_s: float,
    *,
    metrics: Sequence[str] = METRICS,
    percentiles: Sequence[float] = (99.0,),
    goodput_ms: Mapping[str, float] | None = None,
) -> Result:
    """All figures of a run. Latencies in ms; rates per second."""
    done = [outcome for outcome in outcomes if not outcome.error]
    itls_s = np.array([gap for outcome in done for gap in outcome.itls_s])
    columns = Columns(
        num_failed=len(outcomes) - len(done),
        input_tokens=sum(outcome.prompt_tokens for outcome in done),
        output_tokens=sum(outcome.output_tokens for outcome in done),
        ttft_s=np.array([outcome.ttft_s for outcome in done]),
        tpot_s=np.array([outcome.tpot_s for outcome in done]),
        e2el_s=np.array([outcome.e2el_s for outcome in done]),
        has_tpot=[outcome.output_tokens > 1 for outcome in done],
        itl_s=itls_s,
        itl_counts=np.ones(len(itls_s), np.int64),
        max_output_tokens_per_s=_peak_output_rate(done),
        max_concurrent_requests=_peak_concurrency(done),
    )
    return summarise_columns(
        columns, duration_s, metrics=metrics, percentiles=percentiles, goodput_ms=goodput_ms
    )


def summarise_columns(
    run: Columns,
    duration_s: float,
    *,
    metrics: Sequence[str] = METRICS,
    percentiles: Sequence[float] = (99.0,),
    goodput_ms: Mapping[str, float] | None = None,
) -> Result:
    """The same of a run in columns."""
    done = len(run.e2el_s)
    result: Result = {
        "duration": duration_s,
        "completed": done,
        "failed": run.num_failed,
        "total_input_tokens": run.input_tokens,
        "total_output_tokens": run.output_tokens,
        "request_throughput": done / duration_s,
        "request_goodput": _num_good(run, goodput_ms) / duration_s if goodput_ms else None,
        "output_throughput": run.output_tokens / duration_s,
        "total_token_throughput": (run.input_tokens + run.output_tokens) / duration_s,
        "max_output_tokens_per_s": run.max_output_tokens_per_s,
        "max_concurrent_requests": run.max_concurrent_requests,
    }
    samples_s = {
        "ttft": run.ttft_s,
        "tpot": run.tpot_s[np.array(run.has_tpot, np.bool_)],
        "itl": run.itl_s,
        "e2el": run.e2el_s,
    }
    for name in metrics:
        values_ms = samples_s[name] * 1000 if len(samples_s[name]) else np.zeros(1)
        counts = run.itl_counts if name == "itl" and len(run.itl_s) else None
        mean, deviation, cuts = _moments(values_ms, counts, [50.0, *percentiles])
        result[f"mean_{name}_ms"] = mean
        result[f"median_{name}_ms"] = cuts[0]
        result[f"std_{name}_ms"] = deviation
        for percentile, value in zip(percentiles, cuts[1:], strict=True):
            result[f"p{percentile:g}_{name}_ms"] = value
    return result


def _moments(
    values: Float64s, counts: Int64s | None, percentiles: Sequence[float]
) -> tuple[float, float, list[float]]:
    """Mean, standard deviation and percentiles of values that came `counts` times (None: once)."""
    if counts is None:
        cuts = quantiles(values, [percentile / 100 for percentile in percentiles])
        return float(values.mean()), float(values.std()), cuts
    total = int(counts.sum())
    mean = float((values * counts).sum() / total)
    deviation = math.sqrt(float((counts * (values - mean) ** 2).sum() / total))
    places = (total - 1) * np.array(percentiles) / 100
    below = np.floor(places).astype(np.int64)
    wanted = np.concatenate((below, np.minimum(below + 1, total - 1)))
    low, high = np.split(_in_order(values, counts, wanted), 2)
    between: list[float] = (low + (high - low) * (places - below)).tolist()
    return mean, deviation, between


def _in_order(values: Float64s, counts: Int64s, places: Int64s) -> Float64s:
    """[places] The values that stand there when all are sorted, each repeated by its count.

    Only the few of one bin with it are sorted, for there may be many millions.
    """
    least = values.min()
    width = (values.max() - least) / _BINS
    bins = ((values - least) / width).astype(np.int64) if width > 0 else np.zeros_like(counts)
    ends = np.bincount(bins, counts).astype(np.int64).cumsum()
    found = []
    for place in places.tolist():
        nth = int(ends.searchsorted(place, side="right"))
        chosen = (bins == nth).nonzero()[0]
        chosen = chosen[values[chosen].argsort()]
        before = int(ends[nth - 1]) if nth else 0
        found.append(values[chosen[counts[chosen].cumsum().searchsorted(place - before, "right")]])
    return np.array(found)


def _num_good(run: Columns, limits_ms: Mapping[str, float]) -> int:
    """Requests that met every limit. One with a single token has a TPOT of 0, which is good."""
    good = np.ones(len(run.e2el_s), np.bool_)
    for name, limit in limits_ms.items():
        good &= 1000 * getattr(run, f"{name}_s") <= limit
    return int(good.sum())


def _peak_output_rate(done: "Sequence[Outcome]") -> float:
    """Most pieces of output in one second, seconds counted from the first request."""
    start_s = min((outcome.start_s for outcome in done), default=0.0)
    seconds = Counter(
        math.floor(time_s - start_s) for outcome in done for time_s in outcome.chunk_times_s
    )
    return float(max(seconds.values(), default=0))


def _peak_concurrency(done: "Sequence[Outcome]") -> int:
    """Most requests at the same time; one that ends as another starts does not count twice."""
    changes = [(outcome.start_s, 1) for outcome in done]
    changes += [(outcome.chunk_times_s[-1], -1) for outcome in done]
    now = peak = 0
    for _, change in sorted(changes):
        now += change
        peak = max(peak, now)
    return peak
