"""The twin against our own engine on this machine: fitted on one load, predicting others.

    python benchmarks/twin_vs_engine.py [--model M] [--layout both 1p1d] [--seconds 100]
        [--requests 24] [--rounds 2] [--repeats 4] [--record DIR] [--json]
    python benchmarks/twin_vs_engine.py --from DIR        the same without engines

For each layout a server is started and given the load of `twostroke profile`, to which the costs
are fitted, and loads that the fit does not see, `--rounds` times each with other seeds: arrivals at
random at 40 % and 75 % of what the twin says it carries, and all at once. The twin replays each
with the moments at which requests really left. Goals: medians of TTFT and TPOT within 10 %, P99
within 20 %, output tokens a second within 5 %.

The profile's load is sent in parts, one after each round: the speed of a machine that others share
drifts (steps of one row took 7 ms in one minute and 11 in another, with nothing else running here),
and what was measured in one minute says little of another.

All rounds are run `--repeats` times with the same arrivals and lengths. Each repeat has figures, of
the engine and of the twin, and the medians over the repeats are compared; `spread` is how far the
engine's own figures lie apart: nothing can predict better than that. Of the twin there are some
more repeats, with other steps late. What was measured is kept in `--record DIR`, for fits and
predictions to be repeated by `--from DIR`.

A client sees text, not tokens, and a token may be half a character: its text comes with the next
one, a step later. What answers say is no matter of the twin, so TTFT and TPOT are compared, on both
sides, of those requests of which each token was a piece of text; how many were not is printed.
Percentiles are estimated from all of their order statistics (`percentile`).

Nothing else must run on the machine: on two cores, one process more doubles every step. A round
that others disturbed is run again, up to three times.
"""

import argparse
import asyncio
import random
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, count, product
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from twostroke.arrays import Bools
from twostroke.bench import load, report
from twostroke.bench.load import Outcome, Target
from twostroke.bench.workload import FIRST_TOKEN_ID, Prompt
from twostroke.checkpoint import Checkpoint, resolve
from twostroke.config import EngineConfig, SchedulerConfig
from twostroke.cost import BandwidthCurve, HostCost, LinearStepCost, LinkCost
from twostroke.cost_fit import fit_link_cost
from twostroke.cost_host import error_on, fit_costs
from twostroke.kv.sizing import KvLayout
from twostroke.proc.profiling import QUIET, Measured, Others, Profiler, Server
from twostroke.router.dispatch import DispatchSettings
from twostroke.trace_steps import Trace, TracedStep
from twostroke.twin.scenario import EngineGroup, Result, Scenario, simulate
from twostroke.twin.transfers import Link
from twostroke.twin.workload import Workload, of_columns

GOALS = {"P50 TTFT": 0.10, "P50 TPOT": 0.10, "P99 TTFT": 0.20, "P99 TPOT": 0.20, "tokens/s": 0.05}
# Of the profile's time before the loads: it decides their rates. Nothing else, for the steps of a
# server that has just started are slower.
FIRST_SHARE = 0.3
NUM_BLOCKS = 1024  # usable ones; more than any load here needs
SEEDS = 5  # for each repeat, the twin draws so often which steps are late
AT_ONCE_S = 0.002  # between requests of a burst: sent closer together, their order is chance
MOST_TRIES = 3  # of a round that other processes disturb
WARM_UP_TOKENS = 4  # of each prompt that a connection is opened with
LAYOUTS = {"both": {}, "1p1d": {"prefill": 1, "decode": 1, "pd_policy": "always"}}


@dataclass(frozen=True)
class Load:
    """`share` of what the engines carry (None: all requests at once), and ranges of lengths."""

    name: str
    share: float | None
    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]


LOADS = (
    Load("chat at 40 %", 0.40, (16, 256), (16, 64)),
    Load("long prompts at 75 %", 0.75, (128, 768), (4, 24)),
    Load("chat at 75 %", 0.75, (16, 256), (16, 64)),
    Load("all at once", None, (16, 128), (32, 96)),
)


