"""Memory of a server: weights, KV, and what all its processes take beyond, at rest and at the peak.

    python benchmarks/memory.py [--prompts 8] [--tokens 2048] [--json] [-- MODEL, flags of serve]

Starts `twostroke serve`, then sends prompts of fresh text all at once, so that steps are as full as
they get, and reads the memory of all its processes as often as it can, from before the weights are
loaded to the end. Memory is what /proc/PID/smaps says: what is a process's own (PSS, but for the
pages of files), and the pages of files that are mapped, code above all, each file once however many
processes map it. The system can take the latter back at any time, and shares them with whoever else
runs the same torch. Of the KV pool only the pages that were written to are there, and 64 MiB that
are written next (`worker/pages.py`).

"Weights" is what the start-up block calls so: all forms in which they are kept. `VmHWM` is the
system's own record of a process's highest RSS: its own memory with the KV and the files.
"""

import argparse
import concurrent.futures
import contextlib
import random
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import psutil
from startup import TIMEOUT_S, command, free_port, wait_for

from twostroke.bench import report
from twostroke.worker.pages import AHEAD_BYTES

MB = 1e6
UNITS = {"GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10}


class Sampler:
    """Reads the memory of a server's processes from a thread of its own."""

    def __init__(self, server: subprocess.Popen) -> None:
        self._server = psutil.Process(server.pid)
        self._stop = threading.Event()
        self.samples: list[dict[str, float]] = []  # bytes: kv, and PSS by process
        self.peaks: dict[str, float] = {}  # VmHWM, bytes
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            with contextlib.suppress(psutil.NoSuchProcess, OSError, IndexError):  # one just ended
                self.samples.append(self.sample())

    def sample(self) -> dict[str, float]:
        found = {"KV in memory": 0.0}
        files: dict[str, float] = {}
        for process in (self._server, *self._server.children(recursive=True)):
            modules = [word for word in process.cmdline() if word.startswith("twostroke.proc.")]
            name = modules[0].removeprefix("twostroke.proc.") if modules else "api"
            directory = Path(f"/proc/{process.pid}")
            kv, own, mapped = read_smaps((directory / "smaps").read_text())
            found["KV in memory"] += kv
            found[name] = found.get(name, 0.0) + own - kv
            for file, size in mapped.items():
                files[file] = max(size, files.get(file, 0.0))
            status = (directory / "status").read_text()
            self.peaks[name] = 1024.0 * int(status.split("VmHWM:")[1].split()[0])
        found["files"] = sum(files.values())
        return found

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


def read_smaps(text: str) -> tuple[float, float, dict[str, float]]:
    """Bytes: of the KV pool, the largest mapping without a file; of all without one; of files."""
    largest_kb = kv_kb = own_kb = size_kb = rss_kb = 0
    files: dict[str, float] = {}
    file = ""
    for line in text.splitlines():
        words = line.split(maxsplit=5)
        if not words[0].endswith(":"):
            named = len(words) == 6 and words[5].startswith("/") and "memfd" not in words[5]
            file = words[5] if named else ""
        elif words[0] == "Size:":
            size_kb = int(words[1])
        elif words[0] == "Rss:":
            rss_kb = int(words[1])
            if file:
                files[file] = files.get(file, 0.0) + 1024.0 * rss_kb
        elif words[0] == "Pss:" and not file:
            own_kb += int(words[1])
            if size_kb > largest_kb:
                largest_kb, kv_kb = size_kb, int(words[1])
    # Before there is a pool the largest is something else, and much smaller.
    return (1024.0 * kv_kb if largest_kb >= 1 << 20 else 0.0), 1024.0 * own_kb, files


def fact(block: str, name: str) -> float:
    """The size in bytes behind a name of the start-up block."""
    found = re.search(rf"^ *{name} +([\d.]+) (\w+)", block, re.MULTILINE)
    if found is None:
        sys.exit(f"the start-up block does not say {name}:\n{block}")
    return float(found[1]) * UNITS[found[2]]


def load(client: httpx.Client, prompts: int, tokens: int) -> None:
    """`prompts` requests at once, of `tokens` random tokens, 32 tokens out."""
    numbers = random.Random(0)

    def ask(prompt: list[int]) -> None:
        body = {"model": "default", "prompt": prompt, "max_tokens": 32, "ignore_eos": True}
        client.post("/v1/completions", json=body).raise_for_status()

    texts = [[numbers.randrange(20, 40_000) for _ in range(tokens)] for _ in range(prompts)]
    with concurrent.futures.ThreadPoolExecutor(prompts) as pool:
        list(pool.map(ask, texts))


def measure(flags: list[str], prompts: int, tokens: int) -> dict[str, object]:
    port = free_port()
    server = subprocess.Popen(
        [command(), "serve", *flags, "--port", str(port)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    sampler = Sampler(server)
    try:
        with httpx.Client(
            base_url=f"http://127.0.0.1:{port}", timeout=TIMEOUT_S, trust_env=False
        ) as client:
            wait_for(client, "/ready", server)
            time.sleep(0.5)  # a sample of the server at rest
            at_rest = sampler.sample()
            ready = len(sampler.samples)
            load(client, prompts, tokens)
    finally:
        sampler.stop()
        server.send_signal(signal.SIGINT)
        block, _ = server.communicate(timeout=30)
    weights = fact(block, "Weights")
    beside = max(0.0, at_rest["KV in memory"] - AHEAD_BYTES)
    for sample in (*sampler.samples, at_rest):
        _count_weights_beside_kv(sample, beside)
    loading = max(sampler.samples[:ready], key=_without_kv)
    working = max(sampler.samples[ready:], key=_without_kv)
    moments = {"loading": loading, "at rest": at_rest, "working": working}
    return {"weights": weights, "moments": moments, "peaks": sampler.peaks}


def _count_weights_beside_kv(sample: dict[str, float], size: float) -> None:
    """Before any request nothing is there of the pool but what was asked for ahead. What is there
    beyond that are weights: the system makes one mapping of neighbours."""
    beside = min(sample["KV in memory"], size)
    if beside:
        sample["KV in memory"] -= beside
        sample["worker_main" if "worker_main" in sample else "core_main"] += beside


def _without_kv(sample: dict[str, float]) -> float:
    return sum(sample.values()) - sample["KV in memory"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    parser.add_argument("flags", nargs="*", help="of twostroke serve, after --")
    options = parser.parse_args()

    measured = measure(options.flags, options.prompts, options.tokens)
    weights, moments, peaks = measured["weights"], measured["moments"], measured["peaks"]
    names = [*sorted(peaks), "files", "KV in memory"]
    rows = []
    for moment, sample in moments.items():
        beyond = _without_kv(sample) - weights
        cells = (*(sample.get(name, 0.0) for name in names), beyond, beyond - sample["files"])
        rows.append([moment, *(f"{cell / MB:.0f}" for cell in cells)])
    print(f"memory in MB; weights {weights / MB:.0f} MB; each process's own is without KV")
    print(report.table(["", *names, "beyond weights and KV", "of it no files"], rows))
    print("highest RSS (VmHWM): " + ", ".join(f"{n} {peaks[n] / MB:.0f} MB" for n in sorted(peaks)))
    if options.json:
        print(report.json_line(measured))


if __name__ == "__main__":
    main()
