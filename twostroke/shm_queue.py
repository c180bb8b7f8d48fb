"""Messages from one writer to N readers through shared memory: every reader gets every message.

A ring of equal chunks lies in anonymous shared memory (a memfd). A message takes one chunk, or
several in a row. Nothing has a name in the file system, so whoever dies, however, leaves nothing
behind: the memory goes with the last descriptor.

    chunk:  | u32 length, top bit: more of this message follows | payload ... |

    writer ──chunks[r] += 1──▶ reader r      one eventfd: chunks published and not yet taken
    writer ◀──space[r] += 1─── reader r      one eventfd: chunks free again

Waiting is a poll on an eventfd, which burns no CPU and cannot lose a wake-up because the count
stays until it is read. Both sides touch a chunk only between taking a count and giving one back;
those are system calls on the same kernel object, whose lock orders the memory accesses before and
after on any processor. So the ring needs no atomics, which Python does not have. Linux only.
"""

import mmap
import os
import select
import struct
from collections.abc import Callable
from dataclasses import dataclass

CHUNK_BYTES = 256 << 10
NUM_CHUNKS = 16
CHECK_INTERVAL_MS = 200  # how often a waiting side asks whether the other still lives

_HEADER = struct.Struct("=I")
_MORE = 1 << 31

Check = Callable[[], None]  # may raise, to give up waiting


@dataclass(frozen=True)
class ShmRing:
    """The shared parts of a queue, as file descriptors.

    Create it in the process that starts the others; hand it `fds` by `subprocess.Popen(pass_fds=)`
    and `spec` in the command line; `attach` there.
    """

    memory: int
    chunks: tuple[int, ...]  # one eventfd a reader
    space: tuple[int, ...]
    chunk_bytes: int
    num_chunks: int

    @classmethod
    def create(
        cls, num_readers: int = 1, *, chunk_bytes: int = CHUNK_BYTES, num_chunks: int = NUM_CHUNKS
    ) -> "ShmRing":
        """`chunk_bytes` counts the payload of a chunk. OSError when the system refuses."""
        memory = os.memfd_create("twostroke-queue")
        os.ftruncate(memory, num_chunks * (chunk_bytes + _HEADER.size))
        chunks = tuple(os.eventfd(0) for _ in range(num_readers))
        space = tuple(os.eventfd(num_chunks) for _ in range(num_readers))
        return cls(memory, chunks, space, chunk_bytes, num_chunks)

    @property
    def fds(self) -> tuple[int, ...]:
        return (self.memory, *self.chunks, *self.space)

    @property
    def spec(self) -> str:
        """All of it as text: chunk_bytes:num_chunks:descriptors."""
        return ":".join(map(str, (self.chunk_bytes, self.num_chunks, *self.fds)))

    @classmethod
    def attach(cls, spec: str) -> "ShmRing":
        """The ring whose descriptors this process inherited under the same numbers."""
        chunk_bytes, num_chunks, memory, *events = map(int, spec.split(":"))
        half = len(events) // 2
        return cls(memory, tuple(events[:half]), tuple(events[half:]), chunk_bytes, num_chunks)

    def close(self) -> None:
        """Close this process's descriptors; readers and writers made from it must be done."""
        for fd in self.fds:
            os.close(fd)


class _Counter:
    """Counts that the other side gives, taken one by one; one system call fetches all there are."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._have = 0
        self._poll = select.poll()
        self._poll.register(fd, select.POLLIN)

    def any(self) -> bool:
        """Whether `take` would not have to wait."""
        return self._have > 0 or bool(self._poll.poll(0))

    def take(self, check: Check | None) -> None:
        """Take one; wait for it. `check` is called now and then while waiting."""
        if not self._have:
            while check is not None and not self._poll.poll(CHECK_INTERVAL_MS):
                check()
            self._have = os.eventfd_read(self._fd)
        self._have -= 1


class _Side:
    """What writer and reader have in common: the mapped chunks and the place in the ring."""

    def __init__(self, ring: ShmRing) -> None:
        self._ring = ring
        self._stride = ring.chunk_bytes + _HEADER.size
        self._memory = mmap.mmap(ring.memory, ring.num_chunks * self._stride)
        self._view = memoryview(self._memory)
        self._next = 0

    def _advance(self) -> int:
        """Offset of the chunk that is due, and on to the next."""
        offset = self._next * self._stride
        self._next = (self._next + 1) % self._ring.num_chunks
        return offset

    def close(self) -> None:
        """Unmap the memory."""
        self._view.release()
        self._memory.close()


class ShmWriter(_Side):
    """The one writer of a ring. Use it from one thread."""

    def __init__(self, ring: ShmRing) -> None:
        super().__init__(ring)
        self._space = [_Counter(fd) for fd in ring.space]

    def put(self, message: bytes, check: Check | None = None) -> None:
        """Send to all readers; waits while the slowest has no free chunk.

        `check` is called now and then while waiting. If it raises, part of the message may have
        been sent and the queue is of no further use.
        """
        chunk_bytes, payload = self._ring.chunk_bytes, memoryview(message)
        while True:
            piece, payload = payload[:chunk_bytes], payload[chunk_bytes:]
            for space in self._space:
                space.take(check)
            offset = self._advance()
            _HEADER.pack_into(self._memory, offset, len(piece) | (_MORE if payload else 0))
            start = offset + _HEADER.size
            self._view[start : start + len(piece)] = piece
            for fd in self._ring.chunks:
                os.eventfd_write(fd, 1)
            if not payload:
                return


class ShmReader(_Side):
    """Reader number `index` of a ring. Use it from one thread."""

    def __init__(self, ring: ShmRing, index: int = 0) -> None:
        super().__init__(ring)
        self._chunks = _Counter(ring.chunks[index])
        self._space_fd = ring.space[index]

    def ready(self) -> bool:
        """Whether a message, or its beginning, is there."""
        return self._chunks.any()

    def get(self, check: Check | None = None) -> bytes:
        """The next message; waits for it. `check` may raise to give up, as in `ShmWriter.put`."""
        pieces = []
        more = True
        while more:
            self._chunks.take(check)
            offset = self._advance()
            (header,) = _HEADER.unpack_from(self._memory, offset)
            start = offset + _HEADER.size
            pieces.append(bytes(self._view[start : start + (header & ~_MORE)]))
            more = bool(header & _MORE)
            os.eventfd_write(self._space_fd, 1)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)
