"""An `Observation` out of the metrics of vLLM's prefill and decode engines.

Names are those of vLLM 0.22 (June 2026) and 0.32, and older ones where they are known; see
`scrape`. What vLLM does not count stays unknown: how long P holds KV, how much of its pool that
takes, and how fast the link is.
"""

import math
from collections.abc import Callable, Sequence

from twostroke.advice.figures import known, over
from twostroke.advice.observation import UNKNOWN, Observation
from twostroke.plan.scrape import Series, slope

KV_USAGE = ("kv_cache_usage_perc", "gpu_cache_usage_perc")
TOKEN_TIME = ("inter_token_latency_seconds", "time_per_output_token_seconds")
HITS = ("prefix_cache_hits", "gpu_prefix_cache_hits")
QUERIES = ("prefix_cache_queries", "gpu_prefix_cache_queries")


def observe(prefill: Sequence[Series], decode: Sequence[Series]) -> Observation:
    """What a deployment's pages tell; each endpoint may speak for several engines."""
    window_s = max((series.window_s for series in (*prefill, *decode)), default=0.0)
    ended = _sum(decode, lambda it: it.grown("request_generation_tokens_count"))
    per_s = over(ended, window_s)
    transfers = _transfers(prefill, decode, ended, window_s)
    prompts = _ratio(decode, "request_prompt_tokens_sum", "request_prompt_tokens_count")
    hit_share = over(
        _sum(prefill, lambda it: it.grown(*HITS)), _sum(prefill, lambda it: it.grown(*QUERIES))
    )
    queue_s = _ratio(decode, "request_queue_time_seconds_sum", "request_queue_time_seconds_count")
    arrives_s = known(transfers["transfer_s"])
    return Observation(
        source=f"vLLM metrics of {len(prefill)} prefill and {len(decode)} decode endpoints",
        window_s=window_s or UNKNOWN,
        num_prefill=_count(prefill),
        num_decode=_count(decode),
        requests_per_s=per_s,
        prompt_tokens=prompts,
        cached_tokens=prompts * hit_share,
        output_tokens=_ratio(
            decode, "request_generation_tokens_sum", "request_generation_tokens_count"
        ),
        **_prefill_side(prefill, window_s),
        **transfers,
        # D's queue has the wait for room and the transfer in it.
        room_wait_s=max(0.0, queue_s - arrives_s) if queue_s == queue_s else UNKNOWN,
        **_decode_side(decode, ended),
    )


def _prefill_side(pages: Sequence[Series], window_s: float) -> dict[str, float]:
    busy = _prefill_busy(pages, window_s)
    tokens = _sum(pages, lambda it: it.grown("prompt_tokens"))
    cached = known(_sum(pages, lambda it: it.grown(*HITS)))
    computed = max(0.0, tokens - cached) if tokens == tokens else UNKNOWN
    return {
        "prefill_busy": busy,
        "prefill_queue_s": _ratio(
            pages, "request_queue_time_seconds_sum", "request_queue_time_seconds_count"
        ),
        "prefill_s": _ratio(
            pages, "request_prefill_time_seconds_sum", "request_prefill_time_seconds_count"
        ),
        "prefill_waiting": _mean(pages, lambda it: it.gauge_mean("num_requests_waiting")),
        "prefill_running": _mean(pages, lambda it: it.gauge_mean("num_requests_running")),
        "prefill_kv_usage": _mean(pages, lambda it: it.gauge_mean(*KV_USAGE)),
        "prefill_tokens_per_s": over(computed, window_s * busy * _count(pages)),
    }


def _prefill_busy(pages: Sequence[Series], window_s: float) -> float:
    """Share of the time that a P computes.

    A request of one token begins and ends between two updates of the gauges, so they say little.
    Its prefill times do: their sum over the window is how many were computed at once, on average.
    Divided by the requests of a step it is the share of time in steps.
    """
    prefill_s = _sum(pages, lambda it: it.grown("request_prefill_time_seconds_sum"))
    requests = _sum(pages, lambda it: it.grown("request_prefill_time_seconds_count"))
    steps = _sum(pages, lambda it: it.grown("iteration_tokens_total_count"))
    at_once = over(prefill_s, window_s * _count(pages))
    return min(1.0, at_once / max(1.0, known(over(requests, steps), 1.0)))


