"""`twostroke profile`: runs a server, sends it a load, and measures what everything costs.

    pieces    bursts, streams and lone requests (`profile_load`) over HTTP, all answers waited for
    then      stop the server, read its trace: each step's work and time, on the clock that our own
              times are on; fit

The server is the one that `serve` starts with the same flags, because what runs beside an engine
is part of what a step costs: on a CPU they share cores. It answers this process, which therefore
does what a load generator does.
"""

import asyncio
import contextlib
import dataclasses
import json
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
from twostroke.bench.load import Outcome, Target
from twostroke.bench.workload import Prompt
from twostroke.config import EngineConfig
from twostroke.cost_host import Wave
from twostroke.cost_profile import DevicePeaks
from twostroke.errors import EngineDeadError, TwostrokeError
from twostroke.proc.profile_load import Card, Limits, Load, waves_of
from twostroke.trace_steps import Trace, TracedLoad, TracedStep, read_trace

START_S = 600.0
STOP_S = 60.0
# Of the time. A server that has just started is slower: KV goes to memory that nobody has touched
# (0.7 GB/s from engine to engine in place of 8), and steps take a tenth longer.
WARM_UP_SHARE = 0.15
HELD_OUT_SHARE = 0.15
MOST_HELD_OUT = 1000  # requests
RELAY_SAMPLES = 30
LEAST_QUIET = 0.2  # of the pieces; with fewer, the disturbed ones count too
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


@dataclasses.dataclass(frozen=True)
class Measured:
    """The trace and the waves of what is fitted to; a message between router and engine in seconds;
    and the steps of a load that nothing is fitted to.

    During `num_disturbed` other pieces, other processes took CPU time; during the load that is held
    out they took the share `disturbance`.
    """

    trace: Trace
    waves: list[Wave]
    relay_s: float
    held_out: list[TracedStep]
    num_disturbed: int = 0
    disturbance: float = 0.0


@dataclasses.dataclass(frozen=True)
class Piece:
    """What was sent without a look at what else runs, and its `Wave`s."""

    start_s: float
    end_s: float
    waves: list[Wave]


class Pieces:
    """What was sent, and which of it nothing else on this host disturbed."""

    def __init__(self) -> None:
        self._all: list[Piece] = []
        self._quiet: list[Piece] = []
        self._new: list[Piece] = []  # since the last look at what else runs
        self._others, self._looked_s = Others(), time.monotonic()

    def begin(self) -> None:
        """What else ran until now is of no interest."""
        self._others.share()
        self._looked_s = time.monotonic()

    def add(self, piece: Piece) -> None:
        self._all.append(piece)
        self._new.append(piece)
        if time.monotonic() - self._looked_s > LOOK_S:
            self.look()

    def look(self) -> None:
        """Decide on what came since the last look."""
        if self._others.share() < QUIET:
            self._quiet += self._new
        self._new, self._looked_s = [], time.monotonic()

    def forget(self) -> None:
        """What came until now is of no use."""
        self._all, self._quiet, self._new = [], [], []

    @property
    def num_disturbed(self) -> int:
        return len(self._all) - len(self._quiet)

    @property
    def of_use(self) -> list[Piece]:
        """All that was not disturbed, unless nearly all is."""
        return self._quiet if len(self._quiet) > LEAST_QUIET * len(self._all) else self._all


