"""Prompts on P, from closed forms: how long a step of them takes, and the queue before one P."""

import math
from dataclasses import replace
from fractions import Fraction

from twostroke.advice import closed_form as forms
from twostroke.cost import StepWork
from twostroke.plan.layout import Demand, Pool

ALL_CHANGE = 1.0  # share of P's steps whose rows are others than those of the step before


def prompts_per_step(pool: Pool, demand: Demand) -> float:
    """Whole prompts that a full step holds; below 1 a prompt takes several steps."""
    return min(pool.max_num_batched_tokens / demand.mean_computed, pool.max_num_seqs)


def prefill_s(pool: Pool, demand: Demand, batch: float) -> float:
    """Seconds until `batch` prompts are computed, in as many steps as the token budget makes it."""
    work = demand.prefill_work(batch)
    chunks = math.ceil(work.num_tokens / pool.max_num_batched_tokens - 1e-9)
    if chunks <= 1:
        return pool.cost.step_s(work) + pool.around_s(batch, ALL_CHANGE)
    # A prompt of several chunks is read again by each that follows, half of it on average.
    context = work.context_tokens + work.num_tokens / 2 / batch
    part = StepWork(
        work.num_tokens / chunks,
        max(1.0, work.num_rows / chunks),
        work.num_sampled / chunks,
        context,
        work.attended_tokens / chunks,
    )
    return chunks * (pool.cost.step_s(part) + pool.around_s(part.num_rows, ALL_CHANGE))


def prefill_capacity_per_s(pool: Pool, demand: Demand) -> float:
    """Prompts/s of one engine whose steps are full."""
    batch = prompts_per_step(pool, demand)
    whole = float(max(1, math.floor(batch)))
    return whole / prefill_s(pool, demand, whole)


def _strangers_s(pool: Pool, demand: Demand) -> float:
    """By how much the last step of a prompt is longer for the beginning of the next one.

    A prompt ends at some place in a step, and the rest of the step goes to the next, given that
    there is one: it must wait, and so must another behind it (a chance of the load squared,
    nearly). Prompts of n / m steps each (in lowest terms) end at all multiples of 1 / m in turn,
    and leave (m - 1) / 2m of a step on average: nothing where they fill their steps, half a step
    where their lengths vary. A single seat leaves the rest to nobody.
    """
    if pool.max_num_seqs == 1:
        return 0.0
    steps = demand.mean_computed / pool.max_num_batched_tokens
    left = 0.5
    if demand.computed_scv == 0:
        left -= 0.5 / Fraction(steps).limit_denominator(1000).denominator
    return left * prefill_s(pool, demand, 1.0) / steps


MOST_IN_CHAIN = 8  # prompts a step, up to which the queue is solved exactly


def prefill_line(pool: Pool, demand: Demand) -> forms.Line:
    """The queue before one P, which gets its share of the prompts."""
    rate = demand.rate_per_s / pool.count
    most = max(1, math.floor(prompts_per_step(pool, demand)))
    if most == 1:
        # As if the time of a prompt grew with its tokens.
        line = forms.one_at_a_time(rate, prefill_s(pool, demand, 1.0), demand.computed_scv)
        return replace(line, mates_s=line.busy**2 * _strangers_s(pool, demand))
    if most <= MOST_IN_CHAIN:
        return forms.few_at_a_time(
            rate, [prefill_s(pool, demand, float(n)) for n in range(1, most + 1)]
        )
    alone_s = prefill_s(pool, demand, 1.0)
    each_s = (prefill_s(pool, demand, float(most)) - alone_s) / (most - 1)
    return forms.all_at_once(rate, each_s, max(0.0, alone_s - each_s))
