"""A hand-off under way: what D's decode steps and the KV that arrives do to each other.

    python benchmarks/handoff.py [--requests 8] [--prompt-tokens 2000 4000] [--decodes 4]
        [--kv-mode pull stream] [--json] [--svg docs/handoff.svg]

Starts `twostroke serve --prefill 1 --decode 1 --pd-policy always --trace`, each engine on
`--cpu-threads` cores of its own, once for each mode. `--decodes` answers are written all the time
on D while long prompts come through P, one after the other, in chunks of `--chunk-tokens`. All
figures but the client's latency are from the trace:

overlap     share of the time in which KV is read that lies in D's steps (goal: 80 %)
steps       of D with the standing answers alone, by whether KV is read and whether P computes:
            on one host P takes memory bandwidth too, so what a transfer costs is told apart
wait        from the end of P's last chunk until its KV is on D. Streaming, that is one chunk's read
            and, before it, what is left of D's running step and the one that is planned behind it:
            what to read comes to the worker with the next plan
ledger      the intervals of each request against what the client has measured
"""

import argparse
import asyncio
import random
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
from handoff_picture import draw
from timeline import Span, length, overlap

from twostroke.bench import load, report
from twostroke.bench.load import Outcome, Target
from twostroke.bench.workload import FIRST_TOKEN_ID, Prompt
from twostroke.config import EngineConfig
from twostroke.proc.profiling import Server
from twostroke.trace_steps import Trace, TracedInterval, TracedRead, TracedStep

P, D = 0, 1  # engines, as `serve` numbers them
GOAL_OVERLAP = 0.8
STANDING_PROMPT_TOKENS = 32
OUTPUT_TOKENS = 24  # of the answers to long prompts


@dataclass(frozen=True)
class Life:
    """One request that was handed over, as its client and the trace saw it."""

    client_s: float
    intervals: list[TracedInterval]
    chunks: list[TracedStep]  # P's steps for it
    reads: list[TracedRead]

    @property
    def ledger_s(self) -> float:
        return sum(it.end_s - it.start_s for it in self.intervals)

    @property
    def largest_gap_s(self) -> float:
        """Between the end of an interval and the start of the next."""
        pairs = zip(self.intervals, self.intervals[1:], strict=False)
        return max(abs(after.start_s - before.end_s) for before, after in pairs)

    @property
    def num_bytes(self) -> int:
        return sum(read.num_bytes for read in self.reads)

    @property
    def read_s(self) -> float:
        return length(map(span, self.reads))

    @property
    def last_chunk_s(self) -> float:
        return max(chunk.end_s for chunk in self.chunks)

    @property
    def wait_s(self) -> float:
        """From the end of P's last chunk until the last KV is in place."""
        return self.reads[-1].end_s - self.last_chunk_s

    @property
    def one_read_s(self) -> float:
        """The longest read: of one chunk, or of everything in pull mode."""
        return max(read.end_s - read.start_s for read in self.reads)


def span(it: TracedStep | TracedRead | TracedInterval) -> Span:
    return it.start_s, it.end_s


# ---------------------------------------------------------------- the run


async def standing_answer(
    client: httpx.AsyncClient, body: dict[str, object], begun: asyncio.Event
) -> None:
    """One long answer, read until cancelled."""
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for _ in response.aiter_lines():
            begun.set()


async def run(url: str, options: argparse.Namespace) -> list[Outcome]:
    """Send the long prompts while answers are written; their outcomes, the first one left out."""
    draw_from = random.Random(0)
    async with load.connect(url) as client:
        target = Target(model=await load.find_model(client), ignore_eos=True)
        limits = (await client.get("/props")).json()["limits"]

        def prompt(tokens: int) -> list[int]:
            vocab_size = int(limits["vocab_size"])
            return [draw_from.randrange(FIRST_TOKEN_ID, vocab_size) for _ in range(tokens)]

        body: dict[str, object] = {"model": target.model, "ignore_eos": True, "stream": True}
        body["max_tokens"] = int(limits["max_request_tokens"]) - STANDING_PROMPT_TOKENS
        begun = [asyncio.Event() for _ in range(options.decodes)]
        tasks = [
            asyncio.create_task(
                standing_answer(client, body | {"prompt": prompt(STANDING_PROMPT_TOKENS)}, event)
            )
            for event in begun
        ]
        try:
            await asyncio.gather(*(event.wait() for event in begun))
            outcomes = []
            for _ in range(1 + options.requests):
                tokens = draw_from.randint(*options.prompt_tokens)
                outcomes.append(
                    await load.send(client, target, Prompt(prompt(tokens), OUTPUT_TOKENS))
                )
                if outcomes[-1].error or any(task.done() for task in tasks):
                    raise SystemExit(f"a request ended early: {outcomes[-1].error or 'an answer'}")
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    return outcomes[1:]


