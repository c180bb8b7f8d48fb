"""Closed forms against the twin on a grid of 104 cases.

    python benchmarks/closed_forms_vs_twin.py [--every N --first K] [--changed-ms T]

Each case is a layout, a load and what is compared: throughput where one constraint is overloaded;
TTFT and TPOT where all is stable. Where a closed form says that it does not apply, that is shown
instead. A run of the twin is a sample: closed forms are asked at the rate that came in it, and a
case is run with new arrivals until the mean of each deviation is known to PRECISE (its standard
error), or SEEDS times. The last lines count how many figures lie within 5 %, and name the others.
"""

import argparse
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from twostroke.config import SchedulerConfig
from twostroke.cost import BandwidthCurve, HostCost, LinearStepCost, LinkCost
from twostroke.kv.sizing import KvLayout
from twostroke.plan.analysis import Analysis, Figure, analyse
from twostroke.plan.layout import Demand, KvMode, Layout, Pool
from twostroke.router.jobs import DispatchSettings
from twostroke.twin.scenario import EngineGroup, Result, Role, Scenario, simulate
from twostroke.twin.transfers import Link
from twostroke.twin.workload import from_spec

KV = KvLayout(num_layers=32, num_kv_heads=8, head_dim=128)
COSTS = {
    # Cheap tokens and dear context; the reverse; and a large constant a step.
    "memory": LinearStepCost(base_s=6e-3, token_s=1.2e-5, row_s=1e-5, context_s=1.5e-7),
    "compute": LinearStepCost(
        base_s=3e-3, token_s=4e-5, row_s=4e-5, context_s=2e-8, attended_s=4e-9
    ),
    "constant": LinearStepCost(base_s=2e-2, token_s=1e-5, row_s=2e-5, context_s=2e-8),
}
FAST = LinkCost(base_s=1e-3, bytes_per_s=40e9)
ROLES: tuple[Role, ...] = ("prefill", "decode", "both")
TOLERANCE = 0.05
PRECISE = 0.01
SEEDS = 24


@dataclass(frozen=True, kw_only=True)
class Case:
    """`load` is the rate over what the layout's first constraint lets through."""

    name: str
    layout: Layout
    prompt: int
    output: int
    load: float
    link: LinkCost = FAST
    kv_mode: KvMode = "pull"

    @property
    def capacity_per_s(self) -> float:
        """What the binding constraint lets through, by closed form."""
        demand = Demand.of([self.prompt], [self.output], 1.0)
        return analyse(self.layout, demand, self.link, kv_mode=self.kv_mode).capacity_per_s

    @property
    def rate_per_s(self) -> float:
        return self.load * self.capacity_per_s

    def with_changes(self, seconds: float) -> "Case":
        """The same where a step with other rows than the one before takes so much longer."""
        host = HostCost(changed_s=seconds)
        pools = {
            role: replace(pool, host=host)
            for role in ROLES
            if (pool := getattr(self.layout, role)) is not None
        }
        return replace(self, layout=Layout(**pools))

    def predict(self, rate_per_s: float | None = None) -> Analysis:
        """By closed forms; at its own rate, or at one that came."""
        demand = Demand.of([self.prompt], [self.output], rate_per_s or self.rate_per_s)
        return analyse(self.layout, demand, self.link, kv_mode=self.kv_mode)

    @property
    def num_requests(self) -> int:
        """Enough for a steady middle: many times what is in flight."""
        analysis = self.predict()
        in_flight = analysis.batch * sum(
            pool.count for pool in (self.layout.decode, self.layout.both) if pool is not None
        )
        return int(min(3000, max(600, 10 * in_flight)))


def pool(cost: str, count: int = 1, **sizes: int) -> Pool:
    """Engines of one GPU with so much KV, so many seats and tokens a step."""
    return Pool(
        count=count,
        tensor_parallel_size=1,
        kv_tokens=sizes.get("kv", 400_000),
        kv_token_bytes=KV.token_bytes,
        max_num_seqs=sizes.get("seats", 512),
        max_num_batched_tokens=sizes.get("budget", 8192),
        cost=COSTS[cost],
    )


def cases() -> Iterator[Case]:
    """104 of them."""
    lengths = [(512, 128), (2048, 64), (4096, 256)]
    for cost, (prompt, output) in itertools.product(COSTS, lengths):
        sizes = {"prompt": prompt, "output": output}
        few = 24 * (prompt + output)

        def pd(prefill: int, decode: int, cost: str = cost, **decoders: int) -> Layout:
            return Layout(prefill=pool(cost, prefill), decode=pool(cost, decode, **decoders))

        both = Layout(both=pool(cost, 1))
        yield Case(name=f"{cost} P overloaded", layout=pd(1, 4), load=1.4, **sizes)
        yield Case(name=f"{cost} D's KV overloaded", layout=pd(4, 1, kv=few), load=1.4, **sizes)
        yield Case(
            name=f"{cost} D's seats overloaded", layout=pd(4, 1, seats=16), load=1.4, **sizes
        )
        yield Case(name=f"{cost} together, seats", layout=Layout(both=pool(cost, seats=24)),
                   load=1.4, **sizes)  # fmt: skip
        for load in (0.2, 0.5, 0.7):
            yield Case(name=f"{cost} stable", layout=pd(2, 2), load=load, **sizes)
        for load in (0.3, 0.6):
            yield Case(name=f"{cost} together", layout=both, load=load, **sizes)
        slow = replace(FAST, bytes_per_s=2e9)
        yield Case(
            name=f"{cost} link overloaded",
            layout=pd(4, 1, kv=4 * few),
            load=1.4,
            link=slow,
            **sizes,
        )
        yield Case(name=f"{cost} many engines", layout=pd(3, 5), load=0.6, **sizes)
    for name, prompt, budget in (
        ("a prompt in four steps", 8192, 2048),
        ("in a step and a half", 3072, 2048),
        ("three in four steps", 6144, 8192),
    ):
        prefill = pool("compute", budget=budget)
        yield Case(name=name, layout=Layout(prefill=prefill, decode=pool("compute", 2)),
                   prompt=prompt, output=64, load=0.5)  # fmt: skip
    streams = Layout(prefill=pool("compute", 2, budget=2048), decode=pool("compute", 2))
    for name, link in (("streams", FAST), ("streams, slow link", replace(FAST, bytes_per_s=6e9))):
        yield Case(name=name, layout=streams, prompt=8192, output=64, load=0.4, link=link,
                   kv_mode="stream")  # fmt: skip


