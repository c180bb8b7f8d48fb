"""An `Observation` out of a ledger: where requests' time went, and how many were at it at once.

A ledger says nothing of links. How many prefill and how many decode at a time follows from when
they did; that P holds a prompt before it computes it, not after, is an assumption (the router sends
P nothing that D has no room for). How large D's pool is follows where requests wait for room on it:
it holds what was sent then. Where none waits, it is not known, and does not bind.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from twostroke.advice.figures import over
from twostroke.advice.observation import UNKNOWN, Observation
from twostroke.arrays import Float64s
from twostroke.errors import ConfigError
from twostroke.ledger_file import Recorded
from twostroke.plan.scrape import slope

LONG = 0.2  # of a request's time: a wait for room that says that D is full


def observe(path: Path, text: str) -> Observation:
    """ConfigError names the line that is no request, or says that there is none."""
    rows = _rows(path, text)
    ended = [row for row in rows if row.e2e_s is not None]
    if not ended:
        raise ConfigError(f"{path} has no request" + (" that ended" if rows else ""))
    ends = np.array([row.arrival_s + (row.e2e_s or 0.0) for row in ended])
    window_s = float(ends.max() - min(row.arrival_s for row in rows))

    def spent(name: str) -> float:
        known = [row.intervals[name] for row in ended if name in row.intervals]
        return float(np.sum(known)) / len(ended) if known else UNKNOWN

    tpots = [tpot_s for row in ended if (tpot_s := _tpot_s(row)) is not None]
    return Observation(
        source=f"{len(rows)} requests of {path.name}",
        window_s=window_s,
        requests_per_s=over(len(ended), window_s),
        prompt_tokens=float(np.mean([row.prompt_tokens for row in rows])),
        cached_tokens=float(np.mean([row.cached_tokens for row in rows])),
        output_tokens=float(np.mean([row.output_tokens for row in rows])),
        prefill_queue_s=spent("queue"),
        prefill_s=spent("prefill"),
        room_wait_s=spent("held"),
        transfer_s=spent("transfer"),
        decode_queue_s=spent("decode_queue"),
        decode_s=spent("decode"),
        preempted_s=spent("preempted"),
        tpot_s=float(np.mean(tpots)) if tpots else UNKNOWN,
        preemptions_per_request=float(np.mean([row.num_preemptions for row in rows])),
        **_at_once(ended, ends, window_s),
    )


def _rows(path: Path, text: str) -> list[Recorded]:
    decode = msgspec.json.Decoder(Recorded).decode
    rows = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                rows.append(decode(line))
            except msgspec.DecodeError as error:
                raise ConfigError(
                    f"line {number} of {path} is no request of a ledger: {error}",
                    hint="give a ledger, the JSON of a report, or an observation",
                ) from None
    return rows


def _tpot_s(row: Recorded) -> float | None:
    if row.e2e_s is None or row.ttft_s is None or row.output_tokens < 2:
        return None
    return (row.e2e_s - row.ttft_s) / (row.output_tokens - 1)


def _at_once(rows: Sequence[Recorded], ends: Float64s, window_s: float) -> dict[str, float]:
    """What the engines did, if the ledger says how many there were at the end."""
    num_prefill, num_decode = max(rows, key=lambda row: row.arrival_s).engines
    if not (num_prefill and num_decode):
        return {}

    def spent(*names: str) -> Float64s:
        return np.array([sum(row.intervals.get(name, 0.0) for name in names) for row in rows])

    decode_end = ends - spent("egress")
    decode_start = decode_end - spent("decode", "preempted")
    prefill_end = decode_start - spent("decode_queue", "transfer")
    prefill_start = prefill_end - spent("prefill")
    times_s, prefilling = _count(prefill_start, prefill_end)
    busy_s = float((np.minimum(prefilling, num_prefill) * np.diff(times_s)).sum())
    computed = float(sum(row.prompt_tokens - row.cached_tokens for row in rows))
    times_s, decoding = _count(decode_start, decode_end)
    done = np.concatenate(([0.0], np.cumsum(decoding * np.diff(times_s))))
    lasted_s = decode_end - decode_start
    shared = np.interp(decode_end, times_s, done) - np.interp(decode_start, times_s, done)
    points = [
        (math.log(beside / lasted / num_decode), math.log(tpot_s))
        for row, beside, lasted in zip(rows, shared, lasted_s, strict=True)
        if (tpot_s := _tpot_s(row)) and lasted > 0 and beside > 0
    ]
    while_decoding_s = float(np.diff(times_s)[decoding > 0].sum())
    return {
        "num_prefill": float(num_prefill),
        "num_decode": float(num_decode),
        "prefill_busy": min(1.0, over(busy_s, window_s * num_prefill)),
        "prefill_tokens_per_s": over(computed, busy_s),
        "prefill_waiting": over(float(spent("queue").sum()), window_s * num_prefill),
        "prefill_running": over(float(spent("prefill").sum()), window_s * num_prefill),
        "decode_running": over(float(done[-1]), while_decoding_s * num_decode),
        "decode_loading": over(float(spent("transfer").sum()), window_s * num_decode),
        "decode_elasticity": slope(points),
        **_pool(rows, prefill_start - spent("queue"), (decode_start, decode_end), num_decode),
    }


def _pool(
    rows: Sequence[Recorded], sent: Float64s, decodes: tuple[Float64s, Float64s], num_decode: int
) -> dict[str, float]:
    """D's pool and how much of it is in use, where requests that `sent` says waited for room.

    The router counts a request with all of its answer from when it sends it on.
    """
    held = np.array([row.intervals.get("held", 0.0) for row in rows])
    waits = held > LONG * np.array([row.e2e_s for row in rows])
    prompts, outputs = np.array([(row.prompt_tokens, row.output_tokens) for row in rows], float).T
    start, end = decodes
    waited_s = float(held[waits].sum())
    if waited_s <= LONG * float((end - sent + held).sum()):
        return {}
    reserved = _tokens_between(sent, end, prompts + outputs, (sent - held)[waits], sent[waits])
    pool = float(reserved.sum()) / waited_s
    used = float(((prompts + outputs / 2) * (end - start)).sum())
    times_s, decoding = _count(start, end)
    while_decoding_s = float(np.diff(times_s)[decoding > 0].sum())
    return {
        "decode_pool_tokens": pool / num_decode,
        "decode_kv_usage": min(1.0, over(used, while_decoding_s * pool)),
    }


def _tokens_between(
    start: Float64s, end: Float64s, tokens: Float64s, since: Float64s, until: Float64s
) -> Float64s:
    """[spans] Token-seconds between each `since` and `until` of requests from `start` to `end`."""
    times_s = np.concatenate((start, end))
    order = np.argsort(times_s, kind="stable")
    held = np.cumsum(np.concatenate((tokens, -tokens))[order])[:-1]
    times_s = times_s[order]
    done = np.concatenate(([0.0], np.cumsum(held * np.diff(times_s))))
    between: Float64s = np.interp(until, times_s, done) - np.interp(since, times_s, done)
    return between


def _count(start_s: Float64s, end_s: Float64s) -> tuple[Float64s, Float64s]:
    """Times in order, and how many of these spans hold between each and the next."""
    times_s = np.concatenate((start_s, end_s))
    steps = np.concatenate((np.ones(len(start_s)), -np.ones(len(end_s))))
    order = np.argsort(times_s, kind="stable")
    return times_s[order], np.cumsum(steps[order])[:-1]
