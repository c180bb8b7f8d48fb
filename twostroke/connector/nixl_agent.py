"""NIXL's bindings as far as they are needed here: an agent that registers memory and reads others'.

The bindings are used, and not the class on top of them, for one reason: that class fixes the pause
of the agent's progress thread at 0, with which the thread polls without ever sleeping and takes a
whole core as long as the process lives (NIXL 1.5.1). With a pause it sleeps until something comes.
"""

import importlib
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, Literal

import numpy as np

from twostroke.arrays import Int64s
from twostroke.connector.base import TransferError
from twostroke.errors import ConfigError

# One of these is there: the CUDA major is in the name. For host memory any of them will do.
PACKAGES = ("nixl_cu13", "nixl_cu12", "nixl_rocm")
INSTALL = 'pip install "twostroke[nixl]"'

# What UCX is told unless the user's environment says otherwise. A read over TCP is answered in
# segments, and small ones (8 KiB) make it several times slower. Warnings of UCX name each of
# thousands of requests when a connection that hangs is given up.
ENVIRONMENT = {
    "UCX_TCP_TX_SEG_SIZE": "1M",
    "UCX_TCP_RX_SEG_SIZE": "1M",
    "UCX_LOG_LEVEL": "error",
    "NIXL_LOG_LEVEL": "FATAL",  # what fails is raised, too
}
# Processes of one host need no other device, and so nobody else can reach them.
LOCAL_ENVIRONMENT = {**ENVIRONMENT, "UCX_NET_DEVICES": "lo"}

_PROGRESS_PAUSE_US = 100_000
# Looks at whether a read is done: some at once, for it may take microseconds, then ever fewer.
_EAGER_POLLS, _POLL_S, _SLOW_POLL_S, _SLOW_AFTER = 20, 50e-6, 200e-6, 200


def load(environment: Mapping[str, str]) -> ModuleType:
    """NIXL's bindings, with UCX told about `environment` where the user has not spoken.

    UCX reads it once, when it is loaded. Raises ConfigError if there is no NIXL.
    """
    for name, value in environment.items():
        os.environ.setdefault(name, value)
    torch = sys.modules.get("torch")
    cuda = (torch.version.cuda or "").split(".")[0] if torch is not None else ""
    found = [name for name in PACKAGES if importlib.util.find_spec(name) is not None]
    found.sort(key=lambda name: name != f"nixl_cu{cuda}")
    problem = f"none of {', '.join(name.replace('_', '-') for name in PACKAGES)} is installed"
    for name in found:
        try:
            return importlib.import_module(f"{name}._bindings")
        except ImportError as error:
            problem = f"{name}: {error}"
    raise ConfigError(
        f"the transport nixl cannot be used: {problem}",
        hint=f"{INSTALL}; between engines of one host --kv-transport shm needs no package",
    )


