"""Runs twostroke's commands as a user would, each in a process group of its own."""

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


class Command:
    """A running command: its processes, what it printed."""

    def __init__(self, arguments: list[str], env: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "twostroke.cli", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | env,
            start_new_session=True,
        )
        self.lines: list[str] = []
        self._news = threading.Condition()
        self._ended = False
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._news:
                self.lines.append(line)
                self._news.notify_all()
        with self._news:
            self._ended = True
            self._news.notify_all()

    def wait_for(self, pattern: str, *, times: int = 1) -> str:
        """Wait until it has printed the pattern so often; returns the last that was found."""
        found: list[str] = []

        def is_there() -> bool:
            found[:] = re.findall(pattern, self.output)
            return len(found) >= times or self._ended

        with self._news:
            assert self._news.wait_for(is_there, START_S), self.output
        assert len(found) >= times, self.output
        return found[-1]

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def stop(self, number: signal.Signals = signal.SIGTERM, timeout_s: float = 30) -> int:
        self.process.send_signal(number)
        return self.wait(timeout_s)

    def wait(self, timeout_s: float = 30) -> int:
        code = self.process.wait(timeout_s)
        self._reader.join(timeout_s)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code

    def end(self) -> None:
        """Kill it with all its children, if it runs."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.wait()


class Served(Command):
    """A running server and its URL."""

    def __init__(self, arguments: list[str], env: dict[str, str]) -> None:
        super().__init__(["serve", *arguments], env)
        self.url = ""

    def wait_started(self) -> None:
        self.url = self.wait_for(r"http://127\.0\.0\.1:\d+")

    def core(self) -> psutil.Process:
        return self.cores()[0]

    def cores(self) -> list[psutil.Process]:
        """The engine-core processes, in the order of their start, which is the engines' order."""
        cores = [p for p in self.descendants() if "twostroke.proc.core_main" in p.cmdline()]
        return sorted(cores, key=lambda process: process.pid)

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=30)


@contextlib.contextmanager
def serving(model: Path, *arguments: str, **env: str) -> Iterator[Served]:
    """A started server, killed with all its children at the end if the test did not stop it."""
    served = Served([str(model), "--port", "0", *arguments], env)
    try:
        served.wait_started()
        yield served
    finally:
        served.end()