def run(case: Case, seed: int) -> Result:
    """By the twin."""
    rate, longest = case.rate_per_s, case.prompt + case.output
    spec = f"poisson:{rate!r}/s,in={case.prompt},out={case.output},n={case.num_requests}"
    engines = [
        _group(pool, role, longest)
        for role in ROLES
        if (pool := getattr(case.layout, role)) is not None
    ]
    link = Link(bandwidth=BandwidthCurve((0.0,), (case.link.bytes_per_s,)), base_s=case.link.base_s)
    return simulate(
        Scenario(
            engines=engines,
            workload=from_spec(spec, seed=seed),
            link=link,
            settings=DispatchSettings(kv_mode=case.kv_mode),
            record_timelines=False,
        )
    )


def _group(pool: Pool, role: Role, longest: int) -> EngineGroup:
    config = SchedulerConfig(
        num_blocks=pool.kv_tokens // pool.block_size + 1,
        max_num_seqs=pool.max_num_seqs,
        max_num_batched_tokens=pool.max_num_batched_tokens,
        max_model_len=longest + 1,
        enable_prefix_caching=False,
    )
    return EngineGroup(
        role=role, cost=pool.cost, host=pool.host, config=config, layout=KV, count=pool.count
    )


def steady_rate_per_s(result: Result) -> float:
    """Requests/s between the first and the last quarter of the ends, where all is in full swing."""
    ends = np.sort((result.arrival_s + result.e2e_s)[result.done])
    low, high = len(ends) // 4, 3 * len(ends) // 4
    return float((high - low) / (ends[high] - ends[low]))


def figures(case: Case, analysis: Analysis, result: Result) -> dict[str, tuple[Figure, float]]:
    """What is compared, by name: closed form, twin."""
    middle = slice(len(result.ttft_s) // 5, None)
    if case.load > 1:
        return {"throughput": (analysis.throughput_per_s, steady_rate_per_s(result))}
    return {
        "TTFT": (analysis.ttft_s, float(np.nanmean(result.ttft_s[middle]))),
        "TPOT": (analysis.tpot_s, float(np.nanmean(result.tpot_s[middle]))),
    }


@dataclass(frozen=True)
class Compared:
    """A figure by closed form and by the twin, as means over runs; and how far apart they are."""

    closed: float
    twin: float
    reason: str
    error: float  # standard error of `off`

    @property
    def off(self) -> float:
        return self.closed / self.twin - 1 if math.isfinite(self.closed) else math.inf


def compare(case: Case) -> dict[str, Compared]:
    """Run the case until its figures are known well enough."""
    seen: dict[str, list[tuple[float, float]]] = {}
    found: dict[str, Compared] = {}
    for seed in range(SEEDS):
        result = run(case, seed)
        came = (len(result.arrival_s) - 1) / float(result.arrival_s[-1] - result.arrival_s[0])
        analysis = case.predict(None if case.load > 1 else came)
        for name, (figure, measured) in figures(case, analysis, result).items():
            seen.setdefault(name, []).append((figure.value, measured))
            closed, twin = np.array(seen[name]).T
            error = (closed / twin).std(ddof=1) / math.sqrt(len(twin)) if seed else math.inf
            found[name] = Compared(closed.mean(), twin.mean(), figure.reason, error)
        # Two runs may be alike by chance.
        if seed >= 2 and all(it.error <= PRECISE for it in found.values()):
            break
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--every", type=int, default=1, help="only every so many cases")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--changed-ms", type=float, default=0.0, help="HostCost.changed_s")
    options = parser.parse_args()
    total = good = refused = 0
    exceptions = []
    print(
        f"{'case':26}{'lengths':>10}{'load':>6}{'figure':>12}{'closed':>10}{'twin':>10}"
        f"{'off':>8}{'+-':>7}  binding"
    )
    chosen = itertools.islice(cases(), options.first, None, options.every)
    for case in (it.with_changes(options.changed_ms / 1e3) for it in chosen):
        for name, it in compare(case).items():
            shown = "n/a" if it.reason else f"{it.off:+.1%}"
            lengths = f"{case.prompt}/{case.output}"
            line = (
                f"{case.name:26}{lengths:>10}{case.load:6.1f}{name:>12}{it.closed:10.4g}"
                f"{it.twin:10.4g}{shown:>8}{it.error:7.1%}  {case.predict().binding.name}"
                f"{it.reason and ': '}{it.reason}"
            )
            print(line, flush=True)
            total += 1
            refused += bool(it.reason)
            good += not it.reason and abs(it.off) <= TOLERANCE
            if not it.reason and abs(it.off) > TOLERANCE:
                exceptions.append(line)
    print(f"{good} of {total} figures within {TOLERANCE:.0%}, {refused} said not to apply")
    print("\n".join(["not within:", *exceptions]) if exceptions else "no exception")


if __name__ == "__main__":
    main()
