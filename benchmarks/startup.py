"""Start-up time of the server: from the command to the first token of an answer.

    python benchmarks/startup.py [--runs 3] [--json] [-- MODEL and flags of twostroke serve]

Starts `twostroke serve` as a user would, asks until it listens, until it is ready, and then for an
answer; the median of the runs counts. The first run on a machine also fetches the model and
compiles kernels: it is made before the measured ones, and shown apart. Beside the time it shows
the processor time that all processes took by then, which other work on the machine blurs less, and
what the engine of the last run says of its own start.
"""

import argparse
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil

from twostroke.bench import report

POLL_S = 0.005
TIMEOUT_S = 600.0
STAGES = ("listening", "ready", "first token")


def command() -> str:
    beside = Path(sys.executable).with_name("twostroke")
    return str(beside) if beside.exists() else shutil.which("twostroke") or "twostroke"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for(client: httpx.Client, path: str, server: subprocess.Popen) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline_s:
        if server.poll() is not None:
            sys.exit(f"the server ended with exit code {server.returncode}")
        try:
            if client.get(path).is_success:
                return
        except httpx.TransportError:
            pass
        time.sleep(POLL_S)
    sys.exit(f"the server did not answer {path} within {TIMEOUT_S:.0f} s")


def first_token(client: httpx.Client) -> None:
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 8,
        "stream": True,
    }
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        for line in response.iter_lines():
            if '"content":"' in line.replace('": "', '":"') and '"content":""' not in line:
                return
    sys.exit(f"no token came: HTTP {response.status_code}")


def cpu_s(server: subprocess.Popen) -> float:
    """Processor time of the server and its children so far."""
    process = psutil.Process(server.pid)
    times = [it.cpu_times() for it in (process, *process.children(recursive=True))]
    return sum(it.user + it.system for it in times)


def run_once(flags: list[str]) -> tuple[dict[str, tuple[float, float]], str]:
    """Seconds from the command to each stage, and of processor time; the engine's own account."""
    port = free_port()
    start_s = time.monotonic()
    server = subprocess.Popen(
        [command(), "serve", *flags, "--port", str(port)],
        stdout=subprocess.PIPE,
        text=True,
        stderr=None if sys.stderr.isatty() else subprocess.DEVNULL,
    )
    try:
        with httpx.Client(
            base_url=f"http://127.0.0.1:{port}", timeout=TIMEOUT_S, trust_env=False
        ) as client:
            times = {}
            for stage, reach in (
                ("listening", lambda: wait_for(client, "/health", server)),
                ("ready", lambda: wait_for(client, "/ready", server)),
                ("first token", lambda: first_token(client)),
            ):
                reach()
                times[stage] = (time.monotonic() - start_s, cpu_s(server))
    finally:
        server.send_signal(signal.SIGINT)
        block, _ = server.communicate(timeout=30)
    account = [line.strip() for line in block.splitlines() if line.split()[:1] == ["Start"]]
    return times, account[0] if account else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    parser.add_argument("flags", nargs="*", help="of twostroke serve, after --")
    options = parser.parse_args()

    first, _ = run_once(options.flags)
    runs, accounts = zip(*(run_once(options.flags) for _ in range(options.runs)), strict=True)
    medians = {
        stage: tuple(statistics.median(run[stage][i] for run in runs) for i in (0, 1))
        for stage in STAGES
    }
    print(f"start-up from the command, medians of {options.runs} runs")
    print(
        report.table(
            ["until", "median s", "processor s", "first run, s"],
            [
                [stage, *(f"{value:.2f}" for value in (*medians[stage], first[stage][0]))]
                for stage in STAGES
            ],
        )
    )
    print(f"the engine: {accounts[-1]}")
    if options.json:
        print(report.json_line({"median_s": medians, "first_run_s": first, "runs_s": runs}))


if __name__ == "__main__":
    main()