def _transfers(
    prefill: Sequence[Series], decode: Sequence[Series], ended: float, window_s: float
) -> dict[str, float]:
    """NIXL counts each rank's share of a request as one transfer; D counts them when it pulls."""
    counted = _sum(decode, lambda it: it.grown("nixl_bytes_transferred_sum"))
    pages = decode if counted > 0 else prefill
    num_bytes = _sum(pages, lambda it: it.grown("nixl_bytes_transferred_sum"))
    messages = _sum(pages, lambda it: it.grown("nixl_num_descriptors_sum"))
    read_s = _ratio(pages, "nixl_xfer_time_seconds_sum", "nixl_xfer_time_seconds_count")
    return {
        "transfer_s": read_s,
        "read_s": read_s,
        "transfer_bytes": over(num_bytes, ended),
        "transfer_messages": over(messages, ended),
        "transfer_bytes_per_s": over(num_bytes, window_s),
    }


def _decode_side(pages: Sequence[Series], ended: float) -> dict[str, float]:
    loading = _sum(
        pages, lambda it: it.gauge("num_requests_kv_fetch_by_stage", stage="in_progress")
    )
    if loading != loading:
        # Before that gauge, those that wait for a transfer counted as deferred.
        loading = _sum(
            pages, lambda it: it.gauge("num_requests_waiting_by_reason", reason="deferred")
        )
    waiting = _sum(pages, lambda it: it.gauge("num_requests_waiting_by_reason", reason="capacity"))
    waiting = known(waiting, _sum(pages, lambda it: it.gauge("num_requests_waiting")))
    pools = [series.pages[-1].pool_tokens() for series in pages]
    preemptions = _sum(pages, lambda it: it.grown("num_preemptions"))
    count = _count(pages)
    return {
        "decode_s": _ratio(
            pages, "request_decode_time_seconds_sum", "request_decode_time_seconds_count"
        ),
        "tpot_s": known(
            _ratio(pages, f"{TOKEN_TIME[0]}_sum", f"{TOKEN_TIME[0]}_count"),
            _ratio(pages, f"{TOKEN_TIME[1]}_sum", f"{TOKEN_TIME[1]}_count"),
        ),
        "decode_busy": _mean(pages, lambda it: it.share_above_zero("num_requests_running")),
        "decode_running": _mean(pages, lambda it: it.gauge_mean("num_requests_running")),
        "decode_loading": over(loading, count),
        "decode_waiting": over(waiting, count),
        "decode_kv_usage": _mean(pages, lambda it: it.gauge_mean(*KV_USAGE)),
        "decode_pool_tokens": over(sum(pools), len(pools)),
        "decode_elasticity": _elasticity(pages),
        "preemptions_per_request": over(preemptions, ended),
    }


def _elasticity(pages: Sequence[Series]) -> float:
    """Slope of log TPOT over log batch, from page to page."""
    points: list[tuple[float, float]] = []
    for series in pages:
        for part in series.parts():
            sums = part.grown(f"{TOKEN_TIME[0]}_sum", f"{TOKEN_TIME[1]}_sum")
            counts = part.grown(f"{TOKEN_TIME[0]}_count", f"{TOKEN_TIME[1]}_count")
            token_s, rows = over(sums, counts), part.gauge_mean("num_requests_running")
            if token_s > 0 and rows >= 1:
                points.append((math.log(rows), math.log(token_s)))
    return slope(points)


def _count(pages: Sequence[Series]) -> float:
    return float(sum(series.pages[-1].num_engines() for series in pages)) if pages else UNKNOWN


def _sum(pages: Sequence[Series], value: Callable[[Series], float]) -> float:
    """Over the endpoints that know it."""
    found = [it for series in pages if (it := value(series)) == it]
    return sum(found) if found else UNKNOWN


def _mean(pages: Sequence[Series], value: Callable[[Series], float]) -> float:
    """Over the engines of the endpoints that know it."""
    found = [(it, s.pages[-1].num_engines()) for s in pages if (it := value(s)) == it]
    return over(sum(it * weight for it, weight in found), sum(weight for _, weight in found))


def _ratio(pages: Sequence[Series], of: str, by: str) -> float:
    """A histogram's mean: what its sum grew by over what its count did."""
    return over(_sum(pages, lambda it: it.grown(of)), _sum(pages, lambda it: it.grown(by)))