def life_of(trace: Trace, outcome: Outcome) -> Life:
    """Only one request at a time is on P, so time tells what is its own."""
    start_s, end_s = outcome.start_s, outcome.chunk_times_s[-1]

    def within(it: TracedStep | TracedRead | TracedInterval) -> bool:
        return start_s <= it.start_s <= end_s

    own = next(it.request for it in trace.intervals if within(it))
    found = Life(
        client_s=end_s - start_s,
        intervals=[it for it in trace.intervals if it.request == own and it.end_s > it.start_s],
        chunks=[step for step in trace.steps if step.engine == P and within(step)],
        reads=[read for read in trace.reads if read.engine == D and within(read)],
    )
    if not found.reads or not found.chunks:
        raise SystemExit(f"{own} was not handed over")
    return found


# ---------------------------------------------------------------- figures


def step_medians(trace: Trace, lives: Sequence[Life], decodes: int) -> list[dict[str, object]]:
    """D's steps that run the standing answers alone, in four kinds."""
    reads = [span(read) for life in lives for read in life.reads]
    chunks = [span(chunk) for life in lives for chunk in life.chunks]
    begin_s, end_s = lives[0].intervals[0].start_s, lives[-1].intervals[-1].end_s
    kinds: dict[tuple[bool, bool], list[float]] = {}
    for step in trace.steps:
        if step.engine == D and begin_s <= step.start_s and step.end_s <= end_s:
            work, times = step.sample, [span(step)]
            if work.num_rows == work.num_tokens == decodes:
                busy = overlap(times, chunks) > 0.5 * work.seconds
                kinds.setdefault((busy, overlap(times, reads) > 0), []).append(work.seconds)
    rows: list[dict[str, object]] = []
    for busy in (False, True):
        without, during = kinds.get((busy, False), []), kinds.get((busy, True), [])
        if without and during:
            median_s = statistics.median(without)
            rows.append(
                {
                    "p_computes": busy,
                    "steps": len(without),
                    "step_ms": 1e3 * median_s,
                    "steps_in_transfer": len(during),
                    "step_in_transfer_ms": 1e3 * statistics.median(during),
                    "slow_down": statistics.median(during) / median_s,
                }
            )
    return rows


def figures(trace: Trace, lives: Sequence[Life], decodes: int) -> dict[str, object]:
    """Everything about one mode; times in ms."""
    reads = [span(read) for life in lives for read in life.reads]
    steps = [span(step) for step in trace.steps if step.engine == D]
    one_read_s = statistics.median(life.one_read_s for life in lives)
    unseen_s = [life.reads[-1].start_s - life.last_chunk_s for life in lives]
    num_bytes = sum(life.num_bytes for life in lives)
    alone_s = [
        step.sample.seconds
        for step in trace.steps
        if step.engine == D and step.sample.num_tokens == decodes
    ]
    return {
        "requests": len(lives),
        "overlap_share": overlap(reads, steps) / length(reads),
        "reads": len(reads),
        "mib": num_bytes / 2**20,
        "gb_per_s": num_bytes / length(reads) / 1e9,
        "decode_step_ms": 1e3 * statistics.median(alone_s),
        "steps": step_medians(trace, lives, decodes),
        "wait_ms": 1e3 * statistics.median(life.wait_s for life in lives),
        "wait_max_ms": 1e3 * max(life.wait_s for life in lives),
        "unseen_ms": 1e3 * statistics.median(unseen_s),
        "unseen_max_ms": 1e3 * max(unseen_s),
        "one_read_ms": 1e3 * one_read_s,
        "ledger_gap_us": 1e6 * max(life.largest_gap_s for life in lives),
        "client_less_ledger_ms": 1e3 * max(abs(life.client_s - life.ledger_s) for life in lives),
        "each": [
            {
                "intervals_ms": {it.name: 1e3 * (it.end_s - it.start_s) for it in life.intervals},
                "ledger_ms": 1e3 * life.ledger_s,
                "client_ms": 1e3 * life.client_s,
                "mib": life.num_bytes / 2**20,
                "gb_per_s": life.num_bytes / life.read_s / 1e9,
                "wait_ms": 1e3 * life.wait_s,
                "chunks": len(life.chunks),
            }
            for life in lives
        ],
    }


