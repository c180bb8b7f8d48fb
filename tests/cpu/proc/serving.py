"""Runs `twostroke serve` as a user would, in a process group of its own."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil

START_S = 60


class Served:
    """A running server: its URL, its processes, what it printed."""

    def __init__(self, arguments: list[str], env: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "twostroke.cli", "serve", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | env,
            start_new_session=True,
        )
        self.lines: list[str] = []
        self.url = ""
        self._started = threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if found := re.search(r"http://127\.0\.0\.1:\d+", line):
                self.url = found[0]
                self._started.set()
        self._started.set()

    def wait_started(self) -> None:
        assert self._started.wait(START_S), self.output
        assert self.url, self.output

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def core(self) -> psutil.Process:
        return self.cores()[0]

    def cores(self) -> list[psutil.Process]:
        """The engine-core processes, in the order of their start, which is the engines' order."""
        cores = [p for p in self.descendants() if "twostroke.proc.core_main" in p.cmdline()]
        return sorted(cores, key=lambda process: process.pid)

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=30)

    def stop(self, number: signal.Signals = signal.SIGTERM, timeout_s: float = 30) -> int:
        self.process.send_signal(number)
        return self.wait(timeout_s)

    def wait(self, timeout_s: float = 30) -> int:
        code = self.process.wait(timeout_s)
        self._reader.join(timeout_s)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


@contextlib.contextmanager
def serving(model: Path, *arguments: str, **env: str) -> Iterator[Served]:
    """A started server, killed with all its children at the end if the test did not stop it."""
    served = Served([str(model), "--port", "0", *arguments], env)
    try:
        served.wait_started()
        yield served
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(served.process.pid, signal.SIGKILL)
        served.wait()
