"""The process in which host memory is read by others; a process of its own, as it may crash.

UCX answers a read over TCP in software, in the process that owns the memory, and when a reader dies
in the middle of one, this may end in a segmentation fault here (UCX 1.23: 2 to 5 of 16 killed
readers). Within the engine that would be: the death of a reader kills the engine it reads from. So
the engine starts this process, which maps the engine's memory file and does nothing else, and
starts another one when it has died. Readers shake hands again, at the same address.

It ends with the engine: when the socket that joins the two says so.
"""

import logging
import mmap
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time

import msgspec
import numpy as np

from twostroke.arrays import UInt8s
from twostroke.connector.nixl_agent import Agent, load
from twostroke.connector.nixl_handshake import Offer, serve
from twostroke.errors import ConfigError

logger = logging.getLogger("twostroke.nixl")

START_TIMEOUT_S = 120.0
_STOP_TIMEOUT_S = 5.0
_PAUSE_S, _MAX_PAUSE_S, _SETTLED_S = 0.05, 5.0, 60.0


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What a server is told: who it stands for, and where in the file is what it offers."""

    engine_id: str
    key: bytes
    listener_fd: int
    memory_fd: int
    num_bytes: int  # of the pool, at the start of the file
    lease_offset: int
    num_leases: int
    lease_bytes: int
    environment: dict[str, str]


class MemoryServer:
    """The engine's end: a server process that runs from now until `close`.

    The listener and the memory file of `task` are the caller's to close. Raises ConfigError when
    it cannot start.
    """

    def __init__(self, task: Task) -> None:
        self._files = [os.dup(task.memory_fd), os.dup(task.listener_fd)]
        self._task = msgspec.structs.replace(
            task, memory_fd=self._files[0], listener_fd=self._files[1]
        )
        self._lock = threading.Lock()
        self._closing = threading.Event()
        try:
            self._process, self._line = self._start()
        except BaseException:
            self._close_files()
            raise
        self._keeper = threading.Thread(target=self._keep, name="kv-server", daemon=True)
        self._keeper.start()

    @property
    def pid(self) -> int:
        """Of the process that serves now."""
        return self._process.pid

    def close(self) -> None:
        """Stop being read. Idempotent."""
        self._closing.set()
        with self._lock:
            self._line.close()
            try:
                self._process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._keeper.join()
        self._close_files()

    def _close_files(self) -> None:
        while self._files:
            os.close(self._files.pop())

    def _start(self) -> tuple["subprocess.Popen[bytes]", socket.socket]:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "twostroke.connector.nixl_server", str(theirs.fileno())]
        with theirs:
            process = subprocess.Popen(
                command,
                pass_fds=(theirs.fileno(), self._task.listener_fd, self._task.memory_fd),
                stdin=subprocess.DEVNULL,
                stdout=2,  # UCX's log
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        ours.sendall(msgspec.json.encode(self._task) + b"\n")
        said = b""
        if select.select([ours], [], [], START_TIMEOUT_S)[0]:
            said = ours.recv(4096)
        if said != b"ready":
            ours.close()
            process.kill()
            process.wait()
            what = said.decode() or f"it ended with {process.returncode}"
            raise ConfigError(f"the process that serves KV did not start: {what}")
        return process, ours

    def _keep(self) -> None:
        """Start another one when it has died, ever later if that keeps happening."""
        pause_s = _PAUSE_S
        while True:
            started_s = time.monotonic()
            code = self._process.wait()
            if self._closing.is_set():
                return
            if time.monotonic() - started_s > _SETTLED_S:
                pause_s = _PAUSE_S
            logger.warning("the process that serves KV ended with %s; starting another one", code)
            while not self._closing.wait(pause_s):
                pause_s = min(2 * pause_s, _MAX_PAUSE_S)
                if self._restart():
                    break

    def _restart(self) -> bool:
        with self._lock:
            if self._closing.is_set():
                return True
            self._line.close()
            try:
                self._process, self._line = self._start()
            except (ConfigError, OSError) as error:
                logger.warning("%s", error)
                return False
            return True


def main() -> None:
    """Serve what the process at the other end of the socket (argv[1]) says, as long as it lives."""
    # A terminal's Ctrl-C is the engine's business: it may want to finish what it does.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    line = socket.socket(fileno=int(sys.argv[1]))
    told = b""
    while not told.endswith(b"\n"):
        part = line.recv(1 << 16)
        if not part:
            return
        told += part
    task = msgspec.json.decode(told, type=Task)
    try:
        mapped, agent, offer = _open(task)
    except ConfigError as error:
        line.sendall(str(error).encode()[:4096])
        return
    listener = socket.socket(fileno=task.listener_fd)
    threading.Thread(
        target=serve,
        args=(listener, task.engine_id, task.key, offer, lambda: False),
        daemon=True,
    ).start()
    line.sendall(b"ready")
    line.recv(1)  # returns when the engine is gone
    del agent, mapped
    os._exit(0)


def _open(task: Task) -> tuple[UInt8s, Agent, Offer]:
    """Map the file and register it: to be read, and if a card wants that, also to be written."""
    for access in (mmap.PROT_READ, mmap.PROT_READ | mmap.PROT_WRITE):
        mapped = np.frombuffer(mmap.mmap(task.memory_fd, 0, prot=access), np.uint8)
        start = mapped.ctypes.data
        offer = Offer(
            agent=b"",
            address=start,
            num_bytes=task.num_bytes,
            device="cpu",
            lease_address=start + task.lease_offset,
            num_leases=task.num_leases,
        )
        agent = Agent(load(task.environment), f"{task.engine_id}-{os.getpid()}")
        try:
            agent.register(start, task.num_bytes, "cpu")
            agent.register(offer.lease_address, task.num_leases * task.lease_bytes, "cpu")
            break
        except ConfigError:
            if access & mmap.PROT_WRITE:
                raise
    return mapped, agent, msgspec.structs.replace(offer, agent=agent.metadata)


if __name__ == "__main__":
    main()
