"""Closed forms of prefill/decode serving, as small functions of plain numbers.

Units are in the names: `_s` seconds, `_per_s` rates, `_tokens`, `_bytes`; shares and utilisations
are 0 to 1. P is an engine that prefills, D one that decodes. A formula outside the range in which
it holds returns infinity (a queue that grows without end), never a wrong number.

Sources, by the number used below:
 [1] rate matching: DistServe, arXiv 2401.09670; 2506.05508
 [2] Erlang C and Allen-Cunneen: Kleinrock, Queueing Systems; batches of growing size: Inoue,
     arXiv 1912.06322; P for a bound on TTFT: arXiv 2603.04716
 [3] residency of KV: Little's law; arXiv 2605.04595
 [4] processor sharing: M/G/1-PS is insensitive to sizes, E[T | x] = x / (1 - rho)
 [5] Mooncake, FAST'25, equation 2
"""

import math
from collections.abc import Callable, Sequence

INFINITE = math.inf

# ---------------------------------------------------------------- 1. how many P for each D


def decode_per_s(batch: float, output_tokens: float, step_s: float) -> float:
    """Requests/s that a D ends while `batch` of them take one token each `step_s` [1]."""
    return batch / (output_tokens * step_s)


def prefill_per_decode(prefill_per_s: float, decode_per_s: float) -> float:
    """P engines per D engine at which neither waits for the other: n_P mu_P = n_D mu_D [1]."""
    return decode_per_s / prefill_per_s if prefill_per_s > 0 else INFINITE


def nearest_ratio(prefill_per_decode: float, most_engines: int) -> tuple[int, int]:
    """(P, D) of at most `most_engines` engines in all, at least one each, closest to a ratio.

    Closeness is that of the slower side's share: 3:2 for 1.4 rather than 1:1.
    """
    best, best_error = (1, 1), INFINITE
    wanted = min(max(1 / most_engines, prefill_per_decode), most_engines)
    for total in range(2, most_engines + 1):
        prefill = min(total - 1, max(1, round(total * wanted / (1 + wanted))))
        error = abs(math.log(prefill / (total - prefill) / wanted))
        if error < best_error - 1e-9:
            best, best_error = (prefill, total - prefill), error
    return best


def best_split(
    engines: int, prefill_per_s: float, decode_per_s: float, link_per_s: float = INFINITE
) -> tuple[int, int]:
    """(P, D) of so many engines that carries most; each has a link that moves `link_per_s`."""

    def carried(split: tuple[int, int]) -> float:
        prefill, decode = split
        return min(prefill * prefill_per_s, decode * decode_per_s, min(split) * link_per_s)

    return max(((p, engines - p) for p in range(1, engines)), key=carried, default=(1, 1))


# ---------------------------------------------------------------- 2. queues before P


def erlang_c(servers: int, offered: float) -> float:
    """Probability that an arrival waits in M/M/c; `offered` = rate * mean service time [2]."""
    if offered >= servers:
        return 1.0
    blocked = 1.0  # Erlang B, by its recursion: no factorials that overflow
    for n in range(1, servers + 1):
        blocked = offered * blocked / (n + offered * blocked)
    return blocked / (1 - offered / servers * (1 - blocked))


def wait_mgc_s(
    rate_per_s: float, service_s: float, servers: int = 1, service_scv: float = 0.0
) -> float:
    """Mean wait before `servers` servers that take one request at a time (Allen-Cunneen) [2].

    Arrivals are Poisson. `service_scv`: variance of the service time over its mean squared. One
    server gives the exact M/G/1 result rate * E[S^2] / (2 (1 - rho)).
    """
    offered = rate_per_s * service_s
    if offered >= servers:
        return INFINITE
    waits = erlang_c(servers, offered)
    return waits * service_s / (servers - offered) * (1 + service_scv) / 2


