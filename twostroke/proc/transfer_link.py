"""The two ends of `bench transfer`: a process that is read from, and the transport to read it by.

memcpy    both pools here: what the memory itself allows
shm, nixl the engine's own transports, and a process with a pool like an engine's
mooncake  Mooncake's transfer engine (`mooncake_link`)
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial

import psutil

from twostroke.arrays import Int64s, UInt8s
from twostroke.bench.options import TransferOptions
from twostroke.bench.transfer import Direction, Link, Mover, Plan, fill
from twostroke.connector.base import KvMemory, Peer, TransferError, Transport
from twostroke.connector.nixl import NixlTransport
from twostroke.connector.shm import ShmTransport, shared_memory
from twostroke.errors import ConfigError
from twostroke.keys import read_key
from twostroke.kv_messages import KvLayoutRecord
from twostroke.proc.mooncake_link import MooncakeLink, cpu_s_of

_SLOT_BYTES = 4096  # of a block of the layout, which here only says how large the pool is
_ENGINE_ID = "bench"


@contextlib.contextmanager
def opened(transport: str, options: TransferOptions) -> Iterator[Link]:
    """A link over `transport`. Raises ConfigError, also for what goes wrong while it is used."""
    if options.peer and transport not in ("nixl", "memcpy"):
        raise ConfigError(
            f"--peer does not go with --transport {transport}", hint="only nixl reaches out"
        )
    pool_bytes = Plan.of(options).pool_bytes
    link: Link
    if transport == "memcpy":
        link = MemcpyLink(pool_bytes)
    elif transport == "mooncake":
        link = MooncakeLink(pool_bytes)
    else:
        link = ProcessLink(transport, pool_bytes, options)
    try:
        yield link
    except TransferError as error:
        raise ConfigError(f"{transport} cannot be measured: {error}") from None
    finally:
        link.close()


def serve(options: TransferOptions) -> Iterator[str]:
    """Be read from: yields the address, and goes on serving until it is closed."""
    if options.transport != "nixl":
        raise ConfigError(f"--serve does not go with --transport {options.transport}; nixl has it")
    with _owned(
        NixlTransport(options.serve, _key(options)), Plan.of(options).pool_bytes
    ) as address:
        yield address


class MemcpyLink:
    """Two pools in this process, copied by the code that `shm` copies with."""

    transport = "memcpy"
    directions: tuple[Direction, ...] = ("read", "write")
    max_pieces = ShmTransport.max_pieces

    def __init__(self, pool_bytes: int) -> None:
        self._ends: dict[Direction, tuple[ShmTransport, str]] = {}
        pools = {}
        for end in self.directions:  # the one who reads, the one who writes
            memory, pools[end] = shared_memory(_layout(pool_bytes))
            transport = ShmTransport()
            self._ends[end] = transport, transport.open(memory, _layout(pool_bytes), end)
            os.close(memory.fd)
        self.here, self.there = pools["read"], pools["write"]
        fill(self.there)
        self._peers: list[Peer] = []

    def movers(self, number: int, direction: Direction) -> list[Mover]:
        transport, _ = self._ends[direction]
        other: Direction = "write" if direction == "read" else "read"
        peers = [transport.connect(self._ends[other][1], other) for _ in range(number)]
        self._peers += peers
        if direction == "read":
            return [peer.read for peer in peers]
        return [partial(_read_backwards, peer) for peer in peers]

    def cpu_s(self) -> float:
        return cpu_s_of([os.getpid()])

    def close(self) -> None:
        for peer in self._peers:
            peer.close()
        for transport, _ in self._ends.values():
            transport.close()


def _read_backwards(peer: Peer, pieces: Int64s) -> None:
    peer.read(pieces[:, [1, 0, 2]])


class ProcessLink:
    """Another process, read over one of the engine's transports."""

    directions: tuple[Direction, ...] = ("read",)
    there: UInt8s | None = None

    def __init__(self, transport: str, pool_bytes: int, options: TransferOptions) -> None:
        self.transport = transport
        self._transport: Transport = (
            NixlTransport(key=_key(options)) if transport == "nixl" else ShmTransport()
        )
        self.max_pieces = self._transport.max_pieces
        self._memory: KvMemory
        self._memory, self.here = shared_memory(_layout(pool_bytes))
        self._transport.open(self._memory, _layout(pool_bytes), f"{_ENGINE_ID}-reader")
        os.close(self._memory.fd)
        self._peers: list[Peer] = []
        self._owner: subprocess.Popen[str] | None = None
        if options.peer:
            self._address = options.peer
        else:
            self._owner, self._address = owner_process(__name__, transport, str(pool_bytes))

    def movers(self, number: int, direction: Direction) -> list[Mover]:
        while len(self._peers) < number:
            self._peers.append(self._transport.connect(self._address, _ENGINE_ID))
        return [peer.read for peer in self._peers[:number]]

    def cpu_s(self) -> float:
        pids = [os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))]
        return cpu_s_of(pids)

    def close(self) -> None:
        for peer in self._peers:
            peer.close()
        self._transport.close()
        if self._owner is not None:
            self._owner.communicate()


def owner_process(module: str, *arguments: str) -> tuple["subprocess.Popen[str]", str]:
    """Start the other end, which prints its address and stays until its input ends."""
    process = subprocess.Popen(
        (sys.executable, "-m", module, *arguments),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert process.stdout
    address = process.stdout.readline().strip()
    if not address:
        process.kill()
        process.communicate()
        raise ConfigError("the process to read from did not start; what it says is above")
    return process, address


def _layout(pool_bytes: int) -> KvLayoutRecord:
    return KvLayoutRecord(
        model="bench",
        dtype="float16",
        num_layers=1,
        num_kv_heads=1,
        head_dim=_SLOT_BYTES // (2 * 16 * 2),
        block_size=16,
        num_blocks=pool_bytes // _SLOT_BYTES,
    )


def _key(options: TransferOptions) -> bytes:
    return read_key(options.key).engine.secret if options.key else b""


@contextlib.contextmanager
def _owned(transport: Transport, pool_bytes: int) -> Iterator[str]:
    memory, pool = shared_memory(_layout(pool_bytes))
    fill(pool)
    address = transport.open(memory, _layout(pool_bytes), _ENGINE_ID)
    try:
        yield address
    finally:
        transport.close()


def main() -> None:
    """The process that is read from. Arguments: the transport, and the bytes of the pool."""
    transport: Transport = NixlTransport() if sys.argv[1] == "nixl" else ShmTransport()
    with _owned(transport, int(sys.argv[2])) as address:
        print(address, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
