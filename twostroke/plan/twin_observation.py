"""An `Observation` out of a run in the twin: all of it is known there."""

import numpy as np

from twostroke.advice.closed_form import batch_elasticity
from twostroke.advice.figures import over
from twostroke.advice.observation import UNKNOWN, Observation
from twostroke.arrays import Float64s, quantiles
from twostroke.cost import BandwidthCurve, StepWork
from twostroke.ledger import Interval
from twostroke.twin.scenario import EngineGroup, EngineResult, Result

WARM = 0.2  # of the arrivals: what is seen before, while queues fill, is left out
SLICES = 1000  # of the run, to find a bandwidth's worst tenth


def observe(result: Result, *, slo_tpot_s: float = UNKNOWN) -> Observation:
    """From the first arrivals on, once all is warm, to the last. Needs recorded timelines."""
    scenario = result.scenario
    count = len(result.arrival_s)
    since_s = quantiles(result.arrival_s, [WARM])[0]
    until_s = float(result.arrival_s[-1])
    if until_s - since_s < 0.2 * result.duration_s:
        since_s, until_s = 0.1 * result.duration_s, 0.8 * result.duration_s
    late = np.zeros(count, bool)
    late[int(WARM * count) :] = True
    rows = result.done & late
    spent = result.intervals_s[rows]
    pinned_s, room_s = _held(result, rows)
    groups = {group.role: group for group in scenario.engines}
    prefill, decode = (_of_role(result, role) for role in ("prefill", "decode"))
    ends = (result.arrival_s + result.e2e_s)[result.done]
    window_s = until_s - since_s
    ended = int(((ends > since_s) & (ends <= until_s)).sum())

    def mean(interval: Interval) -> float:
        return float(spent[:, interval].mean()) if len(spent) else UNKNOWN

    return Observation(
        source=f"twin: {scenario.name or scenario.workload.name}",
        window_s=window_s,
        num_prefill=len(prefill),
        num_decode=len(decode),
        kv_streams=float(scenario.settings.kv_mode == "stream"),
        requests_per_s=over(ended, window_s),
        prompt_tokens=float(result.prompt_tokens.mean()),
        cached_tokens=float(result.cached_tokens[rows].mean()) if rows.any() else UNKNOWN,
        output_tokens=float(result.output_tokens.mean()),
        prefill_queue_s=mean(Interval.QUEUE),
        prefill_s=mean(Interval.PREFILL),
        prefill_pin_wait_s=pinned_s,
        room_wait_s=room_s,
        transfer_s=mean(Interval.TRANSFER),
        decode_queue_s=mean(Interval.DECODE_QUEUE),
        decode_s=mean(Interval.DECODE),
        preempted_s=mean(Interval.PREEMPTED),
        tpot_s=_mean(result.tpot_s[rows]),
        preemptions_per_request=float(result.num_preemptions[rows].mean()) if rows.any() else 0.0,
        tpot_slo_s=slo_tpot_s,
        **_of_prefill(result, prefill, groups.get("prefill"), since_s, until_s),
        **_of_decode(result, decode, groups.get("decode"), since_s, until_s),
        **_of_links(result, since_s, until_s, min(len(prefill), len(decode))),
    )


def _of_role(result: Result, role: str) -> list[EngineResult]:
    return [engine for engine in result.engines if engine.role == role]


def _mean(values: Float64s) -> float:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else UNKNOWN


def _held(result: Result, rows: Float64s) -> tuple[float, float]:
    """Mean seconds held on P for what is pinned there, and held for want of room on D.

    The first is what follows a wait in P's queue; before it the router holds, after it D has no
    blocks yet.
    """
    requests, intervals, times = result.changes
    order = np.argsort(requests, kind="stable")
    requests, intervals, times = requests[order], intervals[order], times[order]
    same = requests[1:] == requests[:-1]
    held = (intervals[1:-1] == Interval.HELD) & same[1:]
    seconds = np.where(held, times[2:] - times[1:-1], 0.0)
    on_prefill = held & same[:-1] & (intervals[:-2] == Interval.QUEUE)
    chosen = rows[requests[1:-1]]
    total = max(1, int(rows.sum()))
    pinned = float(seconds[on_prefill & chosen].sum()) / total
    return pinned, float(seconds[chosen].sum()) / total - pinned


def _gauge(engine: EngineResult, name: str, since_s: float, until_s: float) -> float:
    """A gauge's mean over time: each value holds until the next."""
    times, values = engine.timeline["time_s"], engine.timeline[name]
    if not len(times):
        return 0.0
    edges = np.clip(np.append(times, max(until_s, times[-1])), since_s, until_s)
    return over(float((values * np.diff(edges)).sum()), until_s - since_s)


def _gauges(engines: list[EngineResult], name: str, since_s: float, until_s: float) -> float:
    return over(sum(_gauge(it, name, since_s, until_s) for it in engines), len(engines))


