"""Two processes: one owns a pool, the other, this one, reads it, whatever happens to the first."""

import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import pytest

from tests.cpu.connector.owner import SLOT, WORD, content
from twostroke.connector import shm
from twostroke.connector.base import KvMemory, TransferError
from twostroke.connector.layout import pool_bytes, record_of
from twostroke.connector.shm import ShmTransport, shared_memory
from twostroke.connector.transfer import TransferWorker
from twostroke.errors import ConfigError
from twostroke.kv.sizing import KvLayout
from twostroke.kv_messages import (
    LEASE_ENDED,
    KvCommands,
    KvEndpoint,
    KvLoad,
    KvReport,
    KvTicket,
)

LAYOUT = record_of(KvLayout(num_layers=4, num_kv_heads=2, head_dim=64), 200, "model")
BLOCK = pool_bytes(LAYOUT) // LAYOUT.num_blocks
TIMEOUT_S = 20


class Owner:
    """The other process."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            (sys.executable, "-m", "tests.cpu.connector.owner", msgspec.json.encode(LAYOUT)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout
        self.endpoint = msgspec.json.decode(self.process.stdout.readline(), type=KvEndpoint)

    def tell(self, command: str) -> None:
        assert self.process.stdin
        assert self.process.stdout
        print(command, file=self.process.stdin, flush=True)
        assert self.process.stdout.readline() == "done\n"

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def owner() -> Iterator[Owner]:
    owner = Owner()
    yield owner
    owner.close()


class Reader:
    """A worker half of ours over shared memory."""

    def __init__(self) -> None:
        self.memory, self.pool = shared_memory(LAYOUT)
        self.transport = ShmTransport()
        self.worker = TransferWorker(self.transport, self.memory, LAYOUT, engine_id="reader")
        os.close(self.memory.fd)
        self._load_id = 0

    def read(self, endpoint: KvEndpoint, num_blocks: int = 100) -> KvReport:
        """Load that many blocks; what is reported until that has ended."""
        ids = np.random.default_rng(1).permutation(np.arange(1, LAYOUT.num_blocks, dtype=np.int32))
        ticket = KvTicket(
            transfer_id=WORD,
            endpoint=endpoint,
            lease_slot=SLOT,
            num_tokens=num_blocks * LAYOUT.block_size,
            block_ids=ids[:num_blocks],
        )
        self._load_id += 1
        load = KvLoad(
            load_id=self._load_id, ticket=ticket, first_token=0, block_ids=ids[::-1][:num_blocks]
        )
        self.worker.apply(KvCommands(loads=[load]))
        every = KvReport()
        while not every.loads:
            self.worker.wait(TIMEOUT_S)
            report = self.worker.report()
            assert report, "nothing is reported"
            every.loads += report.loads
            every.links += report.links
        if not every.loads[0].error:
            theirs = content(pool_bytes(LAYOUT)).reshape(-1, BLOCK)[ticket.block_ids]
            assert (self.pool.reshape(-1, BLOCK)[load.block_ids] == theirs).all()
        return every


def kv_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("kv-")}


@pytest.fixture
def new_reader() -> Iterator[Callable[[], Reader]]:
    """Makes readers; ends their threads also where the test fails, lest others find them."""
    before, readers = kv_threads(), []

    def new() -> Reader:
        readers.append(Reader())
        return readers[-1]

    yield new
    for reader in readers:
        reader.worker.shutdown()
    assert kv_threads() <= before


@pytest.fixture
def reader(new_reader: Callable[[], Reader]) -> Reader:
    return new_reader()


def test_blocks_of_another_process(owner: Owner, reader: Reader):
    first = reader.read(owner.endpoint)
    assert not first.loads[0].error
    assert first.loads[0].num_bytes == 100 * BLOCK
    (link,) = first.links
    assert link.bytes_per_s > 1e8
    owner.tell("expire")
    assert reader.read(owner.endpoint).loads[0].error == LEASE_ENDED


def test_what_is_mapped_can_be_read_when_its_owner_is_stopped_or_dead(
    owner: Owner,
    reader: Reader,
    new_reader: Callable[[], Reader],
    monkeypatch: pytest.MonkeyPatch,
):
    """A prompt that was computed is not lost with who computed it."""
    assert not reader.read(owner.endpoint).loads[0].error
    owner.process.send_signal(signal.SIGSTOP)
    assert not reader.read(owner.endpoint).loads[0].error
    monkeypatch.setattr(shm, "HANDSHAKE_TIMEOUT_S", 0.2)
    assert new_reader().read(owner.endpoint).loads[0].error == "no answer within 0.2 s"
    owner.close()
    assert not reader.read(owner.endpoint).loads[0].error
    late = new_reader()
    assert late.read(owner.endpoint).loads[0].error == "it cannot be reached: Connection refused"


def test_killed_during_reads(owner: Owner, reader: Reader):
    killer = threading.Timer(0.05, owner.process.kill)
    assert not reader.read(owner.endpoint).loads[0].error
    killer.start()
    while owner.process.poll() is None:
        assert not reader.read(owner.endpoint).loads[0].error
    assert not reader.read(owner.endpoint).loads[0].error
    killer.join()


# ---------------------------------------------------------------- within one process


@pytest.fixture
def opened() -> Iterator[tuple[ShmTransport, KvMemory, str]]:
    memory, _ = shared_memory(LAYOUT)
    transport = ShmTransport()
    yield transport, memory, transport.open(memory, LAYOUT, "one")
    transport.close()
    transport.close()
    os.close(memory.fd)


def test_pieces_outside_of_either_memory_are_refused(opened):
    transport, memory, address = opened
    peer = transport.connect(address, "one")
    theirs, ours = memory.pool_bytes, memory.pool_bytes + memory.scratch_bytes
    peer.read(np.array([[theirs - 8, ours - 8, 8], [0, 0, 0]], np.int64))
    for row in (
        [theirs - 7, 0, 8],
        [0, ours - 7, 8],
        [-1, 0, 8],
        [0, -1, 8],
        [8, 8, -8],
        [0, 0, 1 << 62],
        [(1 << 63) - 1, 0, 1],
    ):
        with pytest.raises(TransferError, match="outside of the memory"):
            peer.read(np.array([[0, 0, 8], row], np.int64))
    peer.close()
    with pytest.raises(TransferError, match="outside of the memory"):
        peer.read(np.array([[0, 0, 8]], np.int64))
    peer.close()


def test_another_engine_at_the_address_is_not_read(opened):
    transport, _, address = opened
    with pytest.raises(TransferError, match="engine one answers in its place"):
        transport.connect(address, "two")


def test_the_memory_cannot_be_written_or_shrunk_by_a_reader(opened):
    _, memory, address = opened
    with socket.socket(socket.AF_UNIX) as owner:
        owner.connect("\0" + address)
        _, (file,), _, _ = socket.recv_fds(owner, 1024, 1)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.write(file, b"x")
    assert fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
    os.close(file)
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(memory.fd, 4096)


@pytest.mark.parametrize("sealed", [True, False])
def test_a_file_that_could_shrink_is_not_mapped(opened, sealed: bool):
    _, memory, _ = opened
    file = os.memfd_create("false", os.MFD_ALLOW_SEALING)
    os.ftruncate(file, 100 if sealed else memory.pool_bytes * 2)
    if sealed:
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    with pytest.raises(TransferError, match="not sealed at its size"):
        shm.ShmPeer(memory, file, memory.pool_bytes, 0, 1)
    os.close(file)


@pytest.mark.parametrize("strange_end", ["owner", "reader"])
def test_other_users_neither_read_nor_offer(opened, strange_end: str, monkeypatch):
    transport, _, address = opened
    real = shm._user_of

    def user_of(end: socket.socket) -> int:
        is_owner = end.getsockname() != ""  # seen from there, the other is the reader
        return real(end) + (is_owner == (strange_end == "reader"))

    monkeypatch.setattr(shm, "_user_of", user_of)
    words = {"reader": "it does not let us read", "owner": "offered by another user"}
    with pytest.raises(TransferError, match=words[strange_end]):
        transport.connect(address, "one")


def test_what_others_send_is_not_trusted(opened):
    transport, _, _ = opened
    with socket.socket(socket.AF_UNIX) as false:
        false.bind("\0twostroke-kv-test-false")
        false.listen()

        def answer() -> None:
            with false.accept()[0] as reader:
                reader.send(b"hello")

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(TransferError, match="does not let us read its memory"):
            transport.connect("twostroke-kv-test-false", "one")
        thread.join()


def test_memory_that_is_no_file_cannot_be_shared():
    memory = KvMemory(address=0, pool_bytes=8, scratch_bytes=0, leases=np.zeros((1, 16), np.uint8))
    transport = ShmTransport()
    with pytest.raises(ConfigError, match="cannot share KV through memory: No such file"):
        transport.open(memory, LAYOUT, "one")
    transport.close()
