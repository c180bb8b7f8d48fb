"""An `Observation` out of the metrics of a running twostroke server, whose router knows roles."""

from collections.abc import Sequence

import numpy as np

from twostroke.advice.figures import known, over
from twostroke.advice.observation import UNKNOWN, Observation
from twostroke.errors import ConfigError
from twostroke.plan.scrape import Series, slope


def observe(series: Series) -> Observation:
    """From one server's pages. ConfigError when its engines have no roles."""
    roles = _roles(series)
    if not roles["prefill"] or not roles["decode"]:
        raise ConfigError(
            "this server has no prefill and decode engines of their own",
            hint="start it with --prefill and --decode, or give two kinds of engines with "
            "--prefill URL --decode URL",
        )
    window_s = series.window_s
    ended = series.grown("request_success")
    transfers = series.grown("kv_transfers")
    messages = series.grown("kv_transfer_messages")
    num_bytes = series.grown("kv_transfer_bytes")
    output = _mean_of(series, "request_generation_tokens")

    def spent(interval: str) -> float:
        return over(series.grown("request_interval_seconds", interval=interval), ended)

    def gauge(role: str, name: str) -> float:
        values = [series.gauge(name, engine=engine) for engine in roles[role]]
        return over(sum(known(value) for value in values), len(values))

    def busy(role: str) -> float:
        return sum(known(series.grown("engine_busy_seconds", engine=it)) for it in roles[role])

    prompts = sum(known(series.grown("prompt_tokens", engine=it)) for it in roles["prefill"])
    return Observation(
        source=f"twostroke at {series.pages[-1].source}",
        window_s=window_s or UNKNOWN,
        num_prefill=len(roles["prefill"]),
        num_decode=len(roles["decode"]),
        requests_per_s=over(ended, window_s),
        prompt_tokens=_mean_of(series, "request_prompt_tokens"),
        cached_tokens=over(series.grown("prompt_tokens_cached"), ended),
        output_tokens=output,
        prefill_busy=over(busy("prefill"), window_s * len(roles["prefill"])),
        prefill_queue_s=spent("queue"),
        prefill_s=spent("prefill"),
        prefill_waiting=gauge("prefill", "num_requests_waiting"),
        prefill_running=gauge("prefill", "num_requests_running"),
        prefill_kv_usage=gauge("prefill", "kv_cache_usage_perc"),
        prefill_pinned=gauge("prefill", "kv_hold_usage"),
        prefill_tokens_per_s=over(prompts, busy("prefill")),
        room_wait_s=spent("held"),
        transfer_s=spent("transfer"),
        read_s=over(series.grown("kv_transfer_seconds"), transfers),
        transfer_bytes=over(num_bytes, transfers),
        transfer_messages=over(messages, transfers),
        transfer_bytes_per_s=over(num_bytes, window_s),
        decode_queue_s=spent("decode_queue"),
        decode_s=spent("decode"),
        preempted_s=spent("preempted"),
        tpot_s=over(spent("decode"), output - 1),
        decode_busy=over(busy("decode"), window_s * len(roles["decode"])),
        decode_running=gauge("decode", "num_requests_running"),
        decode_loading=gauge("decode", "num_requests_loading"),
        decode_waiting=gauge("decode", "num_requests_waiting"),
        decode_kv_usage=gauge("decode", "kv_cache_usage_perc"),
        decode_pool_tokens=series.pages[-1].pool_tokens(),
        decode_elasticity=_elasticity(series, roles["decode"]),
        preemptions_per_request=over(series.grown("num_preemptions"), ended),
        **{name: series.pages[-1].total("observed", figure=name) for name in _TOLD},
    )


# What the server's own observation says of sizes and links, which no counter tells.
_TOLD = (
    *("prefill_pin_limit", "decode_max_num_seqs", "decode_tp", "num_kv_heads", "kv_token_bytes"),
    *("kv_streams", "link_bytes_per_s", "link_low_bytes_per_s", "link_message_s", "num_links"),
)


def _roles(series: Series) -> dict[str, list[str]]:
    """Indices of the engines of each role, as they are now."""
    roles: dict[str, list[str]] = {"prefill": [], "decode": [], "both": []}
    for labels, value in series.pages[-1].of(["engine_role"]).items():
        facts = dict(labels)
        if value and facts.get("state") != "gone":
            roles.setdefault(facts.get("role", ""), []).append(facts.get("engine", ""))
    return roles


def _mean_of(series: Series, histogram: str) -> float:
    return over(series.grown(f"{histogram}_sum"), series.grown(f"{histogram}_count"))


def _elasticity(series: Series, engines: Sequence[str]) -> float:
    """Slope of log step time over log rows of D's steps, from page to page."""
    points: list[tuple[float, float]] = []
    for part in series.parts():
        for engine in engines:
            steps = part.grown("iteration_tokens_total_count", engine=engine)
            rows = over(part.grown("iteration_tokens_total_sum", engine=engine), steps)
            step_s = over(part.grown("engine_busy_seconds", engine=engine), steps)
            if rows >= 1 and step_s > 0:
                points.append((float(np.log(rows)), float(np.log(step_s))))
    return slope(points)
