"""Transport over NIXL and UCX: shared memory and TCP anywhere, RDMA and GPU memory where they are.

    our rank     pool ◀─── agent A ◀───────────────────── server of rank 0 of engine X
                      ◀─── agent B ◀───────────────────── server of rank 1 of engine X
                 pool ───▶ server ────────────────────────▶ whoever reads from us

A peer is read through an agent of its own. NIXL has neither a time-out nor a cancel that keeps what
was asked for from arriving later; what ends a read for certain is the end of its agent, and the
other peers must not notice. Whatever goes wrong once a read has begun ends its agent, before the
error is raised. Memory is registered once for each peer and once to be read.

Host memory is read in a process of its own (`nixl_server`), memory of a GPU in this one.
"""

import os
import socket
import threading
from types import ModuleType

import numpy as np

from twostroke.arrays import Int64s
from twostroke.connector.base import KvMemory, TransferError
from twostroke.connector.nixl_agent import ENVIRONMENT, LOCAL_ENVIRONMENT, Agent, load
from twostroke.connector.nixl_handshake import Offer, ask, listen, serve
from twostroke.connector.nixl_server import MemoryServer, Task
from twostroke.errors import ConfigError
from twostroke.kv_messages import TRANSFER_ID_BYTES, KvLayoutRecord


class NixlTransport:
    """Implements `connector.base.Transport`.

    `host` is the address at which readers on other hosts reach us, and `key` what all of them share
    with us; an empty host: readers of this host and user alone. Raises ConfigError for a host
    without a key.
    """

    name = "nixl"
    # UCX takes more at once, but between two reads a load can be given up.
    max_pieces = 4096
    max_piece_bytes = 1 << 30

    def __init__(self, host: str = "", key: bytes = b"") -> None:
        if host and not key:
            raise ConfigError(
                f"KV can be read at {host}, but there is no key to know its readers by",
                hint="engines that join over the network need --key FILE",
            )
        self._host, self._key = host, key
        self._environment = ENVIRONMENT if host else LOCAL_ENVIRONMENT
        self._bindings: ModuleType | None = None
        self._memory: KvMemory | None = None
        self._listener: socket.socket | None = None
        self._server: MemoryServer | _OwnServer | None = None

    def open(self, memory: KvMemory, layout: KvLayoutRecord, engine_id: str) -> str:
        """Start to serve. Raises ConfigError, also when NIXL is not installed."""
        self._bindings, self._memory = load(self._environment), memory
        # Loads UCX and shows that it works: half a second now, and not at the first handshake.
        Agent(self._bindings, f"{engine_id}-probe").close()
        self._listener, address = listen(self._host, engine_id)
        if memory.fd < 0:
            self._server = _OwnServer(self._bindings, self._listener, memory, engine_id, self._key)
            return address
        self._server = MemoryServer(
            Task(
                engine_id=engine_id,
                key=self._key,
                listener_fd=self._listener.fileno(),
                memory_fd=memory.fd,
                num_bytes=memory.pool_bytes,
                lease_offset=memory.leases.ctypes.data - memory.address,
                num_leases=len(memory.leases),
                lease_bytes=TRANSFER_ID_BYTES,
                environment=dict(self._environment),
            )
        )
        return address

    def connect(self, address: str, engine_id: str) -> "NixlPeer":
        """Shake hands, and connect an agent for this peer alone. Raises TransferError."""
        assert self._bindings is not None, "open comes first"
        assert self._memory is not None
        offer = ask(address, engine_id, self._key)
        return NixlPeer(self._bindings, self._memory, offer)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        if self._listener is not None:
            self._listener.close()


class NixlPeer:
    """Implements `connector.base.Peer`.

    Besides what the protocol asks for, `close` may be called while another thread hangs in a read:
    the read then ends with a TransferError, and nothing arrives any more.
    """

    def __init__(self, bindings: ModuleType, memory: KvMemory, offer: Offer) -> None:
        self._memory, self._offer = memory, offer
        self._word = np.zeros(TRANSFER_ID_BYTES, np.uint8)
        self._given_up = threading.Event()
        self._using = threading.Lock()  # the agent
        name = f"reader-{os.urandom(8).hex()}"
        try:
            self._agent = Agent(bindings, name)
            self._agent.register(
                memory.address, memory.pool_bytes + memory.scratch_bytes, memory.device
            )
            self._agent.register(self._word.ctypes.data, TRANSFER_ID_BYTES, "cpu")
        except ConfigError as error:
            raise TransferError(str(error)) from None
        self._remote = self._agent.connect(offer.agent)

    def read(self, pieces: Int64s) -> None:
        memory, offer = self._memory, self._offer
        limits = np.array([offer.num_bytes, memory.pool_bytes + memory.scratch_bytes])
        pieces = pieces[pieces[:, 2] != 0]
        if pieces.min(initial=0) < 0 or (pieces[:, :2] > limits - pieces[:, 2:]).any():
            raise TransferError("a piece lies outside of the memory")
        if not len(pieces):
            return
        self._copy(
            np.stack([pieces[:, 0] + offer.address, pieces[:, 2]], axis=1),
            np.stack([pieces[:, 1] + memory.address, pieces[:, 2]], axis=1),
            (offer.device, memory.device),
        )

    def lease(self, slot: int) -> bytes:
        if not 0 <= slot < self._offer.num_leases:
            raise TransferError(f"lease slot {slot} of {self._offer.num_leases}")
        there = self._offer.lease_address + slot * TRANSFER_ID_BYTES
        self._copy(
            np.array([[there, TRANSFER_ID_BYTES]]),
            np.array([[self._word.ctypes.data, TRANSFER_ID_BYTES]]),
            ("cpu", "cpu"),
        )
        return self._word.tobytes()

    def close(self) -> None:
        self._given_up.set()
        with self._using:
            self._agent.close()

    def _copy(self, theirs: Int64s, ours: Int64s, devices: tuple[str, str]) -> None:
        with self._using:
            if self._given_up.is_set():
                raise TransferError("the connection was closed")
            try:
                begun = self._agent.read(
                    self._remote, (theirs, devices[0]), (ours, devices[1]), self._given_up.is_set
                )
            except TransferError:
                self._given_up.set()
                self._agent.close()
                raise
        if not begun:
            raise TransferError("memory that is not registered at one of the ends")


class _OwnServer:
    """Serves memory that no other process can map, from this one."""

    def __init__(
        self,
        bindings: ModuleType,
        listener: socket.socket,
        memory: KvMemory,
        engine_id: str,
        key: bytes,
    ) -> None:
        self._closing = threading.Event()
        self._agent = Agent(bindings, f"{engine_id}-{os.getpid()}")
        self._agent.register(memory.address, memory.pool_bytes, memory.device)
        self._agent.register(memory.leases.ctypes.data, memory.leases.nbytes, "cpu")
        offer = Offer(
            agent=self._agent.metadata,
            address=memory.address,
            num_bytes=memory.pool_bytes,
            device=memory.device,
            lease_address=memory.leases.ctypes.data,
            num_leases=len(memory.leases),
        )
        self._thread = threading.Thread(
            target=serve,
            args=(listener, engine_id, key, offer, self._closing.is_set),
            name="kv-server",
            daemon=True,
        )
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
        self._agent.close()