class Agent:
    """One agent with the UCX back-end. A progress thread of its own sleeps until something comes.

    It reads from at most one other agent, so that giving this one up disturbs nobody else.
    Raises ConfigError when UCX cannot start.
    """

    def __init__(self, bindings: ModuleType, name: str) -> None:
        # Typed Any: the bindings have no types.
        self._nixl: Any = bindings
        self.errors: tuple[type[Exception], ...] = tuple(
            value
            for key, value in vars(bindings).items()
            if key.startswith("nixl") and key.endswith("Error")
        )
        config = self._nixl.nixlAgentConfig()
        config.useProgThread = True
        config.useListenThread = False
        config.pthrDelay = _PROGRESS_PAUSE_US
        config.syncMode = self._nixl.NIXL_THREAD_SYNC_STRICT
        try:
            self._agent: Any = self._nixl.nixlAgent(name, config)
            self._backends = [self._agent.createBackend("UCX", {})]
        except self.errors as error:
            tls = os.environ.get("UCX_TLS", "")
            raise ConfigError(
                f"NIXL cannot start its UCX back-end: {said(error)}"
                + (f"; UCX_TLS is {tls!r}" if tls else ""),
                hint="UCX_LOG_LEVEL=info says more",
            ) from None

    def register(self, address: int, num_bytes: int, device: str) -> None:
        """Make memory readable, and readable into. Raises ConfigError."""
        kind, number = segment(device)
        entries = [(address, num_bytes, number, "")]
        try:
            listed = self._nixl.nixlRegDList(getattr(self._nixl, kind), entries)
            self._agent.registerMem(listed, self._backends)
        except self.errors as error:
            raise ConfigError(
                f"NIXL cannot register {num_bytes:,} bytes of {device}: {said(error)}",
                hint="memory that cards read is pinned: see ulimit -l",
            ) from None

    @property
    def metadata(self) -> bytes:
        """What another agent must be told to read here. Taken after all is registered."""
        return bytes(self._agent.getLocalMD())

    def connect(self, metadata: bytes) -> bytes:
        """Make another agent known and reach for it. Returns its name; raises TransferError."""
        try:
            name: bytes = self._agent.loadRemoteMD(metadata)
            self._agent.makeConnection(name, self._backends)
        except self.errors as error:
            raise TransferError(f"cannot connect: {said(error)}") from None
        return name

    def read(
        self,
        remote: bytes,
        theirs: tuple[Int64s, str],
        ours: tuple[Int64s, str],
        is_given_up: Callable[[], bool],
    ) -> bool:
        """Copy memory, [n, 2] of (address, bytes) and its device at either end; waits, without GIL.

        True: all is in place. False: nothing was begun, as memory is meant that is not registered.
        Raises TransferError when it failed or was given up: then more may still arrive, until
        the agent is closed.
        """
        try:
            handle = self._agent.createXferReq(
                self._nixl.NIXL_READ,
                self._descriptors(*ours),
                self._descriptors(*theirs),
                remote,
                b"",
                self._backends,
            )
        except self._nixl.nixlNotFoundError:
            return False
        except self.errors as error:
            raise TransferError(said(error)) from None
        try:
            self._wait(handle, is_given_up)
        finally:
            self._release(handle)
        return True

    def _wait(self, handle: int, is_given_up: Callable[[], bool]) -> None:
        try:
            status = self._agent.postXferReq(handle, b"")
            polls = 0
            while status == self._nixl.NIXL_IN_PROG:
                if is_given_up():
                    raise TransferError("given up")
                polls += 1
                if polls < _EAGER_POLLS:
                    time.sleep(0)
                else:
                    time.sleep(_POLL_S if polls < _SLOW_AFTER else _SLOW_POLL_S)
                status = self._agent.getXferStatus(handle)
        except self.errors as error:
            raise TransferError(said(error)) from None
        if status != self._nixl.NIXL_SUCCESS:
            raise TransferError(f"the transfer ended with {status}")

    def _release(self, handle: int) -> None:
        try:
            self._agent.releaseXferReq(handle)
        except self.errors:
            # It is still under way. Closing the agent, which is next, ends and frees it.
            return

    def _descriptors(self, rows: Int64s, device: str) -> Any:
        kind, number = segment(device)
        table = np.empty((len(rows), 3), np.uint64)
        table[:, :2] = rows
        table[:, 2] = number
        return self._nixl.nixlXferDList(getattr(self._nixl, kind), table)

    def close(self) -> None:
        """Destroy the agent: endpoints are cut, and nothing arrives any more. Idempotent.

        Not while another thread is in one of its methods.
        """
        self._agent = None


def segment(device: str) -> tuple[Literal["DRAM_SEG", "VRAM_SEG"], int]:
    """NIXL's name of a kind of memory, and the number of the device."""
    kind, _, number = device.partition(":")
    return ("DRAM_SEG", 0) if kind == "cpu" else ("VRAM_SEG", int(number or 0))


def said(error: Exception) -> str:
    """An error of NIXL in words."""
    text = str(error)
    known = {
        "NIXL_ERR_REMOTE_DISCONNECT": "the other end is gone",
        "NIXL_ERR_BACKEND": "UCX failed",
    }
    return f"{known[text]} ({text})" if text in known else text
