"""Closed forms of prefill/decode serving, as small functions of plain numbers.

Units are in the names: `_s` seconds, `_per_s` rates, `_tokens`, `_bytes`; shares and utilisations
are 0 to 1. P is an engine that prefills, D one that decodes. A formula outside the range in which
it holds returns infinity (a queue that grows without end), never a wrong number.

Sources, by the number used below:
 [1] rate matching: DistServe, arXiv 2401.09670; 2506.05508
 [2] Erlang C, Allen-Cunneen, M/G/1: Kleinrock, Queueing Systems; batches of growing size: Inoue,
     arXiv 1912.06322
 [3] Little's law
 [4] processor sharing: M/G/1-PS is insensitive to sizes, E[T | x] = x / (1 - rho)
 [5] Mooncake, FAST'25, equation 2
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from twostroke.arrays import Float64s

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


@dataclass(frozen=True, kw_only=True)
class Line:
    """A queue before one server. Times are means in seconds.

    A request takes alone_s + busy * (residual_s + backlog_s) + mates_s: it finds the server at work
    with chance `busy`, waits for the step under way and for what else comes before it, and its own
    step is longer for those that share it, of which there are `in_step` with itself.
    """

    alone_s: float
    busy: float = 0.0
    residual_s: float = 0.0
    backlog_s: float = 0.0
    mates_s: float = 0.0
    in_step: float = 1.0
    by_request: float = 1.0  # share of a step's time that grows with the requests in it

    def latency_s(self, servers: int = 1) -> float:
        """Until the step of a request ends, before so many such servers.

        Each has a queue of its own, and a request goes where least is to be done: it waits only if
        all are at work (Erlang's C), and what is before it is spread over all.
        """
        waits, even = self._spread(servers)
        before_s = self.residual_s / even + self.backlog_s / servers
        return self.alone_s + waits * self.busy * before_s + waits * self.mates_s / even

    def together(self, servers: int = 1) -> float:
        """Requests in the step of one, before so many servers."""
        waits, even = self._spread(servers)
        return 1 + (self.in_step - 1) * waits / even

    def _spread(self, servers: int) -> tuple[float, float]:
        """The chance to wait, over that before one server; and over how many steps are evened out.

        Where time goes with the requests, to send each to the shortest queue is as good as one
        queue before all. Where it does not, all that are at work stay so for as long. In between
        the power was fitted to the twin.
        """
        if servers == 1 or not 0 < self.busy < 1:
            return 1.0, 1.0
        waits = erlang_c(servers, servers * self.busy) / self.busy
        return waits, 1 + (servers - 1) * self.by_request**4


def one_at_a_time(rate_per_s: float, service_s: float, service_scv: float = 0.0) -> Line:
    """M/G/1: steps that one request fills. `rate_per_s` is that of one server [2].

    `service_scv`: variance of the service time over its mean squared.
    """
    busy = rate_per_s * service_s
    if busy >= 1:
        return Line(alone_s=INFINITE)
    residual_s = service_s * (1 + service_scv) / 2
    return Line(
        alone_s=service_s,
        busy=busy,
        residual_s=residual_s,
        backlog_s=residual_s * busy / (1 - busy),
    )


def few_at_a_time(rate_per_s: float, service_s: Sequence[float]) -> Line:
    """A step takes as many of those who wait as fit: n of them last `service_s`[n - 1].

    Exact for Poisson arrivals, by the chain of how many are left behind at the end of each step
    (a transition for each number of arrivals in one); `service_s` is short, or the chain is not.
    """
    most = len(service_s)
    if rate_per_s * service_s[-1] >= most:
        return Line(alone_s=INFINITE)
    waiting = np.arange(STATES_EACH * most)
    taken = np.clip(waiting, 1, most)
    seconds = np.asarray(service_s)[taken - 1]
    coming = _poisson(rate_per_s * seconds, len(waiting))
    left = np.maximum(waiting - taken, 0)
    index = waiting[None, :] - left[:, None]
    chain = np.where(index >= 0, np.take_along_axis(coming, np.maximum(index, 0), axis=1), 0.0)
    chain[:, -1] += 1 - chain.sum(axis=1)
    balance = chain.T - np.eye(len(waiting))
    balance[-1] = 1.0
    chance = np.linalg.solve(balance, np.eye(len(waiting))[-1])
    busy_s = float(chance @ seconds)
    cycle_s = busy_s + float(chance[0]) / rate_per_s
    # Present during a step: those who wait and those in it; on average half of those who come.
    present = seconds * (np.maximum(waiting, 1) + rate_per_s * seconds / 2)
    latency_s = float(chance @ present) / cycle_s / rate_per_s
    served = float(chance @ taken)
    mates_s = float(chance @ (taken * (seconds - seconds[0]))) / served
    busy, residual_s = busy_s / cycle_s, float(chance @ seconds**2) / 2 / busy_s
    return Line(
        alone_s=float(seconds[0]),
        busy=busy,
        residual_s=residual_s,
        backlog_s=max(0.0, (latency_s - float(seconds[0]) - mates_s) / busy - residual_s),
        mates_s=mates_s,
        in_step=float(chance @ taken**2) / served,
        by_request=1 - _fixed_s(service_s) / float(chance @ seconds),
    )


def _fixed_s(service_s: Sequence[float]) -> float:
    """What a step takes whoever is in it, by the line through its shortest and its longest."""
    each_s = (service_s[-1] - service_s[0]) / max(1, len(service_s) - 1)
    return max(0.0, service_s[0] - each_s)


STATES_EACH = 16  # of the chain, for each request that fits into a step


def _poisson(means: Float64s, count: int) -> Float64s:
    """[means, count] Chances of 0, 1, ... arrivals."""
    numbers = np.arange(count)
    logs = np.concatenate([[0.0], np.cumsum(np.log(numbers[1:]))])
    chances: Float64s = np.exp(numbers * np.log(means)[:, None] - means[:, None] - logs)
    return chances


def all_at_once(rate_per_s: float, each_s: float, fixed_s: float) -> Line:
    """A server that, when free, takes all who wait: n of them last fixed + n each.

    The latency is the smaller of Inoue's two upper bounds, tight for Poisson arrivals [2].
    """
    load = rate_per_s * each_s
    if load >= 1:
        return Line(alone_s=INFINITE)
    step = rate_per_s * fixed_s
    small = (each_s + fixed_s) / (2 * (1 - load)) * (1 + 2 * step + (1 - step) / (1 + load))
    large = 1.5 * fixed_s / (1 - load) + each_s / 2 * (load + 2) / (1 - load * load)
    latency_s, alone_s = min(small, large), fixed_s + each_s
    # After a mean step nobody waits with chance `empty`; then the server idles for 1 / rate.
    mean_s, empty = alone_s, 0.0
    for _ in range(20):
        empty = math.exp(-rate_per_s * mean_s)
        mean_s = fixed_s + each_s * (rate_per_s * mean_s + empty)
    busy = rate_per_s * mean_s / (rate_per_s * mean_s + empty)
    # Half of the step under way, of length S, is waited for; S more brings rate * S mates:
    # latency = S / 2 + fixed + each (1 + rate S).
    under_way_s = max(0.0, latency_s - alone_s) / (0.5 + load)
    return Line(
        alone_s=alone_s,
        busy=busy,
        residual_s=under_way_s / 2 / busy if busy > 0 else 0.0,
        mates_s=load * under_way_s,
        in_step=1 + rate_per_s * under_way_s,
        by_request=1 - fixed_s / mean_s,
    )


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


# ---------------------------------------------------------------- 3. what KV holds


def concurrency(pool_tokens: float, tokens_each: float) -> int:
    """Whole requests whose KV fits at once."""
    return int(pool_tokens // tokens_each)


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


def changed_steps(batch: float, output_tokens: float, changes: float) -> float:
    """Share of the steps of `batch` rows before which one of the rows has changed.

    Each request makes so many changes, as when it comes and when it goes, at its own time in
    `output_tokens` steps.
    """
    return 1 - math.exp(-changes * batch / output_tokens)


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


def held_tokens(rate_per_s: float, prompt_tokens: float, held_s: float) -> float:
    """Tokens pinned on P from the prompt's first step until D has read them."""
    return rate_per_s * prompt_tokens * held_s


# ---------------------------------------------------------------- 7. and 8. the link


def shared_transfer_s(
    base_s: float, request_bytes: float, bytes_per_s: float, load: float
) -> float:
    """Mean transfer time on a link shared by all that is in flight, at utilisation `load` [4]."""
    return base_s + request_bytes / (bytes_per_s * (1 - load)) if load < 1 else INFINITE


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
    return INFINITE if saved_s <= 0 else hit_bytes / saved_s


def append_on_decode(
    stall_s: float, running: float, slack: float, through_prefill_s: float
) -> bool:
    """Whether the next turn's new tokens are better prefilled on D.

    They hold up each of D's `running` requests by `stall_s`, which counts the less the more `slack`
    there is (bound on TPOT / TPOT; 1: none). The way through P (queue, compute, transfer) takes
    `through_prefill_s`.
    """
    return slack > 0 and stall_s * max(1.0, running / slack) < through_prefill_s
