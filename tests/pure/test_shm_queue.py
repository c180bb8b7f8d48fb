"""The queue keeps order and content for every reader, in threads and in processes."""

import hashlib
import os
import subprocess
import sys
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twostroke.shm_queue import ShmReader, ShmRing, ShmWriter


@settings(max_examples=40, deadline=None)
@given(
    messages=st.lists(st.binary(max_size=100), max_size=30),
    num_readers=st.integers(1, 3),
    chunk_bytes=st.integers(1, 64),
    num_chunks=st.integers(1, 5),
)
def test_every_reader_gets_every_message_in_order(
    messages: list[bytes], num_readers: int, chunk_bytes: int, num_chunks: int
):
    ring = ShmRing.create(num_readers, chunk_bytes=chunk_bytes, num_chunks=num_chunks)
    writer = ShmWriter(ring)
    readers = [ShmReader(ring, i) for i in range(num_readers)]
    received: list[list[bytes]] = [[] for _ in readers]

    def read(i: int) -> None:
        received[i].extend(readers[i].get() for _ in messages)

    threads = [threading.Thread(target=read, args=(i,)) for i in range(num_readers)]
    for thread in threads:
        thread.start()
    for message in messages:
        writer.put(message)
    for thread in threads:
        thread.join()
    assert received == [messages] * num_readers
    for side in (writer, *readers):
        side.close()
    ring.close()


READER = """
import hashlib, sys
from twostroke.shm_queue import ShmReader, ShmRing, ShmWriter
reader = ShmReader(ShmRing.attach(sys.argv[1]), int(sys.argv[2]))
answers = ShmWriter(ShmRing.attach(sys.argv[3]))
digest = hashlib.sha256()
while message := reader.get():
    digest.update(len(message).to_bytes(4, "little") + message)
    answers.put(str(len(message)).encode())
answers.put(digest.digest())
"""


def test_readers_in_other_processes():
    ring = ShmRing.create(2, chunk_bytes=1000, num_chunks=4)
    answers = [ShmRing.create() for _ in range(2)]
    children = [
        subprocess.Popen(
            [sys.executable, "-c", READER, ring.spec, str(i), answers[i].spec],
            pass_fds=(*ring.fds, *answers[i].fds),
        )
        for i in range(2)
    ]
    writer, readers = ShmWriter(ring), [ShmReader(answer) for answer in answers]
    digest = hashlib.sha256()
    for size in [1, 999, 1000, 1001, 2000, 12_345, *range(2, 200)]:
        message = bytes((size + i) % 256 for i in range(size))
        digest.update(len(message).to_bytes(4, "little") + message)
        writer.put(message)
        assert [reader.get() for reader in readers] == [str(size).encode()] * 2
    writer.put(b"")
    assert [reader.get() for reader in readers] == [digest.digest()] * 2
    assert [child.wait() for child in children] == [0, 0]
    for side in (writer, *readers):
        side.close()
    for one in (ring, *answers):
        one.close()


class GoneError(Exception):
    pass


def give_up() -> None:
    raise GoneError


def test_a_waiting_side_can_give_up():
    ring = ShmRing.create(chunk_bytes=8, num_chunks=2)
    writer, reader = ShmWriter(ring), ShmReader(ring)
    writer.put(b"last words", give_up)
    assert reader.get(give_up) == b"last words"  # what has arrived is read first
    with pytest.raises(GoneError):
        reader.get(give_up)
    writer.put(b"fill both", give_up)
    with pytest.raises(GoneError):
        writer.put(b"no room", give_up)
    writer.close()
    reader.close()
    ring.close()


def test_closing_returns_every_descriptor():
    before = set(os.listdir("/proc/self/fd"))
    ring = ShmRing.create(3)
    writer = ShmWriter(ring)
    writer.close()
    ring.close()
    assert set(os.listdir("/proc/self/fd")) == before