def batch_latency_s(rate_per_s: float, each_s: float, fixed_s: float) -> float:
    """Mean time in a server that, when free, takes all who wait: a batch of n lasts fixed + n each.

    The smaller of Inoue's two upper bounds, which are tight for Poisson arrivals [2].
    """
    load = rate_per_s * each_s
    if load >= 1:
        return INFINITE
    step = rate_per_s * fixed_s
    small = (each_s + fixed_s) / (2 * (1 - load)) * (1 + 2 * step + (1 - step) / (1 + load))
    large = 1.5 * fixed_s / (1 - load) + each_s / 2 * (load + 2) / (1 - load * load)
    return min(small, large)


def steps_in_a_row_s(rate_per_s: float, each_s: float, fixed_s: float) -> tuple[float, float]:
    """Mean step of a server that never idles, and the mean step that a random moment falls into.

    Each step takes whoever came during one before: S' = fixed + each * N, N Poisson of rate * S.
    So E[S] = fixed / (1 - a) and E[S^2] (1 - a^2) = fixed^2 + (2 fixed + each) a E[S], with
    a = rate * each; a moment falls into E[S^2] / E[S].
    """
    load = rate_per_s * each_s
    if load >= 1:
        return INFINITE, INFINITE
    mean = fixed_s / (1 - load)
    square = (fixed_s**2 + (2 * fixed_s + each_s) * load * mean) / (1 - load**2)
    return mean, square / mean


def batch_mates(rate_per_s: float, latency_s: float, each_s: float, fixed_s: float) -> float:
    """How large the batch is that a request finds itself in, by `batch_latency_s`.

    It waits half of the service under way (of length S), and S more brings rate * S mates:
    latency = S / 2 + fixed + each (1 + rate S).
    """
    under_way_s = (latency_s - fixed_s - each_s) / (0.5 + rate_per_s * each_s)
    return 1 + rate_per_s * max(0.0, under_way_s)


def rate_for_ttft_per_s(prefill_per_s: float, ttft_s: float, transfer_s: float) -> float:
    """Rate that one P (as M/M/1) takes so that mean TTFT stays below `ttft_s` [2]."""
    left_s = ttft_s - transfer_s
    return max(0.0, prefill_per_s - 1 / left_s) if left_s > 0 else 0.0


# ---------------------------------------------------------------- 3. what KV holds