class Fitted(NamedTuple):
    """What a profile of a layout says."""

    step: LinearStepCost
    host: HostCost
    link: LinkCost | None

    def drawn(self, seed: int) -> "Fitted":
        """With other steps late."""
        spread = replace(self.host.spread, seed=seed)
        return self._replace(host=replace(self.host, spread=spread))


class Requests(NamedTuple):
    """A load drawn from a seed: lengths, and when each leaves."""

    prompt_tokens: list[int]
    output_tokens: list[int]
    offsets_s: list[float]


def draw(one: Load, count: int, seed: int, requests_per_s: float) -> Requests:
    rng = random.Random(f"{one.name} {seed}")
    now, offsets = 0.0, []
    for _ in range(count):
        offsets.append(now)
        now += AT_ONCE_S if one.share is None else rng.expovariate(requests_per_s)
    prompts = [rng.randint(*one.prompt_tokens) for _ in range(count)]
    return Requests(prompts, [rng.randint(*one.output_tokens) for _ in range(count)], offsets)


def workload_of(
    prompt_tokens: list[int], output_tokens: list[int], arrival_s: list[float] | None = None
) -> Workload:
    """Requests of these lengths; without moments, all at once."""
    return of_columns(
        "load",
        np.array(arrival_s or [0.0] * len(prompt_tokens)),
        np.array(prompt_tokens, np.int32),
        np.array(output_tokens, np.int32),
    )


def scenario_of(
    config: EngineConfig, checkpoint: Checkpoint, fitted: Fitted, workload: Workload
) -> Scenario:
    """The layout in the twin."""
    shape = checkpoint.shape
    scheduler = SchedulerConfig(
        block_size=config.block_size,
        num_blocks=NUM_BLOCKS + 1,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        enable_prefix_caching=config.enable_prefix_caching,
        async_scheduling=config.async_scheduling,
    )
    layout = KvLayout(
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        block_size=config.block_size,
    )
    engines = [
        EngineGroup(
            role=role,
            cost=fitted.step,
            config=scheduler,
            layout=layout,
            host=fitted.host,
            max_hold_share=config.kv_hold_share,
            plans_late=True,
        )
        for role in config.local_roles
    ]
    if fitted.link is None:
        return Scenario(engines=engines, workload=workload)
    link = Link(
        bandwidth=BandwidthCurve((0.0,), (fitted.link.bytes_per_s,)),
        base_s=fitted.link.base_s,
        message_s=fitted.link.message_s,
        pipelined=fitted.link.pipelined,
    )
    settings = DispatchSettings(pd_policy="always", kv_mode=config.kv_mode)
    return Scenario(engines=engines, workload=workload, link=link, settings=settings)


def fit(seen: Measured) -> Fitted:
    """To a profile's load; prints what came of it."""
    step, host, error = fit_costs(seen.trace, seen.waves, seen.relay_s)
    left_out = f"{seen.num_disturbed} that other processes disturbed"
    print(f"  {len(seen.waves)} waves; left out: {left_out}")
    print(f"  fit: {error}")
    print(
        f"  front end {host.frontend_s * 1e3:.1f} ms, {host.frontend_busy_s * 1e3:.1f} ms from "
        f"request to request; relay {host.ingress_s * 1e3:.2f} ms; delivery "
        f"{host.deliver_s * 1e3:.1f} ms; between steps {host.gap_s * 1e3:.2f} ms; "
        f"hand-off {host.handoff_s * 1e3:.1f} ms; longer beside the other engine's step by "
        f"{host.beside_s * 1e3:.2f} ms, for each of them that begins by "
        f"{host.interrupted_s * 1e3:.2f} ms, with other rows than before by "
        f"{host.changed_s * 1e3:.2f} ms, after a pause by {host.cold_s * 1e3:.1f} ms, "
        f"while a request comes by {host.arrival_s * 1e3:.1f} ms, for each further one by "
        f"{host.arrivals_s * 1e3:.2f} ms"
    )
    link = None
    if loads := seen.trace.loads:
        link, link_error = fit_link_cost(
            [it.num_messages for it in loads],
            [it.num_bytes for it in loads],
            [it.end_s - it.start_s for it in loads],
        )
        print(f"  KV transfers: {link_error}")
    return Fitted(step, host, link)


