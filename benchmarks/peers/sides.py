"""The two sides of a comparison as processes: started, given jobs, stopped while the other runs.

A side is a runner (`run_*.py`) in its own environment. It holds its model for the whole
comparison, and its processes are stopped by a signal while they are not measured: an idle engine
polls, and would slow the other.
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import psutil

from twostroke.bench.offline import WARM_UP_PROMPTS, WARM_UP_TOKENS, Case

HERE = Path(__file__).parent
STOP_S = 30.0  # an engine that has not ended by then is killed


class SideError(Exception):
    """A side ended, or answered something else than it should; the text says which and why."""


@dataclass(frozen=True)
class Command:
    """How a side is started: its name in tables, the words, and what its environment adds."""

    name: str
    words: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)


class Processes:
    """A command and all processes that come of it, in a session of their own."""

    def __init__(self, command: Command, log: Path, *, piped: bool) -> None:
        self.name, self.log = command.name, log
        self.start_s = time.perf_counter()
        pipe = subprocess.PIPE if piped else subprocess.DEVNULL
        with log.open("w") as stderr:
            self.popen = subprocess.Popen(
                command.words,
                stdin=pipe,
                stdout=pipe if piped else stderr,
                stderr=stderr,
                text=True,
                start_new_session=True,
                env={**os.environ, **command.environment},
            )

    def all(self) -> list[psutil.Process]:
        try:
            first = psutil.Process(self.popen.pid)
            return [first, *first.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def pause(self) -> None:
        """Stop all, and wait until they stand."""
        processes = self.all()
        for process in processes:
            process.suspend()
        deadline_s = time.monotonic() + 5
        while time.monotonic() < deadline_s and not all(map(_stands, processes)):
            time.sleep(0.001)

    def resume(self) -> None:
        for process in self.all():
            process.resume()

    def cpu_s(self) -> float:
        """CPU seconds of all processes so far."""
        return sum(sum(process.cpu_times()[:2]) for process in self.all())

    def peak_bytes(self) -> int:
        """Sum of the processes' peaks of resident memory; pages they share count in each."""
        peak = 0
        for process in self.all():
            status = Path(f"/proc/{process.pid}/status").read_text()
            lines = dict(line.split(":", 1) for line in status.splitlines())
            peak += int(lines.get("VmHWM", "0 kB").split()[0]) * 1024
        return peak

    def failure(self) -> SideError:
        said = self.log.read_text(errors="replace").strip().splitlines()
        last = said[-1] if said else "it printed nothing"
        return SideError(
            f"{self.name} ended with exit code {self.popen.poll()}: {last}; see {self.log}"
        )

    def end(self) -> None:
        """A runner ends with its stdin, a server by a signal; what is left is killed."""
        self.resume()
        processes = self.all()
        if self.popen.stdin is None:
            self.popen.send_signal(signal.SIGINT)
        else:
            with suppress(BrokenPipeError):
                self.popen.stdin.close()
        _, alive = psutil.wait_procs(processes, timeout=STOP_S)
        for process in alive:
            process.kill()
        self.popen.wait()
        if self.popen.stdout is not None:
            self.popen.stdout.close()


def _busy_s() -> float:
    """CPU seconds of the whole machine since it started."""
    times = psutil.cpu_times()
    return times.user + times.system + times.nice + times.irq + times.softirq


def _stands(process: psutil.Process) -> bool:
    try:
        return process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


@dataclass(frozen=True)
class Run:
    """One job on one side. CPU time is that of all its processes, idle spinning included.

    `foreign` is the share of the machine's CPU time that other processes had meanwhile.
    """

    elapsed_s: float
    cpu_s: float
    foreign: float


class Side:
    """A runner with its model loaded."""

    def __init__(self, command: Command, log: Path) -> None:
        self.name = command.name
        self.processes = Processes(command, log, piped=True)
        try:
            ready = self._answer()
        except SideError:
            self.close()
            raise
        self.version = str(ready["version"])
        self.load_s = float(ready["load_s"])

    def run(self, case: Case) -> Run:
        """Time a case; raises SideError when fewer tokens came than were asked for."""
        cpu_s, machine_s = self.processes.cpu_s(), _busy_s()
        answer = self.ask(case.prompts, case.output_tokens)
        if answer["num_output_tokens"] != case.num_output_tokens:
            raise SideError(
                f"{self.name} made {answer['num_output_tokens']} tokens of case {case.name}; "
                f"{case.num_output_tokens} were asked for"
            )
        cpu_s = self.processes.cpu_s() - cpu_s
        elapsed_s = float(answer["elapsed_s"])
        others_s = max(0.0, _busy_s() - machine_s - cpu_s)
        return Run(elapsed_s, cpu_s, others_s / max(elapsed_s * psutil.cpu_count(), 1e-3))

    def warm_up(self, case: Case) -> None:
        """Prompts of the case's shape with no prefix in common with it."""
        prompts = [prompt[::-1] for prompt in case.prompts[:WARM_UP_PROMPTS]]
        self.ask(prompts, min(case.output_tokens, WARM_UP_TOKENS))

    def ask(self, prompts: Sequence[Sequence[int]], output_tokens: int) -> dict:
        stdin = self.processes.popen.stdin
        assert stdin is not None
        try:
            stdin.write(json.dumps({"prompts": prompts, "output_tokens": output_tokens}) + "\n")
            stdin.flush()
        except BrokenPipeError:
            raise self.processes.failure() from None
        return self._answer()

    def _answer(self) -> dict:
        stdout: IO[str] | None = self.processes.popen.stdout
        assert stdout is not None
        line = stdout.readline()
        if not line:
            self.processes.popen.wait()
            raise self.processes.failure()
        return dict(json.loads(line))

    def close(self) -> None:
        self.processes.end()


@contextmanager
def running(processes: Processes) -> Iterator[None]:
    """Runs within, stands still outside."""
    processes.resume()
    try:
        yield
    finally:
        processes.pause()
