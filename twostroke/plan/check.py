"""What the twin makes of a layout: the real schedulers under the load, on a virtual clock."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from twostroke.arrays import quantiles
from twostroke.config import SchedulerConfig
from twostroke.cost import BandwidthCurve
from twostroke.plan.candidates import kv_layout, link_of
from twostroke.plan.layout import Layout, Pool
from twostroke.plan.question import ATTAINMENT, Question
from twostroke.router.engines import Role
from twostroke.router.jobs import DispatchSettings
from twostroke.twin.scenario import EngineGroup, Result, Scenario, simulate
from twostroke.twin.transfers import Link
from twostroke.twin.workload import Workload, from_spec

# A load drawn from a spec is made so long, so that the start counts little; but no longer than the
# twin takes a few seconds for, unless more is asked for.
STEADY_S = 60.0
MOST_REQUESTS = 600
OF_WHAT_IS_LEFT = 0.7
RATES = (1.0, 0.9, 0.8, 0.65, 0.5)  # of what closed forms promise, until one is carried


@dataclass(frozen=True, kw_only=True)
class Checked:
    """A layout's run in the twin at `rate_per_s`. Times in seconds."""

    rate_per_s: float
    attainment: float
    goodput_per_s: float
    throughput_per_s: float
    ttft_mean_s: float
    ttft_p99_s: float
    tpot_mean_s: float
    tpot_p99_s: float
    preemptions: int
    num_requests: int
    failed: int
    wall_s: float

    @property
    def is_attained(self) -> bool:
        return self.attainment >= ATTAINMENT


def check(
    question: Question,
    layout: Layout,
    rate_per_s: float,
    on_share: Callable[[float], None] = lambda share: None,
) -> Checked:
    """Run the layout at `rate_per_s`, and at less until the SLO is met; the last run counts.

    `on_share` is told how far it is, from 0 to 1. How many runs it takes is not known: each fills
    `OF_WHAT_IS_LEFT`, so that it never goes back.
    """
    left = 1.0
    for share in RATES:

        def show(of_run: float, left: float = left) -> None:
            on_share(1 - left * (1 - OF_WHAT_IS_LEFT * of_run))

        checked = run_at(question, layout, rate_per_s * share, show)
        if checked.is_attained:
            break
        left *= 1 - OF_WHAT_IS_LEFT
    return checked


def run_at(
    question: Question,
    layout: Layout,
    rate_per_s: float,
    on_share: Callable[[float], None] = lambda share: None,
) -> Checked:
    """One run of the layout with the question's requests coming at `rate_per_s`."""
    workload = load_at(question, rate_per_s)
    result = simulate(
        scenario_of(question, layout, workload),
        on_done=lambda count: on_share(count / len(workload)),
    )
    return summarise(question, result, rate_per_s)


def summarise(question: Question, result: Result, rate_per_s: float) -> Checked:
    """The figures of a run. Requests with one token have no TPOT, and meet any bound on it."""
    done = result.done
    tpot_s = np.nan_to_num(result.tpot_s, nan=0.0)
    good = done & (result.ttft_s <= question.slo.ttft_s) & (tpot_s <= question.slo.tpot_s)
    attainment = float(good.mean())
    ttft_s, known_tpot_s = result.ttft_s[done], result.tpot_s[done & np.isfinite(result.tpot_s)]
    return Checked(
        rate_per_s=rate_per_s,
        attainment=attainment,
        goodput_per_s=rate_per_s * attainment,
        throughput_per_s=result.request_rate,
        ttft_mean_s=float(ttft_s.mean()) if len(ttft_s) else float("inf"),
        ttft_p99_s=quantiles(ttft_s, [0.99])[0] if len(ttft_s) else float("inf"),
        tpot_mean_s=float(known_tpot_s.mean()) if len(known_tpot_s) else 0.0,
        tpot_p99_s=quantiles(known_tpot_s, [0.99])[0] if len(known_tpot_s) else 0.0,
        preemptions=int(result.num_preemptions.sum()),
        num_requests=len(done),
        failed=len(result.errors),
        wall_s=result.wall_s,
    )


def load_at(question: Question, rate_per_s: float) -> Workload:
    """The question's requests at another rate, and if they come from a spec, enough of them."""
    workload, demand = question.workload, question.demand
    kind, colon, rest = workload.name.partition(":")
    if colon and "n=" in rest:
        count = max(len(workload), min(MOST_REQUESTS, round(rate_per_s * STEADY_S)))
        fields = [part for part in rest.split(",")[1:] if not part.strip().startswith("n=")]
        text = ",".join([f"{kind}:{rate_per_s!r}/s", *fields, f"n={count}"])
        return from_spec(text, seed=question.seed)
    workload = workload.head(MOST_REQUESTS)
    if not math.isfinite(demand.rate_per_s):
        return workload  # all at once, at any rate
    return workload.scaled(rate_per_s / demand.rate_per_s)


def scenario_of(question: Question, layout: Layout, workload: Workload) -> Scenario:
    """The layout as the twin's engines and links."""
    link = link_of(question, layout)
    roles: list[tuple[Pool | None, Role]] = [
        (layout.prefill, "prefill"),
        (layout.decode, "decode"),
        (layout.both, "both"),
    ]
    engines = [_group(question, pool, role) for pool, role in roles if pool is not None]
    settings = DispatchSettings(kv_mode=question.engines.kv_mode)
    scenario = Scenario(
        engines=engines, workload=workload, settings=settings, record_timelines=False
    )
    if link is None:
        return scenario
    curve = BandwidthCurve((0.0,), (link.bytes_per_s,))
    return replace(
        scenario,
        link=Link(bandwidth=curve, base_s=link.base_s, message_s=link.message_s),
    )


def _group(question: Question, pool: Pool, role: Role) -> EngineGroup:
    return EngineGroup(
        role=role,
        cost=pool.cost,
        config=SchedulerConfig(
            block_size=pool.block_size,
            num_blocks=pool.kv_tokens // pool.block_size + 1,
            max_num_seqs=pool.max_num_seqs,
            max_num_batched_tokens=pool.max_num_batched_tokens,
            max_model_len=question.longest_tokens + 1,
        ),
        layout=kv_layout(question, pool.tensor_parallel_size),
        count=pool.count,
        host=pool.host,
        max_hold_share=pool.pin_share,
    )