async def send_all(url: str, requests: Requests, seed: str) -> list[Outcome]:
    """One run of a load; its prompts are drawn from `seed`, so that no cache holds them."""
    rng = random.Random(seed)
    async with load.connect(url) as client:
        target = Target(model=await load.find_model(client), ignore_eos=True)
        vocab_size = await load.find_vocab_size(client)
        prompts = [
            Prompt([rng.randrange(FIRST_TOKEN_ID, vocab_size) for _ in range(length)], output)
            for length, output in zip(requests.prompt_tokens, requests.output_tokens, strict=True)
        ]
        # As clients that stay do: nobody's first token waits for a connection.
        warm_up = [Prompt(it.prompt[-WARM_UP_TOKENS:], 2) for it in prompts]
        await load.run(client, target, warm_up, [0.0] * len(prompts))
        outcomes, _ = await load.run(client, target, prompts, requests.offsets_s)
    if failed := next((outcome.error for outcome in outcomes if outcome.error), ""):
        raise SystemExit(f"the engine failed a request: {failed}")
    return outcomes


class Latencies(NamedTuple):
    """Of the requests of several rounds that are compared, in seconds; and tokens a second of each
    round."""

    ttft_s: list[float]
    tpot_s: list[float]
    tokens_per_s: list[float]

    def figures(self) -> dict[str, float]:
        """In ms, and tokens a second."""
        values = {}
        for share in (50, 99):
            values[f"P{share} TTFT"] = percentile(self.ttft_s, share) * 1e3
            values[f"P{share} TPOT"] = percentile(self.tpot_s, share) * 1e3
        return values | {"tokens/s": float(np.mean(self.tokens_per_s))}


def percentile(values: list[float], share: float) -> float:
    """Harrell and Davis' estimate (Biometrika 69, 1982): all order statistics, weighted by how
    likely each is it in another sample. The middle one of 48 requests alone would be chance."""
    count, rank = len(values), share / 100 * (len(values) + 1)
    edges = np.linspace(0, 1, 1000 * count + 1)
    x = (edges[1:] + edges[:-1]) / 2
    logs = (rank - 1) * np.log(x) + (count - rank) * np.log1p(-x)
    weights = np.exp(logs - logs.max()).reshape(count, -1).sum(axis=1)
    return float(np.sort(values) @ weights / weights.sum())


def is_compared(outcome: Outcome) -> bool:
    """Whether each of its tokens was a piece of text."""
    return len(outcome.chunk_times_s) == outcome.output_tokens


def latencies_of(rounds: list[list[Outcome]]) -> Latencies:
    into = Latencies([], [], [])
    for outcomes in rounds:
        start_s = min(outcome.start_s for outcome in outcomes)
        end_s = max(outcome.chunk_times_s[-1] for outcome in outcomes)
        compared = [outcome for outcome in outcomes if is_compared(outcome)]
        into.ttft_s.extend(outcome.ttft_s for outcome in compared)
        into.tpot_s.extend(outcome.tpot_s for outcome in compared)
        into.tokens_per_s.append(sum(it.output_tokens for it in outcomes) / (end_s - start_s))
    return into


# ---------------------------------------------------------------- on the engine


@dataclass(frozen=True)
class Recording:
    """What an engine did: its profile's load; by load each repeat's rounds, and the share of CPU
    time that other processes took; and the steps of all loads."""

    model: str
    measured: Measured
    loads: dict[str, list[list[list[Outcome]]]]
    disturbance: dict[str, float]
    steps: list[TracedStep]


def config_of(layout: str, model: str) -> EngineConfig:
    return replace(
        EngineConfig(model=model),
        **LAYOUTS[layout],
        max_num_seqs=32,
        max_num_batched_tokens=512,
        max_model_len=2048,
        num_gpu_blocks_override=NUM_BLOCKS + 1,
        max_num_queued_reqs=4096,
    )