def _of_prefill(
    result: Result,
    engines: list[EngineResult],
    group: EngineGroup | None,
    since_s: float,
    until_s: float,
) -> dict[str, float]:
    if group is None:
        return {}
    _, intervals, times = result.changes
    # P works until the last prompt is done, which D's answers outlast.
    left = np.isin(intervals, (Interval.HELD, Interval.TRANSFER, Interval.DECODE))
    span_s = float(times[left].max()) if left.any() else result.duration_s
    busy_s = sum(engine.busy_s for engine in engines)
    computed = float((result.prompt_tokens - result.cached_tokens)[result.done].sum())
    return {
        "prefill_busy": min(1.0, over(busy_s, span_s * len(engines))),
        "prefill_tokens_per_s": _full_speed(group, result, over(computed, busy_s)),
        "prefill_waiting": _gauges(engines, "waiting", since_s, until_s),
        "prefill_running": _gauges(engines, "running", since_s, until_s),
        "prefill_kv_usage": _gauges(engines, "kv_usage", since_s, until_s),
        "prefill_pinned": _gauges(engines, "hold_usage", since_s, until_s),
        "prefill_pin_limit": group.max_hold_share,
        "prefill_tp": float(group.layout.tensor_parallel_size),
    }


def _full_speed(group: EngineGroup, result: Result, seen: float) -> float:
    """Tokens/s of a P whose steps are full, which says more than those it happened to run."""
    prompt = float(result.prompt_tokens.mean())
    tokens = float(max(prompt, group.config.max_num_batched_tokens))
    rows = tokens / prompt
    work = StepWork(tokens, rows, rows, 0.0, tokens * prompt / 2)
    return max(seen, tokens / group.cost.step_s(work))


def _of_decode(
    result: Result,
    engines: list[EngineResult],
    group: EngineGroup | None,
    since_s: float,
    until_s: float,
) -> dict[str, float]:
    if group is None:
        return {}
    rows = _gauges(engines, "running", since_s, until_s)
    context = float((result.prompt_tokens + result.output_tokens / 2).mean())

    def step_s(batch: float) -> float:
        work = StepWork(batch, batch, batch, batch * context, batch * (context + 0.5))
        return group.cost.step_s(work)

    layout = group.layout
    return {
        "decode_busy": min(
            1.0, over(sum(it.busy_s for it in engines), result.duration_s * len(engines))
        ),
        "decode_running": rows,
        "decode_loading": _gauges(engines, "loading", since_s, until_s),
        "decode_waiting": _gauges(engines, "waiting", since_s, until_s),
        "decode_kv_usage": _gauges(engines, "kv_usage", since_s, until_s),
        "decode_pool_tokens": float((group.config.num_blocks - 1) * group.config.block_size),
        "decode_max_num_seqs": float(group.config.max_num_seqs),
        "decode_elasticity": batch_elasticity(step_s, max(1.0, rows)),
        "decode_tp": float(layout.tensor_parallel_size),
        "num_kv_heads": float(layout.num_kv_heads),
        "kv_token_bytes": float(layout.token_bytes * layout.tensor_parallel_size),
    }


def _of_links(result: Result, since_s: float, until_s: float, ends: int) -> dict[str, float]:
    """`ends`: links that carry at once, one for each engine of the smaller side."""
    link = result.scenario.link
    readers = _of_role(result, "decode")
    transfers = float(result.counters.get("num_transfers", 0))
    num_bytes = float(sum(engine.loaded_bytes for engine in readers))
    span_s = max(result.duration_s, until_s)
    curve = link.bandwidth
    facts = {
        "transfer_bytes": over(num_bytes, transfers),
        "transfer_messages": over(float(sum(it.loaded_messages for it in readers)), transfers),
        "transfer_bytes_per_s": over(num_bytes, until_s),
        "num_links": float(max(1, ends)),
        "link_message_s": link.message_s,
        "link_bytes_per_s": curve.moved_bytes(0.0, span_s) / span_s,
        "link_low_bytes_per_s": _worst_tenth(curve, span_s),
    }
    if link.fabric is not None:
        shared = link.fabric.moved_bytes(0.0, span_s) / span_s
        if shared < facts["link_bytes_per_s"] * facts["num_links"]:
            facts |= {"num_links": 1.0, "link_bytes_per_s": shared}
            facts["link_low_bytes_per_s"] = _worst_tenth(link.fabric, span_s)
    return facts


def _worst_tenth(curve: BandwidthCurve, span_s: float) -> float:
    """The rate that a link stays below for a tenth of the time."""
    rates = [curve.rate_at(span_s * (i + 0.5) / SLICES) for i in range(SLICES)]
    return quantiles(np.array(rates), [0.1])[0]
