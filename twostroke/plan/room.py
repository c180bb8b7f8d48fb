"""Room for KV that is under way, which a pool's size alone does not show.

On D KV arrives before its request decodes: twostroke's router counts that, vLLM does not, and with
as many seats as the pool holds requests there is none left to receive the next. On P a prompt's KV
stays until it has been fetched.
"""

import math
from dataclasses import dataclass

from twostroke.advice import closed_form as forms
from twostroke.plan.analysis import analyse
from twostroke.plan.candidates import link_of
from twostroke.plan.layout import Layout
from twostroke.plan.question import Question


@dataclass(frozen=True, kw_only=True)
class Room:
    """Of one D and one P at the rate asked for. Requests, and a share of P's pool."""

    holds: int  # on D, with their whole answers
    arriving: float  # on D, mean
    staging: int  # places beside all seats of D; 0 or less: none
    advised_seats: int  # of D, so that there is room for twice what arrives
    held_share: float  # of P's pool, waiting to be fetched or computed
    hold_limit: float


def room_of(question: Question, layout: Layout) -> Room:
    """Needs a layout with P and D."""
    prefill, decode = layout.prefill, layout.decode
    assert prefill is not None
    assert decode is not None
    demand = question.demand
    it = analyse(layout, demand, link_of(question, layout), kv_mode=question.engines.kv_mode)
    rate = min(demand.rate_per_s, it.capacity_per_s)
    each = demand.mean_prompt + demand.mean_output
    holds = forms.concurrency(decode.kv_tokens, each)
    arriving = forms.in_flight(rate / decode.count, it.parts_s["transfer"])
    needed = math.ceil(2 * arriving) if math.isfinite(arriving) else 1
    held_s = it.parts_s["prefill"] + it.parts_s["transfer"]
    held = forms.held_tokens(rate / prefill.count, demand.mean_prompt, held_s)
    return Room(
        holds=holds,
        arriving=arriving,
        staging=forms.staging_slots(decode.kv_tokens, each, decode.max_num_seqs),
        advised_seats=max(1, min(decode.max_num_seqs, holds - max(1, needed))),
        held_share=held / prefill.kv_tokens,
        hold_limit=prefill.pin_share,
    )