def record(layout: str, options: argparse.Namespace) -> Iterator[Recording]:
    """Give a server of the layout the profile's load and the others, in turns; all that was
    measured so far, after each repeat."""
    config = config_of(layout, options.model)
    print(f"{layout}: profiling for {options.seconds:g} s, the loads in between", flush=True)
    loads: dict[str, list[list[list[Outcome]]]] = {one.name: [] for one in LOADS}
    shares: dict[str, list[float]] = {one.name: [] for one in LOADS}

    def so_far(profiler: Profiler, trace: Trace) -> Recording:
        means = {name: float(np.mean(each)) for name, each in shares.items()}
        steps = steps_during(loads, trace.steps)
        return Recording(options.model, profiler.measured(trace), loads, means, steps)

    with tempfile.TemporaryDirectory() as directory:
        with Server(config, Path(directory)) as server:
            profiler = Profiler(server.url, seconds=options.seconds, seed=config.seed)
            spent_s = FIRST_SHARE * options.seconds
            profiler.run(spent_s)
            rates = rates_of(config, profiler.measured(server.read()), options.requests)
            profiler.forget()
            left_s = (1 - FIRST_SHARE) * options.seconds
            each_s = left_s / (options.repeats * options.rounds * len(LOADS))
            for _ in range(options.repeats):
                for one in LOADS:
                    loads[one.name].append([])
                for seed, one in product(range(options.rounds), LOADS):
                    requests = draw(one, options.requests, seed, rates[one.name])
                    prompts_seed = f"{one.name} {seed} {len(loads[one.name])}"
                    outcomes, share = send_alone(server.url, requests, prompts_seed)
                    loads[one.name][-1].append(outcomes)
                    shares[one.name].append(share)
                    spent_s += each_s
                    profiler.run(spent_s)
                yield so_far(profiler, server.read())
        yield so_far(profiler, server.read())  # with what was not written before the end


def send_alone(url: str, requests: Requests, seed: str) -> tuple[list[Outcome], float]:
    """One run of a load, and the share of CPU time that other processes took meanwhile; again, with
    other prompts, while they disturb it, but not for ever."""
    for attempt in range(MOST_TRIES):
        others = Others()
        outcomes = asyncio.run(send_all(url, requests, f"{seed} {attempt}"))
        if (share := others.share()) <= QUIET:
            break
    return outcomes, share


def rates_of(config: EngineConfig, measured: Measured, num_requests: int) -> dict[str, float]:
    """Requests a second of each load: its share of what the twin says the engines carry."""
    checkpoint, fitted = resolve(config), fit(measured)
    rates = {}
    for one in LOADS:
        probe = draw(one, 2 * num_requests, 0, 1.0)
        at_once = workload_of(probe.prompt_tokens, probe.output_tokens)
        capacity = simulate(scenario_of(config, checkpoint, fitted, at_once)).request_rate
        rates[one.name] = capacity * (one.share or 1.0)
        print(f"  {one.name}: {num_requests} at {rates[one.name]:.2f}/s", flush=True)
    return rates


def steps_during(
    loads: dict[str, list[list[list[Outcome]]]], steps: list[TracedStep]
) -> list[TracedStep]:
    """The steps that began during the rounds of a load."""
    spans = [
        (min(it.start_s for it in outcomes), max(it.chunk_times_s[-1] for it in outcomes))
        for repeats in loads.values()
        for outcomes in chain(*repeats)
    ]
    return [it for it in steps if any(start_s <= it.start_s <= end_s for start_s, end_s in spans)]


def file_of(directory: Path, layout: str) -> Path:
    return directory / f"{layout}.json"


def save(recording: Recording, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.encode(recording))


# ---------------------------------------------------------------- in the twin