def show(mode: str, found: dict[str, object]) -> None:
    share = float(str(found["overlap_share"]))
    print(f"\n{mode}: {found['requests']} hand-offs, {found['mib']:.0f} MiB in {found['reads']}")
    print(
        f"  overlap   {share:.1%} of the transfer time is in D's steps (goal: {GOAL_OVERLAP:.0%})"
    )
    for row in found["steps"]:
        print(
            f"  steps     {'P computes' if row['p_computes'] else 'P is idle'}: "
            f"{row['step_ms']:.1f} ms ({row['steps']}), in a transfer "
            f"{row['step_in_transfer_ms']:.1f} ms ({row['steps_in_transfer']}): "
            f"{row['slow_down']:.2f} times"
        )
    print(
        f"  wait      {found['wait_ms']:.1f} ms after P's last chunk (at most "
        f"{found['wait_max_ms']:.1f}): {found['unseen_ms']:.1f} (at most "
        f"{found['unseen_max_ms']:.1f}) until the last read begins; the longest read takes "
        f"{found['one_read_ms']:.1f}, a step of D {found['decode_step_ms']:.1f}"
    )
    print(
        f"  ledger    intervals leave {found['ledger_gap_us']:.1f} us out; their sum is within "
        f"{found['client_less_ledger_ms']:.1f} ms of what the client measured"
    )
    names = list(dict.fromkeys(name for it in found["each"] for name in it["intervals_ms"]))
    rows = [
        [f"{it['intervals_ms'].get(name, 0):.0f}" for name in names]
        + [f"{it['ledger_ms']:.0f}", f"{it['client_ms']:.0f}"]
        + [f"{it['mib']:.0f}", f"{it['gb_per_s']:.2f}", str(it["chunks"])]
        for it in found["each"]
    ]
    print(report.table([*names, "sum, ms", "client, ms", "MiB", "GB/s", "chunks"], rows))


def measure(mode: str, options: argparse.Namespace) -> tuple[Trace, list[Life]]:
    config = EngineConfig(
        model=options.model,
        prefill=1,
        decode=1,
        pd_policy="always",
        kv_mode=mode,
        cpu_threads=options.cpu_threads,
        max_num_batched_tokens=options.chunk_tokens,
    )
    with tempfile.TemporaryDirectory(prefix="twostroke-handoff-") as name:
        with Server(config, Path(name)) as server:
            outcomes = asyncio.run(run(server.url, options))
        trace = server.read()
    return trace, [life_of(trace, outcome) for outcome in outcomes]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default=EngineConfig().model)
    parser.add_argument("--kv-mode", nargs="+", default=["pull", "stream"])
    parser.add_argument("--requests", type=int, default=8, help="measured, after one that is not")
    parser.add_argument("--prompt-tokens", type=int, nargs=2, default=[2000, 4000])
    parser.add_argument("--decodes", type=int, default=4, help="answers written all the time")
    parser.add_argument("--chunk-tokens", type=int, default=512, help="--max-num-batched-tokens")
    parser.add_argument("--cpu-threads", type=int, default=1, help="cores of each engine")
    parser.add_argument("--svg", type=Path, help="draw a request of each mode into this file")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the server must not outlive us
    results, drawn = {}, {}
    for mode in options.kv_mode:
        trace, lives = measure(mode, options)
        results[mode] = figures(trace, lives, options.decodes)
        show(mode, results[mode])
        drawn[mode] = (trace, sorted(lives, key=lambda life: life.wait_s)[len(lives) // 2])
    if options.svg:
        options.svg.write_text(draw(drawn, options.decodes))
    if options.json:
        print(report.json_line(results))


if __name__ == "__main__":
    main()
