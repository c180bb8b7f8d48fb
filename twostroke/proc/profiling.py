"""`twostroke profile`: runs a server over a grid of prompts and measures what everything costs.

    for each wave    send n prompts of the same length at once over HTTP, wait for all answers
    then             stop the server, read its trace: each step's work and time, on the clock that
                     our own times are on; fit

The server is the one that `serve` starts with the same flags, because what runs beside an engine
is part of what a step costs: on a CPU they share cores. It answers this process, which therefore
does what a load generator does.
"""

import asyncio
import contextlib
import dataclasses
import json
import math
import os
import platform
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import httpx

from twostroke.bench import load
from twostroke.bench.load import Target
from twostroke.bench.workload import FIRST_TOKEN_ID, Prompt
from twostroke.config import EngineConfig
from twostroke.cost_host import Wave
from twostroke.cost_profile import DevicePeaks
from twostroke.errors import EngineDeadError, TwostrokeError
from twostroke.trace_steps import Trace, TracedLoad, TracedStep, read_trace

START_S = 600.0
STOP_S = 60.0
OUTPUT_TOKENS = 12  # of each answer: some steps in which all decode
BATCHED_LENGTHS = tuple(4**i for i in range(2, 10))  # of prompts that come together
OUTPUT_COST = 8  # prompt tokens that one of output is reckoned to cost, where a rate is chosen
GRID_SHARE = 0.6  # of the time; the rest is for two mixed loads
RELAY_SAMPLES = 30
WAVE_SHARE = 0.25  # most of the time budget that one wave may take
LEAST_QUIET = 0.2  # of the waves; with fewer, the disturbed ones count too
LOOK_S = 0.5  # least time between two looks at what else runs: CPU time is counted in 10 ms
QUIET = 0.06  # share of the host's CPU time that others may take without disturbing


