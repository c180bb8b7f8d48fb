"""Where the time goes from a request to its first token, hand-over by hand-over.

    python benchmarks/first_token.py [--tokens 256] [--requests 20] [--json] [-- flags of serve]

Starts `twostroke serve --trace`, and asks it, over HTTP, for two tokens of prompts of random ids,
one at a time with a pause between, so that each has the machine for itself. Client and server read
the same clock, so what the trace says can be laid beside what the client saw. Prints the median of
each part; a part ends where the next begins.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import signal
import statistics
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import httpx
from overlap import load as load_trace
from startup import TIMEOUT_S, command, free_port, wait_for

from twostroke.bench import load
from twostroke.bench.load import Outcome, Target
from twostroke.bench.workload import FIRST_TOKEN_ID, Prompt

PAUSE_S = 0.2
WARM_UPS = 3
PARTS = (
    ("client sends, HTTP, checks, message to the engine", "input", "decode", 0),
    ("input thread decodes", "input", "decode", 1),
    ("main thread wakes, takes it in", "main", "plan", 0),
    ("main thread plans the step", "main", "plan", 1),
    ("worker begins", "worker", "step", 0),
    ("the step", "worker", "step", 1),
    ("main thread wakes", "main", "finish", 0),
    ("main thread counts the tokens", "main", "finish", 1),
    ("output thread sends", "output", "encode", 1),
    ("API process, HTTP, client reads", "", "", 0),
)
Spans = Mapping[str, Sequence[tuple[float, float, str]]]  # ms, as `overlap.load` reads them


@contextlib.contextmanager
def server(flags: list[str], trace: Path) -> Iterator[str]:
    """The URL of a server that is ready; its trace is complete behind this."""
    port = free_port()
    words = [command(), "serve", *flags, "--port", str(port), "--trace", str(trace)]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        with httpx.Client(base_url=url, timeout=TIMEOUT_S, trust_env=False) as client:
            wait_for(client, "/ready", process)
        yield url
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(TIMEOUT_S)


async def ask(url: str, tokens: int, requests: int) -> list[Outcome]:
    """One outcome of each request that is measured."""
    outcomes = []
    async with load.connect(url) as client:
        target = Target(await load.find_model(client), ignore_eos=True)
        vocab_size = await load.find_vocab_size(client)

        for _ in range(WARM_UPS + requests):
            await asyncio.sleep(PAUSE_S)
            ids = [random.randrange(FIRST_TOKEN_ID, vocab_size) for _ in range(tokens)]
            outcomes.append(await load.send(client, target, Prompt(ids, output_tokens=2)))
            if outcomes[-1].error:
                raise SystemExit(f"the server failed a request: {outcomes[-1].error}")
    return outcomes[WARM_UPS:]


def parts_of(spans: Spans, start_ms: float, end_ms: float) -> list[float]:
    """Ms of each of PARTS for the request that was sent and answered then.

    Its message is the first that was decoded; the step is the one that ended last before the
    answer, and its plan and end go by its number.
    """

    def of(track: str, name: str) -> tuple[float, float]:
        found = [it for it in spans[track] if it[2] == name and start_ms <= it[1] <= end_ms]
        return found[0][:2]

    counted = [it for it in spans["main"] if it[2].startswith("finish") and it[1] <= end_ms]
    number = counted[-1][2].split()[1]
    sent = next(it for it in spans["output"] if it[0] >= counted[-1][0])
    at = {
        "input": of("input", "decode"),
        "plan": of("main", f"plan {number}"),
        "step": of("worker", f"step {number}"),
        "finish": of("main", f"finish {number}"),
        "encode": sent[:2],
    }
    ends = [at[track if track == "input" else name][side] for _, track, name, side in PARTS[:-1]]
    times = [start_ms, *ends, end_ms]
    return [after - before for before, after in itertools.pairwise(times)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=256, help="of a prompt")
    parser.add_argument("--requests", type=int, default=20)
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    parser.add_argument("flags", nargs="*", help="of twostroke serve, after --")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        trace = Path(directory) / "trace.json"
        with server(arguments.flags, trace) as url:
            outcomes = asyncio.run(ask(url, arguments.tokens, arguments.requests))
        spans = load_trace(trace, zero_us=0.0)
    rows = [parts_of(spans, 1e3 * it.start_s, 1e3 * it.chunk_times_s[0]) for it in outcomes]
    found = {
        name: round(statistics.median(row[i] for row in rows), 2)
        for i, (name, *_) in enumerate(PARTS)
    }
    found["first token"] = round(statistics.median(1e3 * it.ttft_s for it in outcomes), 2)
    for name, ms in found.items():
        print(f"{name:<52} {ms:8.2f} ms")
    if arguments.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
