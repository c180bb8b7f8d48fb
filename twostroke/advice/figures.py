"""Figures that several verdicts rest on, out of an `Observation`. NaN where they cannot be told."""

import math

from twostroke.advice.observation import UNKNOWN, Observation

FULL = 0.9  # share of a pool, of seats or of a bound from which it counts as used up
USUAL_ELASTICITY = 0.6  # of an H100 at TP8 from 64 to 288 rows, for where it was not measured
SHORT = 0.05  # of a request's time: a wait that says that nothing is used up
FILLED = 0.97  # of a pool: what is left is less than a prompt


def known(value: float, otherwise: float = 0.0) -> float:
    """The value, or what to take for one that is not known."""
    return otherwise if math.isnan(value) else value


def over(value: float, by: float) -> float:
    """A quotient; not known when `by` is not above zero."""
    return value / by if by > 0 else UNKNOWN


def request_s(seen: Observation) -> float:
    """Mean time of a request from P's queue to its last token: the sum of what is known."""
    parts = (
        seen.prefill_queue_s,
        seen.prefill_pin_wait_s,
        seen.prefill_s,
        seen.room_wait_s,
        seen.transfer_s,
        seen.decode_queue_s,
        seen.preempted_s,
    )
    return seen.decode_s + sum(map(known, parts))


def carried_per_s(seen: Observation) -> float:
    """Requests/s of the slower side, all its engines together."""
    sides = (
        seen.num_prefill * prefill_capacity_per_s(seen),
        seen.num_decode * decode_capacity_per_s(seen),
    )
    return UNKNOWN if math.isnan(sum(sides)) else min(sides)


def loading(seen: Observation) -> float:
    """Requests of a D that wait for nothing but their transfer.

    Where KV streams D has blocks for them before P computes, so most of them wait for P.
    """
    if seen.kv_streams > 0:
        return over(seen.requests_per_s * seen.transfer_s, seen.num_decode)
    return seen.decode_loading


def decode_kv_usage(seen: Observation) -> float:
    """Share of D's KV in use by what it decodes or reads, not by what waits for P."""
    if seen.kv_streams > 0:
        its = seen.decode_running + known(loading(seen))
        return seen.decode_kv_usage * over(its, seen.decode_running + known(seen.decode_loading))
    return seen.decode_kv_usage


def decode_saturation(seen: Observation) -> str:
    """What of D is used up: kv, seats or nothing; unknown without its gauges."""
    if seen.decode_running >= FULL * seen.decode_max_num_seqs:
        return "seats"
    usage = decode_kv_usage(seen)
    if usage >= FULL or decode_places(seen) <= 1 / FULL:
        return "kv"
    if not seen.kv_streams > 0 and _is_blocked_with_blocks_left(seen):
        return "kv"
    if math.isnan(usage):
        return "nothing" if _nobody_waits_for_decode(seen) else "unknown"
    return "nothing"


def _nobody_waits_for_decode(seen: Observation) -> bool:
    """Whether D took what came: no gauges are needed to know that it had room then."""
    waits_s = seen.room_wait_s + known(seen.decode_queue_s) + known(seen.preempted_s)
    return waits_s <= SHORT * request_s(seen)


def decode_places(seen: Observation) -> float:
    """Requests that a D's pool holds with their whole answers, over those that it has.

    A router that sends no more than will fit keeps a D full at 1, while its blocks fill up slowly.
    """
    holds = over(seen.decode_pool_tokens, seen.prompt_tokens + seen.output_tokens)
    return over(holds, seen.decode_running + known(loading(seen)))


def _is_blocked_with_blocks_left(seen: Observation) -> bool:
    """Whether requests wait since the free blocks are too few for one prompt more."""
    free_tokens = (1 - seen.decode_kv_usage) * seen.decode_pool_tokens
    return free_tokens < 1.5 * seen.prompt_tokens and seen.decode_waiting >= 1


def elasticity(seen: Observation) -> float:
    """dt/dB * B/t at the batch seen, or the usual one."""
    return min(1.0, max(0.0, known(seen.decode_elasticity, USUAL_ELASTICITY)))


def prefill_capacity_per_s(seen: Observation) -> float:
    """Requests/s of one P: as fast as it was while it computed."""
    computed = seen.prompt_tokens - known(seen.cached_tokens)
    if seen.prefill_tokens_per_s > 0 and computed > 0:
        return seen.prefill_tokens_per_s / computed
    return over(seen.requests_per_s, seen.num_prefill * seen.prefill_busy)


def prefill_tokens_per_s(seen: Observation) -> float:
    """Tokens/s that one P computes while it computes."""
    computed = seen.prompt_tokens - known(seen.cached_tokens)
    return known(seen.prefill_tokens_per_s, prefill_capacity_per_s(seen) * computed)


def decode_room(seen: Observation) -> float:
    """By what factor the batch of D could grow before its KV or its seats are used up.

    What is loading counts as room: on a link that is fast enough it would decode.
    """
    there = over(seen.decode_running + known(loading(seen)), seen.decode_running)
    limits = (
        there * over(FILLED, decode_kv_usage(seen)),
        there * decode_places(seen),
        over(seen.decode_max_num_seqs, seen.decode_running),
    )
    told = [limit for limit in limits if not math.isnan(limit)]
    return max(1.0, min(told)) if told else UNKNOWN


def decode_capacity_per_s(seen: Observation) -> float:
    """Requests/s of one D with the batch that its KV, seats and bound on TPOT allow."""
    now = over(seen.decode_running, seen.output_tokens * seen.tpot_s)
    power, growth = elasticity(seen), decode_room(seen)
    if seen.tpot_slo_s > 0 and seen.tpot_s > 0 and power > 0:
        allowed = (seen.tpot_slo_s / seen.tpot_s - 1 + power) / power
        growth = min(known(growth, math.inf), max(allowed, over(1.0, seen.decode_running)))
    return now * batch_gain(growth, power)


def batch_gain(growth: float, elasticity: float) -> float:
    """What a batch so many times as large brings in tokens/s.

    A step over B rows is taken to last a + b B, of which b B is the share `elasticity` at present.
    """
    return over(growth, 1 - elasticity + elasticity * growth)


def link_load(seen: Observation, *, low: bool = False) -> float:
    """Utilisation of the links; with `low` as it is while their rate is at its low."""
    rate = known(seen.link_low_bytes_per_s, seen.link_bytes_per_s) if low else seen.link_bytes_per_s
    return over(moved_bytes_per_s(seen), rate * known(seen.num_links, 1))


def moved_bytes_per_s(seen: Observation) -> float:
    """Over all links: as counted, or as much as the requests' prompts are."""
    return known(seen.transfer_bytes_per_s, seen.requests_per_s * request_bytes(seen))


def request_bytes(seen: Observation) -> float:
    """KV of one request that moves: as counted, or all of its prompt's."""
    return known(seen.transfer_bytes, seen.prompt_tokens * seen.kv_token_bytes)