class Server:
    """A `twostroke serve` with these settings in processes of its own, tracing itself.

    Used as a context; `read` reads the trace once it has stopped. Raises EngineDeadError, with
    what the server printed last, when it does not start.
    """

    def __init__(self, config: EngineConfig, directory: Path) -> None:
        self.trace = directory / "trace.json"
        settings = dataclasses.replace(
            config, host="127.0.0.1", port=0, trace=str(self.trace), api_key=""
        )
        path = directory / "settings.toml"
        defaults = EngineConfig()
        path.write_text(
            "".join(
                f"{name} = {json.dumps(value)}\n"
                for name, value in dataclasses.asdict(settings).items()
                if value != getattr(defaults, name)
            )
        )
        self._process = subprocess.Popen(
            [sys.executable, "-m", "twostroke.cli", "serve", "--config", str(path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.lines: list[str] = []
        self.url = ""
        self._started = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line)
            if found := re.search(r"http://127\.0\.0\.1:\d+", line):
                self.url = found[0]
                self._started.set()
        self._started.set()

    def __enter__(self) -> Self:
        try:
            self._started.wait(START_S)
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def _wait_until_ready(self) -> None:
        deadline_s = time.monotonic() + START_S
        with httpx.Client(base_url=self.url or "http://127.0.0.1", trust_env=False) as client:
            while self._process.poll() is None and self.url and time.monotonic() < deadline_s:
                if client.get("/ready").is_success:
                    return
                time.sleep(0.1)
        last = "".join(self.lines[-5:]).strip()
        raise EngineDeadError(f"the server to be measured did not start: {last[-500:]}")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End it and all its processes. Idempotent."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._reader.join(STOP_S)
        if self._process.stdout is not None:
            self._process.stdout.close()

    def read(self) -> Trace:
        """What it did in its life, once it has stopped."""
        return read_trace(self.trace)


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a server can take."""

    max_tokens: int  # of a prompt and its answer
    max_num_seqs: int
    num_kv_tokens: int
    vocab_size: int


def grid(limits: Limits) -> Iterator[tuple[int, int]]:
    """Waves as (requests, prompt tokens): lone prompts first, then batches, small before large.

    Together they hold all sizes of chunks and batches on all contexts: powers of two and halfway
    between (from where to where one kind of kernel runs, see `cost_fit.KNEES`), and five, the
    smallest batch that is not small.
    """
    longest = limits.max_tokens - OUTPUT_TOKENS
    sizes = sorted({n for i in range(20) for n in (2**i, 3 * 2**i)})
    lengths = [n for n in sizes if 2 <= n <= longest]
    counts = sorted({n for n in (*sizes, 5, limits.max_num_seqs) if n <= limits.max_num_seqs})
    waves = [
        (count, length)
        for count in counts
        for length in lengths
        if count * (length + OUTPUT_TOKENS) <= limits.num_kv_tokens
        and (count == 1 or length in BATCHED_LENGTHS)
    ]
    yield from sorted(waves, key=lambda wave: (wave[0] * (wave[1] + 8 * OUTPUT_TOKENS), wave))


class Others:
    """Processes on this host that are neither this one nor, at the time of making, below it."""

    def __init__(self) -> None:
        import psutil

        own = psutil.Process()
        self._ours = [own, *own.children(recursive=True)]
        self._all_s, self._busy_s, self._ours_s = self._times_s()

    def share(self) -> float:
        """Of the host's CPU time, what they took since the last call (or the making)."""
        before_s, self_busy_s, ours_s = self._all_s, self._busy_s, self._ours_s
        self._all_s, self._busy_s, self._ours_s = self._times_s()
        theirs_s = self._busy_s - self_busy_s - (self._ours_s - ours_s)
        return max(0.0, theirs_s / max(self._all_s - before_s, 1e-9))

    def _times_s(self) -> tuple[float, float, float]:
        """CPU time so far: all there was, what anybody used, and what we did."""
        import psutil

        host = psutil.cpu_times()
        ours_s = 0.0
        for process in self._ours:
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                ours_s += times.user + times.system
        idle_s = host.idle + getattr(host, "iowait", 0.0)
        all_s = sum(host) - getattr(host, "guest", 0.0) - getattr(host, "guest_nice", 0.0)
        return all_s, all_s - idle_s, ours_s


class SentWaves:
    """Waves as they were sent, and which of them nothing else on this host disturbed."""

    def __init__(self) -> None:
        self._all: list[Wave] = []
        self._quiet: list[Wave] = []
        self._new: list[Wave] = []  # since the last look at what else runs
        self._others, self._looked_s = Others(), time.monotonic()

    def add(self, wave: Wave) -> None:
        self._all.append(wave)
        self._new.append(wave)
        if time.monotonic() - self._looked_s > LOOK_S:
            self._look()

    def _look(self) -> None:
        if self._others.share() < QUIET:
            self._quiet += self._new
        self._new, self._looked_s = [], time.monotonic()

    def end(self) -> None:
        """No more will come."""
        self._look()

    @property
    def num_disturbed(self) -> int:
        return len(self._all) - len(self._quiet)

    def is_of_use(self, share: float) -> bool:
        """Whether to use what was measured while others took that share: not if it disturbs,
        unless all is disturbed, or nearly."""
        return share < QUIET or len(self._quiet) <= LEAST_QUIET * len(self._all)

    @property
    def of_use(self) -> list[Wave]:
        return self._all if self.is_of_use(1.0) else self._quiet


async def run_grid(
    url: str, *, seconds: float, seed: int, on_progress: Callable[[float], None]
) -> SentWaves:
    """Send the grid's waves, round after round, for about `seconds`; `on_progress` gets its share.

    A wave that would take too long is left out, and with it the larger ones.
    """
    draw = random.Random(seed)
    waves = SentWaves()
    async with load.connect(url) as client:
        limits = await _limits(client)
        target = Target(model=await load.find_model(client), ignore_eos=True)
        start_s = time.monotonic()
        second_per_token = 0.0
        is_new = True
        while is_new:
            is_new = False
            for count, length in grid(limits):
                elapsed_s = time.monotonic() - start_s
                on_progress(min(1.0, elapsed_s / seconds))
                expected_s = second_per_token * count * (length + OUTPUT_TOKENS)
                if elapsed_s + expected_s > seconds or expected_s > WAVE_SHARE * seconds:
                    break
                prompts = [_prompt(draw, length, limits.vocab_size) for _ in range(count)]
                sent_s = time.monotonic()
                outcomes, spent_s = await load.run(client, target, prompts, [0.0] * count)
                if failed := next((it.error for it in outcomes if it.error), ""):
                    raise TwostrokeError(f"the server failed a request: {failed}")
                ended_s = max(outcome.chunk_times_s[-1] for outcome in outcomes)
                waves.add(Wave(count, length, sent_s, ended_s))
                second_per_token = spent_s / (count * (length + OUTPUT_TOKENS))
                is_new = True
    waves.end()
    on_progress(1.0)
    return waves


def _prompt(
    draw: random.Random, length: int, vocab_size: int, output_tokens: int = OUTPUT_TOKENS
) -> Prompt:
    """Random ids: nothing is found in a prefix cache."""
    ids = [draw.randrange(min(FIRST_TOKEN_ID, vocab_size - 1), vocab_size) for _ in range(length)]
    return Prompt(ids, output_tokens)


async def _limits(client: httpx.AsyncClient) -> Limits:
    props = (await client.get("/props")).json()
    settings = {row["name"]: row["value"] for row in props["config"]}
    kv = props["kv"]
    return Limits(
        max_tokens=int(props["limits"]["max_request_tokens"]),
        max_num_seqs=int(settings["max_num_seqs"]),
        num_kv_tokens=(int(kv["num_blocks"]) - 1) * int(kv["block_size"]),
        vocab_size=int(props["limits"]["vocab_size"]),
    )


@dataclasses.dataclass(frozen=True)
class Measured:
    """A grid's trace and waves; a message between router and engine in seconds; and the steps of a
    mixed load, which nothing was fitted to.

    While `num_disturbed` other waves ran, other processes took CPU time; during the mixed load they
    took the share `disturbance`.
    """

    trace: Trace
    waves: list[Wave]
    relay_s: float
    held_out: list[TracedStep]
    num_disturbed: int = 0
    disturbance: float = 0.0


def measure(
    config: EngineConfig,
    *,
    seconds: float,
    on_progress: Callable[[float], None] = lambda share: None,
) -> Measured:
    """Start a server with these settings and measure it for about `seconds`.

    Mixed loads come last, each from a seed of its own: arrivals at random, lengths at random. One
    shows what the grid's waves do not, prompts among decodes and engines that compute at once; the
    other one is held out.
    """
    with tempfile.TemporaryDirectory(prefix="twostroke-profile-") as name:
        with Server(config, Path(name)) as server:
            relay_s = asyncio.run(measure_relay(server.url))
            sent = asyncio.run(
                run_grid(
                    server.url,
                    seconds=GRID_SHARE * seconds,
                    seed=config.seed,
                    on_progress=lambda share: on_progress(GRID_SHARE * share),
                )
            )
            waves, shares, spans = sent.of_use, list[float](), list[tuple[float, float]]()
            for seed in (1, 2):
                others, start_s = Others(), time.monotonic()
                mixed_s = (1 - GRID_SHARE) / 2 * seconds
                asyncio.run(_mixed_load(server.url, waves, mixed_s, seed=config.seed + seed))
                shares.append(others.share())
                spans.append((start_s, time.monotonic()))
        on_progress(1.0)
        trace = server.read()
    fitted = [(wave.sent_s, wave.ended_s) for wave in waves]
    fitted += spans[:1] if sent.is_of_use(shares[0]) else []
    return Measured(
        trace=Trace(_within(fitted, trace.steps), _within(fitted, trace.loads), trace.inputs_s),
        waves=waves,
        relay_s=relay_s,
        held_out=_within(spans[1:], trace.steps),
        num_disturbed=sent.num_disturbed,
        disturbance=shares[1],
    )


_Timed = TypeVar("_Timed", TracedStep, TracedLoad)


def _within(spans: list[tuple[float, float]], items: list[_Timed]) -> list[_Timed]:
    """Those that begin in one of the spans, which do not overlap and are in order."""
    starts = [start_s for start_s, _ in spans]

    def is_in(time_s: float) -> bool:
        at = bisect_right(starts, time_s) - 1
        return at >= 0 and time_s < spans[at][1]

    return [it for it in items if is_in(it.start_s)]


async def measure_relay(url: str) -> float:
    """Seconds that a message takes between router and engine, when both have nothing else to do.

    One path of the API asks the engine and another does not: half of what that takes longer.
    """
    spent_s: dict[str, list[float]] = {"/ready": [], "/health": []}
    async with load.connect(url) as client:
        for _ in range(RELAY_SAMPLES):
            for path, times_s in spent_s.items():
                start_s = time.perf_counter()
                await client.get(path)
                times_s.append(time.perf_counter() - start_s)
    asked_s, unasked_s = (statistics.median(times_s) for times_s in spent_s.values())
    return max(0.0, (asked_s - unasked_s) / 2)


async def _mixed_load(url: str, waves: list[Wave], seconds: float, *, seed: int) -> None:
    """Requests of random lengths, short ones as often as long ones, at random moments: at half the
    rate that the largest wave ran at, when a token of output costs as much as some of a prompt."""
    draw = random.Random(seed)
    async with load.connect(url) as client:
        limits = await _limits(client)
        target = Target(model=await load.find_model(client), ignore_eos=True)
        longest = max(
            wave.prompt_tokens for wave in waves if wave.num_requests > 1 or len(waves) == 1
        )
        busiest = max(waves, key=lambda wave: wave.num_requests * wave.prompt_tokens)
        rate = busiest.num_requests * busiest.prompt_tokens / (busiest.ended_s - busiest.sent_s)
        mean_tokens = longest / math.log(longest) + OUTPUT_TOKENS * OUTPUT_COST
        count = max(4, int(0.5 * rate / mean_tokens * seconds))
        offsets = sorted(draw.uniform(0, seconds) for _ in range(count))
        prompts = [
            _prompt(
                draw,
                round(math.exp(draw.uniform(1, math.log(max(5, longest))))),
                limits.vocab_size,
                draw.randint(2, 2 * OUTPUT_TOKENS),
            )
            for _ in range(count)
        ]
        await load.run(client, target, prompts, offsets, max_concurrency=limits.max_num_seqs)


def device_name() -> str:
    """The device as people call it: the GPU, else the CPU and how many cores we have."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name(0)
    name = platform.processor() or platform.machine()
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    if found := re.search(r"model name\s*:\s*(.+)", text):
        name = found[1].strip()
    return f"{name}, {len(os.sched_getaffinity(0))} cores"


def device_peaks() -> DevicePeaks:
    """What large products in bf16 and reading a large array reach, the best of some runs."""
    import psutil
    import torch

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    size = 8192 if on_gpu else 1024
    matrix = torch.randn(size, size, device=device).to(torch.bfloat16)
    array = torch.ones(1 << (30 if on_gpu else 26), device=device)

    def best_s(run: Callable[[], object]) -> float:
        times = []
        for _ in range(8):
            start_s = time.perf_counter()
            run()
            if on_gpu:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start_s)
        return min(times)

    with torch.inference_mode():
        product_s, read_s = best_s(lambda: matrix @ matrix), best_s(array.sum)
    memory = torch.cuda.mem_get_info()[1] if on_gpu else psutil.virtual_memory().total
    return DevicePeaks(
        bf16_flops=2 * size**3 / product_s,
        memory_bytes_per_s=array.nbytes / read_s,
        memory_bytes=memory,
    )
