"""Mooncake's transfer engine over TCP, for `bench transfer` only: it is no transport of an engine.

It listens on all addresses of the host and asks nobody for a key; MC_TCP_BIND_ADDRESS does not
change that (0.3.13.post1). So it runs for as long as the benchmark does, over a pool that holds
nothing but a pattern.
"""

import contextlib
import mmap
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from twostroke.arrays import Int64s, UInt8s
from twostroke.bench.transfer import Direction, Mover, fill
from twostroke.connector.base import TransferError
from twostroke.errors import ConfigError

# More than 1,024 queued and 1,024 waiting a peer are refused, and those queued arrive all the same.
_MAX_PIECES = 1024
_HOST = "127.0.0.1"


def load() -> Any:
    """Mooncake's engine class. Raises ConfigError when it cannot be imported."""
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    os.environ.setdefault("GLOG_minloglevel", "2")
    os.environ.setdefault("MC_TCP_BIND_ADDRESS", _HOST)
    try:
        from mooncake.engine import TransferEngine
    except ImportError as error:
        raise ConfigError(
            f"mooncake cannot be used: {error}",
            hint='pip install "twostroke[mooncake]"; it also needs the system library libibverbs1',
        ) from None
    return TransferEngine


class MooncakeLink:
    """Another process with a pool, read and written by Mooncake."""

    transport = "mooncake"
    directions: tuple[Direction, ...] = ("read", "write")
    max_pieces = _MAX_PIECES

    def __init__(self, pool_bytes: int) -> None:
        self._engine = _started(load())
        self.here: UInt8s = np.frombuffer(mmap.mmap(-1, pool_bytes), np.uint8)
        self._engine.register_memory(self.here.ctypes.data, pool_bytes)
        file = os.memfd_create("twostroke-bench")
        os.ftruncate(file, pool_bytes)
        self.there: UInt8s = np.frombuffer(mmap.mmap(file, pool_bytes), np.uint8)
        self._owner = subprocess.Popen(
            (sys.executable, "-m", __name__, str(file), str(pool_bytes)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=(file,),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        os.close(file)
        assert self._owner.stdout
        self._segment, _, start = self._owner.stdout.readline().strip().partition(" ")
        if not start:
            self.close()
            raise ConfigError("Mooncake's process did not start; what it says is above")
        self._start = int(start)

    def movers(self, number: int, direction: Direction) -> list[Mover]:
        if direction == "read":
            fill(self.there)
            return [self._read] * number
        return [self._write] * number

    def _read(self, pieces: Int64s) -> None:
        self._move(self._engine.batch_transfer_sync_read, pieces)

    def _write(self, pieces: Int64s) -> None:
        self._move(self._engine.batch_transfer_sync_write, pieces)

    def _move(self, call: Any, pieces: Int64s) -> None:
        here = (pieces[:, 1] + self.here.ctypes.data).tolist()
        there = (pieces[:, 0] + self._start).tolist()
        if status := call(self._segment, here, there, pieces[:, 2].tolist()):
            raise TransferError(f"Mooncake says {status}")

    def cpu_s(self) -> float:
        return cpu_s_of([os.getpid(), *(it.pid for it in psutil.Process().children())])

    def close(self) -> None:
        self._owner.communicate()


def cpu_s_of(pids: list[int]) -> float:
    """Processor seconds of processes with all their threads, to the nanosecond."""
    total_ns = 0
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError):  # a thread that has ended meanwhile
                total_ns += int(task.read_text().split()[0])
    return total_ns / 1e9


def _started(engine_class: Any) -> Any:
    engine = engine_class()
    if status := engine.initialize(_HOST, "P2PHANDSHAKE", "tcp", ""):
        raise ConfigError(f"Mooncake's transfer engine did not start: status {status}")
    return engine


def main() -> None:
    """The other end. Arguments: the descriptor of its pool's memory file, and its bytes."""
    file, num_bytes = int(sys.argv[1]), int(sys.argv[2])
    pool = np.frombuffer(mmap.mmap(file, num_bytes), np.uint8)
    engine = _started(load())
    engine.register_memory(pool.ctypes.data, num_bytes)
    print(f"{_HOST}:{engine.get_rpc_port()}", pool.ctypes.data, flush=True)
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