def predict(layout: str, recording: Recording) -> dict[str, dict[str, dict[str, float]]]:
    """Fit, replay every round, and print how far off that is; figures by load."""
    config = config_of(layout, recording.model)
    checkpoint = resolve(config)
    print(f"{layout}:")
    fitted = fit(recording.measured)
    inputs_s = recording.measured.trace.inputs_s
    error = error_on(fitted.step, fitted.host, recording.steps, inputs_s)
    print(f"  steps of all loads: {error}")
    figures, seeds = {}, count()
    for name, repeats in recording.loads.items():
        engine = [latencies_of(rounds).figures() for rounds in repeats]
        twin = []
        for rounds in repeats * SEEDS:
            seen = Latencies([], [], [])
            for outcomes in rounds:
                costs = fitted.drawn(next(seeds))
                result = simulate(scenario_of(config, checkpoint, costs, sent(outcomes)))
                note_twin(seen, result, np.array([is_compared(it) for it in outcomes]))
            twin.append(seen.figures())
        figures[name] = {
            "engine": medians(engine),
            "twin": medians(twin),
            "spread": spread_of(engine),
        }
        print_load(f"{layout}: {name}", figures[name])
        answers = list(chain(*chain(*repeats)))
        if left_out := sum(not is_compared(it) for it in answers):
            print(f"  TTFT, TPOT without {left_out} of {len(answers)}: not each token was text\n")
        if (share := recording.disturbance[name]) > QUIET:
            print(f"  other processes took {share:.0%} of the CPU time meanwhile\n")
    return figures


def sent(outcomes: list[Outcome]) -> Workload:
    """The requests of a round, when they really left."""
    first_s = min(outcome.start_s for outcome in outcomes)
    return workload_of(
        [it.prompt_tokens for it in outcomes],
        [it.output_tokens for it in outcomes],
        [it.start_s - first_s for it in outcomes],
    )


def medians(each: list[dict[str, float]]) -> dict[str, float]:
    """Of each figure over the repeats: what a slow minute did to one of them is no matter."""
    return {key: float(np.median([it[key] for it in each])) for key in GOALS}


def spread_of(each: list[dict[str, float]]) -> dict[str, float]:
    """How far the repeats lie apart: the largest over the smallest, less one."""
    return {key: max(it[key] for it in each) / min(it[key] for it in each) - 1 for key in GOALS}


def note_twin(into: Latencies, result: Result, compared: Bools) -> None:
    into.ttft_s.extend(result.ttft_s[compared].tolist())
    into.tpot_s.extend(result.tpot_s[compared].tolist())
    into.tokens_per_s.append(float(result.output_tokens.sum()) / result.duration_s)


def print_load(title: str, figures: dict[str, dict[str, float]]) -> None:
    rows = []
    for figure, goal in GOALS.items():
        measured, predicted = figures["engine"][figure], figures["twin"][figure]
        error = predicted / measured - 1
        verdict = "met" if abs(error) <= goal else f"beyond {goal:.0%}"
        spread = f"{figures['spread'][figure]:.1%}"
        rows.append(
            [figure, f"{measured:,.1f}", f"{predicted:,.1f}", f"{error:+.1%}", spread, verdict]
        )
    headers = [title, "engine", "twin", "error", "spread", "goal"]
    print(report.table(headers, rows) + "\n", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="", help="default: SmolLM2")
    parser.add_argument("--layout", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS))
    parser.add_argument("--seconds", type=float, default=100.0, help="of profiling, a layout")
    parser.add_argument("--requests", type=int, default=24, help="of a round")
    parser.add_argument("--rounds", type=int, default=2, help="with other arrivals and lengths")
    parser.add_argument("--repeats", type=int, default=4, help="of the same rounds")
    parser.add_argument("--record", type=Path, help="directory to keep what was measured in")
    parser.add_argument("--from", dest="recorded", type=Path, help="what --record kept")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # no server must outlive us
    figures = {}
    for layout in options.layout:
        if options.recorded:
            path = file_of(options.recorded, layout)
            recording = msgspec.json.decode(path.read_bytes(), type=Recording)
        else:
            for recording in record(layout, options):
                if options.record:
                    save(recording, file_of(options.record, layout))
        figures[layout] = predict(layout, recording)
    missed = [
        f"{layout}, {one}: {figure}"
        for layout, loads in figures.items()
        for one, it in loads.items()
        for figure, goal in GOALS.items()
        if abs(it["twin"][figure] / it["engine"][figure] - 1) > goal
    ]
    total = sum(len(loads) for loads in figures.values()) * len(GOALS)
    print(f"{total - len(missed)} of {total} figures within their goals")
    for one in missed:
        print(f"  beyond: {one}")
    if options.json:
        print(report.json_line({"figures": figures, "beyond": missed}))


if __name__ == "__main__":
    main()
