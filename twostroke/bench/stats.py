"""Figures of a load run, under the keys of vLLM's `bench serve` so that scripts read both.

Definitions are vLLM's (benchmarks/serve.py): TPOT excludes the first token; ITL is over all gaps of
all requests; throughput is over the whole duration; failed requests count only as failed.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from twostroke.bench.load import Outcome
from twostroke.errors import ConfigError

METRICS = ("ttft", "tpot", "itl", "e2el")
GOODPUT_METRICS = ("ttft", "tpot", "e2el")

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


def summarise(
    outcomes: Sequence[Outcome],
    duration_s: float,
    *,
    metrics: Sequence[str] = METRICS,
    percentiles: Sequence[float] = (99.0,),
    goodput_ms: Mapping[str, float] | None = None,
) -> Result:
    """All figures of a run. Latencies in ms; rates per second."""
    done = [outcome for outcome in outcomes if not outcome.error]
    input_tokens = sum(outcome.prompt_tokens for outcome in done)
    output_tokens = sum(outcome.output_tokens for outcome in done)
    result: Result = {
        "duration": duration_s,
        "completed": len(done),
        "failed": len(outcomes) - len(done),
        "total_input_tokens": input_tokens,
        "total_output_tokens": output_tokens,
        "request_throughput": len(done) / duration_s,
        "request_goodput": _num_good(done, goodput_ms) / duration_s if goodput_ms else None,
        "output_throughput": output_tokens / duration_s,
        "total_token_throughput": (input_tokens + output_tokens) / duration_s,
        "max_output_tokens_per_s": _peak_output_rate(done),
        "max_concurrent_requests": _peak_concurrency(done),
    }
    samples_s: dict[str, list[float]] = {
        "ttft": [outcome.ttft_s for outcome in done],
        "tpot": [outcome.tpot_s for outcome in done if outcome.output_tokens > 1],
        "itl": [gap for outcome in done for gap in outcome.itls_s],
        "e2el": [outcome.e2el_s for outcome in done],
    }
    for name in metrics:
        values_ms = np.array(samples_s[name] or [0.0]) * 1000
        result[f"mean_{name}_ms"] = float(values_ms.mean())
        result[f"median_{name}_ms"] = float(np.median(values_ms))
        result[f"std_{name}_ms"] = float(values_ms.std())
        for percentile in percentiles:
            result[f"p{percentile:g}_{name}_ms"] = float(np.percentile(values_ms, percentile))
    return result


def _num_good(done: Sequence[Outcome], limits_ms: Mapping[str, float]) -> int:
    """Requests that met every limit. One with a single token has a TPOT of 0, which is good."""
    return sum(
        all(1000 * getattr(outcome, f"{name}_s") <= limit for name, limit in limits_ms.items())
        for outcome in done
    )


def _peak_output_rate(done: Sequence[Outcome]) -> float:
    """Most pieces of output in one second, seconds counted from the first request."""
    start_s = min((outcome.start_s for outcome in done), default=0.0)
    seconds = Counter(
        math.floor(time_s - start_s) for outcome in done for time_s in outcome.chunk_times_s
    )
    return float(max(seconds.values(), default=0))


def _peak_concurrency(done: Sequence[Outcome]) -> int:
    """Most requests at the same time; one that ends as another starts does not count twice."""
    changes = [(outcome.start_s, 1) for outcome in done]
    changes += [(outcome.chunk_times_s[-1], -1) for outcome in done]
    now = peak = 0
    for _, change in sorted(changes):
        now += change
        peak = max(peak, now)
    return peak