def concurrency(pool_tokens: float, tokens_each: float) -> int:
    """Whole requests whose KV fits at once."""
    return int(pool_tokens // tokens_each)


def residency_token_steps(prompt_tokens: float, output_tokens: float) -> float:
    """Tokens held, summed over a request's decode steps: O * I + O (O + 1) / 2 [3]."""
    return output_tokens * prompt_tokens + output_tokens * (output_tokens + 1) / 2


def residency_per_s(pool_tokens: float, step_s: float, token_steps: float) -> float:
    """Most requests/s that a pool lets through while each step lasts `step_s` [3]."""
    return pool_tokens / (step_s * token_steps)


def in_flight(rate_per_s: float, seconds_each: float) -> float:
    """Little's law: requests present at once."""
    return rate_per_s * seconds_each


# ---------------------------------------------------------------- 4. KV or compute


def decode_batch(
    rate_per_s: float,
    output_tokens: float,
    step_s: Callable[[float], float],
    most: float,
    engines: int = 1,
) -> float:
    """Mean batch at which a D keeps up: the smallest B = rate * O * t(`seen_batch`).

    `rate_per_s` is that of one of `engines`. Infinity past `most`. For one engine with
    t(B) = a + b B it is rate O (a + b) / (1 - rate O b).
    """
    tokens_per_s = rate_per_s * output_tokens

    def wanted(batch: float) -> float:
        return tokens_per_s * step_s(seen_batch(batch, engines))

    # Newton's method: steps get longer by nearly as much for each row, so few rounds do. The slope
    # is taken over whole rows, since some costs have steps there.
    batch = wanted(0.0)
    for _ in range(50):
        if not batch <= most:
            return INFINITE
        here = wanted(batch)
        if abs(here - batch) <= 1e-6 * max(1.0, here):
            return here
        width = max(2.0, 0.1 * batch)
        slope = (wanted(batch + width) - here) / width
        # Where a row costs more than a row's time, no batch keeps up, unless a larger one does.
        batch = max(0.0, batch + (here - batch) / (1 - slope)) if slope < 0.999 else 2 * batch + 1
    return batch


def seen_batch(batch: float, engines: int = 1) -> float:
    """Rows in the steps of a request, itself among them, where the mean over time is `batch`.

    Requests are as many as in M/G/infinity (Poisson) and spread evenly, so rows have a mean of B
    and a variance of B / engines, and who is in a step sees E[B^2] / E[B].
    """
    return batch + 1 / engines


def largest_batch(step_s: Callable[[float], float], limit_s: float, most: int) -> int:
    """Most rows of a step that lasts at most `limit_s`; 0 when even one row takes longer."""
    if step_s(1) > limit_s:
        return 0
    low, high = 1, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if step_s(middle) <= limit_s else (low, middle - 1)
    return low


def batch_elasticity(step_s: Callable[[float], float], batch: float) -> float:
    """dt/dB * B/t: near 0 a larger batch is nearly free, at 1 it brings no more throughput."""
    more = batch * 1.02
    return math.log(step_s(more) / step_s(batch)) / math.log(1.02)


# ---------------------------------------------------------------- 5. and 6. room on D, pins on P


def staging_slots(pool_tokens: float, tokens_each: float, max_num_seqs: int) -> int:
    """Requests whose KV can arrive on D while `max_num_seqs` others decode; below 1 D stalls."""
    return concurrency(pool_tokens, tokens_each) - max_num_seqs


def staging_bytes_per_s(slots: int, request_bytes: float, transfer_s: float) -> float:
    """Most bytes/s that can arrive in `slots` at a time."""
    return max(0, slots) * request_bytes / transfer_s


def held_tokens(rate_per_s: float, prompt_tokens: float, held_s: float) -> float:
    """Tokens pinned on P from the prompt's first step until D has read them."""
    return rate_per_s * prompt_tokens * held_s


# ---------------------------------------------------------------- 7. and 8. the link


def link_utilisation(rate_per_s: float, request_bytes: float, bytes_per_s: float) -> float:
    """Share of a link's rate that is asked for."""
    return rate_per_s * request_bytes / bytes_per_s


def shared_transfer_s(
    base_s: float, request_bytes: float, bytes_per_s: float, load: float
) -> float:
    """Mean transfer time on a link shared by all that is in flight, at utilisation `load` [4]."""
    return base_s + request_bytes / (bytes_per_s * (1 - load)) if load < 1 else INFINITE


def largest_backlog_bytes(spans: Sequence[tuple[float, float]], demand_bytes_per_s: float) -> float:
    """Most bytes that pile up when a link has, in turn, each (seconds, bytes/s) of `spans`."""
    backlog = worst = 0.0
    for seconds, bytes_per_s in spans:
        backlog = max(0.0, backlog + seconds * (demand_bytes_per_s - bytes_per_s))
        worst = max(worst, backlog)
    return worst


def message_efficiency(message_bytes: float, message_s: float, bytes_per_s: float) -> float:
    """Share of a link's rate that messages of one size reach when each costs `message_s` more."""
    if message_bytes <= 0:
        return 0.0
    return message_bytes / (message_bytes + message_s * bytes_per_s)


def message_bytes_for(efficiency: float, message_s: float, bytes_per_s: float) -> float:
    """Size from which messages reach that share of the rate: 4 * cost * rate for 80 %."""
    return efficiency / (1 - efficiency) * message_s * bytes_per_s


# ---------------------------------------------------------------- 9. and 10. where to compute


def worth_moving_bytes_per_s(hit_bytes: float, saved_s: float) -> float:
    """Rate above which moving a prefix's KV beats computing it again, which takes `saved_s` [5]."""
    return hit_bytes / saved_s if saved_s > 0 else INFINITE


def append_on_decode(
    stall_s: float, running: float, slack: float, through_prefill_s: float
) -> bool:
    """Whether the next turn's new tokens are better prefilled on D.

    They hold up each of D's `running` requests by `stall_s`, which counts the less the more `slack`
    there is (bound on TPOT / TPOT; 1: none). The way through P (queue, compute, transfer) takes
    `through_prefill_s`.
    """
    return slack > 0 and stall_s * max(1.0, running / slack) < through_prefill_s