class Profiler:
    """Sends the profile's load to a running server, in parts if that is wanted: between them it may
    be sent other loads, so that both see the machine in the same minutes."""

    def __init__(self, url: str, *, seconds: float, seed: int) -> None:
        """`seconds`: what all parts will take together, about."""
        self._url, self._seconds, self._seed = url, seconds, seed
        self._load: Load | None = None
        self._cards: Iterator[Card] = iter(())
        self._pieces = Pieces()
        self._spent_s = 0.0
        self._held_out = (0.0, 0.0)
        self._disturbance = 0.0
        self._relay_s = asyncio.run(measure_relay(url))

    def run(
        self, seconds: float, on_progress: Callable[[float], None] = lambda share: None
    ) -> None:
        """Send on until it has taken `seconds` in all; `on_progress` gets the share of them."""
        asyncio.run(self._run(seconds, on_progress))

    def forget(self) -> None:
        """Let what was sent until now be no part of what is measured."""
        self._pieces.forget()

    async def _run(self, seconds: float, on_progress: Callable[[float], None]) -> None:
        self._pieces.begin()
        async with load.connect(self._url) as client:
            sent, target = await self._begin(client)
            for card in self._cards:
                outcomes, start_s, spent_s = await _play(client, target, sent, card)
                self._pieces.add(Piece(start_s, start_s + spent_s, waves_of(card, outcomes)))
                self._spent_s += spent_s
                on_progress(min(1.0, self._spent_s / seconds))
                if self._spent_s >= seconds:
                    break
        self._pieces.look()

    async def _begin(self, client: httpx.AsyncClient) -> tuple[Load, Target]:
        target = Target(model=await load.find_model(client), ignore_eos=True)
        if self._load is None:
            limits = await _limits(client)
            self._load = Load(limits, self._seed, self._seconds)
            self._cards = self._load.cards()
        return self._load, target

    def hold_out(self, seconds: float) -> None:
        """A load that nothing is fitted to: requests at random moments for `seconds`, as many as
        keep the server busy for half of the time."""
        asyncio.run(self._hold_out(seconds))

    async def _hold_out(self, seconds: float) -> None:
        others, start_s = Others(), time.monotonic()
        async with load.connect(self._url) as client:
            sent, target = await self._begin(client)
            prompts: list[Prompt] = []
            while len(prompts) < MOST_HELD_OUT and sent.pace.seconds(prompts) < seconds / 2:
                prompts += sent.requests(Card(1, 1.0))[0]
            draw = random.Random(self._seed + 1)
            offsets = sorted(draw.uniform(0, seconds) for _ in prompts)
            await load.run(client, target, prompts, offsets)
        self._held_out = start_s, time.monotonic()
        self._disturbance = others.share()

    def measured(self, trace: Trace) -> Measured:
        """What all of it says, from what the server has traced."""
        pieces = self._pieces.of_use
        spans = [(piece.start_s, piece.end_s) for piece in pieces]
        return Measured(
            trace=Trace(_within(spans, trace.steps), _within(spans, trace.loads), trace.inputs_s),
            waves=[wave for piece in pieces for wave in piece.waves],
            relay_s=self._relay_s,
            held_out=_within([self._held_out], trace.steps),
            num_disturbed=self._pieces.num_disturbed,
            disturbance=self._disturbance,
        )


async def _play(
    client: httpx.AsyncClient, target: Target, sent: Load, card: Card
) -> tuple[list[Outcome], float, float]:
    """Send a card's requests: outcomes, when that began, and how long it took."""
    prompts, offsets = sent.requests(card)
    start_s = time.monotonic()
    outcomes, spent_s = await load.run(client, target, prompts, offsets)
    if failed := next((it.error for it in outcomes if it.error), ""):
        raise TwostrokeError(f"the server failed a request: {failed}")
    if not card.spread:
        sent.pace.add(outcomes, spent_s)
    return outcomes, start_s, spent_s


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


def measure(
    config: EngineConfig,
    *,
    seconds: float,
    on_progress: Callable[[float], None] = lambda share: None,
) -> Measured:
    """Start a server with these settings and measure it for about `seconds`."""
    with tempfile.TemporaryDirectory(prefix="twostroke-profile-") as name:
        with Server(config, Path(name)) as server:
            profiler = Profiler(server.url, seconds=seconds, seed=config.seed)
            profiler.run(WARM_UP_SHARE * seconds)
            profiler.forget()
            fitted_s = (1 - HELD_OUT_SHARE) * seconds
            profiler.run(fitted_s, lambda share: on_progress((1 - HELD_OUT_SHARE) * share))
            profiler.hold_out(HELD_OUT_SHARE * seconds)
        on_progress(1.0)
        return profiler.measured(server.read())


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


def device_name() -> str:
    """The device as people call it: the GPU, else the CPU and how many cores we have."""
    import torch
    from llvmlite import binding

    if torch.cuda.is_available():
        return torch.cuda.get_device_name(0)
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    if found := re.search(r"model name\s*:\s*(.+)", text):
        name = found[1].strip()
    else:  # ARM's are told as numbers, whose meaning LLVM knows
        name = f"{platform.machine()} {binding.get_host_cpu_name()}"
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
