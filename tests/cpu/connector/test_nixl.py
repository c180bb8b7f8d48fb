"""Reads over NIXL between processes, and what becomes of them when one of these stops or dies."""

import contextlib
import dataclasses
import importlib.util
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import msgspec
import numpy as np
import psutil
import pytest

from tests.cpu.connector.owner import SLOT, WORD, content
from twostroke.connector import nixl_agent
from twostroke.connector.base import TransferError
from twostroke.connector.layout import record_of
from twostroke.connector.nixl import NixlPeer, NixlTransport
from twostroke.connector.shm import shared_memory
from twostroke.connector.transfer import TransferWorker
from twostroke.errors import ConfigError
from twostroke.kv.sizing import KvLayout
from twostroke.kv_messages import KvCommands, KvEndpoint, KvLoad, KvTicket

pytestmark = pytest.mark.skipif(
    not any(importlib.util.find_spec(name) for name in nixl_agent.PACKAGES),
    reason=f"NIXL is not installed: {nixl_agent.INSTALL}",
)

LAYOUT = record_of(KvLayout(num_layers=4, num_kv_heads=2, head_dim=64), 1000, "model")
WIRES = ["tcp,shm,self", "tcp,self"]
TIMEOUT_S = 30


class Owner:
    """An engine process that is read from, and the process in which it is."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            (
                sys.executable,
                "-m",
                "tests.cpu.connector.owner",
                msgspec.json.encode(LAYOUT),
                "nixl",
            ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout
        self.endpoint = msgspec.json.decode(self.process.stdout.readline(), type=KvEndpoint)

    @property
    def server(self) -> psutil.Process:
        (child,) = psutil.Process(self.process.pid).children()
        return child

    def close(self) -> None:
        children = (
            psutil.Process(self.process.pid).children() if self.process.poll() is None else []
        )
        self.process.kill()
        self.process.communicate()
        for child in children:  # one that was stopped by a test
            child.kill()


class Reader:
    """Memory of ours, and the way to an owner."""

    def __init__(self, owner: Owner) -> None:
        self.owner = owner
        self.memory, self.pool = shared_memory(LAYOUT)
        self.transport = NixlTransport()
        self.transport.open(self.memory, LAYOUT, "reader")
        os.close(self.memory.fd)

    def connect(self) -> NixlPeer:
        return self.transport.connect(self.owner.endpoint.addresses[0], "owner")


@contextlib.contextmanager
def reading(tls: str) -> Iterator[Reader]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UCX_TLS", tls)
        with contextlib.closing(Owner()) as owner:
            reader = Reader(owner)
            with contextlib.closing(reader.transport):
                yield reader


@pytest.fixture(scope="module", params=WIRES)
def reader(request: pytest.FixtureRequest) -> Iterator[Reader]:
    """For tests that leave the owner alone."""
    with reading(request.param) as reader:
        yield reader


def random_pieces(number: int, num_bytes: int) -> np.ndarray:
    """[number, 3] Pieces of any size, none overlapping at either end."""
    rng = np.random.default_rng(number)
    edge = num_bytes // number
    sizes = rng.integers(1, edge + 1, number)
    theirs = rng.permutation(number) * edge + rng.integers(0, edge + 1 - sizes)
    ours = rng.permutation(number) * edge + rng.integers(0, edge + 1 - sizes)
    return np.stack([theirs, ours, sizes], axis=1)


def assert_read(pool: np.ndarray, pieces: np.ndarray) -> None:
    """What the pieces say is in place, and nothing else has changed; 255 is in no content."""
    expected = np.full(len(pool), 255, np.uint8)
    theirs = content(len(pool))
    for there, here, length in pieces.tolist():
        expected[here : here + length] = theirs[there : there + length]
    assert (pool == expected).all()


def read_until_it_fails(peer: NixlPeer, pieces: np.ndarray) -> str:
    deadline_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline_s:
        try:
            peer.read(pieces)
        except TransferError as error:
            return str(error)
    return ""


def test_random_pieces_of_another_process(reader: Reader):
    peer = reader.connect()
    for number in (1, 77, NixlTransport.max_pieces):
        pieces = random_pieces(number, len(reader.pool))
        reader.pool[:] = 255
        peer.read(pieces)
        assert_read(reader.pool, pieces)
    assert peer.lease(SLOT) == WORD
    assert peer.lease(SLOT + 1) == bytes(16)
    peer.close()
    peer.close()
    with pytest.raises(TransferError, match="the connection was closed"):
        peer.read(pieces)


def test_pieces_outside_of_either_memory_are_refused(reader: Reader):
    theirs, ours = len(reader.pool), len(reader.pool) + reader.memory.scratch_bytes
    peer = reader.connect()
    for row in ([theirs - 7, 0, 8], [0, ours - 7, 8], [-1, 0, 8], [0, 8, -8], [0, 0, 1 << 62]):
        with pytest.raises(TransferError, match="outside of the memory"):
            peer.read(np.array([[0, 0, 8], row]))
    with pytest.raises(TransferError, match="lease slot 1000 of 1000"):
        peer.lease(LAYOUT.num_blocks)
    peer.read(np.array([[theirs - 8, ours - 8, 8], [0, 0, 0]]))
    # NIXL itself knows what was registered: here a reader that was told of more than there is.
    peer._offer = msgspec.structs.replace(peer._offer, num_bytes=1 << 40)
    with pytest.raises(TransferError, match="not registered"):
        peer.read(np.array([[0, 0, 8], [1 << 39, 0, 8]]))
    assert peer.lease(SLOT) == WORD
    peer.close()


def test_a_load_of_more_pieces_than_a_read_takes(
    reader: Reader, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
):
    monkeypatch.setattr(NixlTransport, "max_pieces", 64)
    memory, pool = shared_memory(LAYOUT)
    worker = TransferWorker(NixlTransport(), memory, LAYOUT, engine_id="worker")
    request.addfinalizer(worker.shutdown)
    os.close(memory.fd)
    ids = np.random.default_rng(1).permutation(np.arange(1, LAYOUT.num_blocks, dtype=np.int32))
    ticket = KvTicket(
        transfer_id=WORD,
        endpoint=reader.owner.endpoint,
        lease_slot=SLOT,
        num_tokens=900 * LAYOUT.block_size,
        block_ids=ids[:900],
    )
    load = KvLoad(load_id=1, ticket=ticket, first_token=0, block_ids=ids[::-1][:900])
    worker.apply(KvCommands(loads=[load]))
    ends = []
    while not ends:
        worker.wait(TIMEOUT_S)
        report = worker.report()
        assert report, "nothing is reported"
        ends += report.loads
    assert not ends[0].error
    assert ends[0].num_messages > 800
    size = len(pool) // LAYOUT.num_blocks
    theirs = content(len(pool)).reshape(-1, size)[ticket.block_ids]
    assert (pool.reshape(-1, size)[load.block_ids] == theirs).all()


@pytest.mark.parametrize("wire", WIRES)
def test_deaths_during_reads(wire: str):
    """A server that dies is replaced at the same address; one whose engine dies goes, too."""
    with reading(wire) as reader:
        peer = reader.connect()
        pieces = random_pieces(500, len(reader.pool))
        threading.Timer(0.05, reader.owner.server.kill).start()
        assert "NIXL_ERR_REMOTE_DISCONNECT" in read_until_it_fails(peer, pieces)
        again = reader.connect()
        reader.pool[:] = 255
        again.read(pieces)
        assert_read(reader.pool, pieces)
        server = reader.owner.server
        threading.Timer(0.05, reader.owner.process.kill).start()
        assert "NIXL_ERR_REMOTE_DISCONNECT" in read_until_it_fails(again, pieces)
        server.wait(TIMEOUT_S)
        with pytest.raises(TransferError, match="no handshake at @"):
            reader.connect()
        for closed in (peer, again):
            closed.close()


def test_a_server_that_hangs():
    """A read waits for it, unless the connection is closed; then nothing arrives any more."""
    with reading("tcp,self") as reader:
        peer, server = reader.connect(), reader.owner.server
        pieces = random_pieces(500, len(reader.pool))
        reader.pool[:] = 255
        server.suspend()
        thread = threading.Thread(target=peer.read, args=(pieces,))
        thread.start()
        thread.join(0.5)
        assert thread.is_alive()
        server.resume()
        thread.join(TIMEOUT_S)
        assert_read(reader.pool, pieces)

        reader.pool[:] = 255
        server.suspend()
        errors: list[str] = []
        thread = threading.Thread(target=lambda: errors.append(read_until_it_fails(peer, pieces)))
        thread.start()
        thread.join(0.2)
        peer.close()
        thread.join(TIMEOUT_S)
        assert errors == ["given up"]
        before = reader.pool.copy()
        server.resume()
        # What another connection asks for comes after all that the server may still send. It may
        # also crash, as a server does whose reader goes in the middle of a read.
        with contextlib.suppress(TransferError):
            reader.connect().lease(SLOT)
        assert (reader.pool == before).all()


def test_a_reader_that_dies_does_not_take_the_engine_with_it(reader: Reader):
    """Over TCP its death may crash the server: this is what the engine must survive."""
    address, engine = reader.owner.endpoint.addresses[0], reader.owner.process
    victim = subprocess.Popen(
        (
            sys.executable,
            "-m",
            "tests.cpu.connector.reader",
            address,
            msgspec.json.encode(LAYOUT),
        ),
        stdout=subprocess.PIPE,
    )
    assert victim.stdout
    assert victim.stdout.readline() == b"reading\n"
    victim.kill()
    victim.communicate()
    assert engine.poll() is None
    peer = reader.connect()
    assert peer.lease(SLOT) == WORD
    peer.close()


def test_memory_that_is_no_file_is_served_by_the_engine_itself():
    memory, pool = shared_memory(LAYOUT)
    pool[:] = 7
    transport = NixlTransport()
    address = transport.open(dataclasses.replace(memory, fd=-1), LAYOUT, "one")
    ours, mine = shared_memory(LAYOUT)
    other = NixlTransport(host="127.0.0.1", key=b"key")
    other.open(ours, LAYOUT, "two")
    with pytest.raises(TransferError, match="lacks the key"):
        other.connect(address, "one")
    same = NixlTransport()
    same._bindings, same._memory = other._bindings, ours
    peer = same.connect(address, "one")
    peer.read(np.array([[0, 4096, 4096]]))
    assert (mine[:4096] == 0).all()
    assert (mine[4096:8192] == 7).all()
    peer.close()
    transport.close()
    other.close()
    for fd in (memory.fd, ours.fd):
        os.close(fd)


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(nixl_agent, "PACKAGES", ("nixl_none",))
    with pytest.raises(ConfigError, match=r"nixl-none is installed; pip install .twostroke.nixl."):
        NixlTransport().open(shared_memory(LAYOUT)[0], LAYOUT, "one")
