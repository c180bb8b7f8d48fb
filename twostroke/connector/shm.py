"""KV between processes of one host: the reader maps the other's pool, and copies out of it.

    owner   | pool | scratch | leases |   one memory file, sealed at its size
    reader  connects to the owner's socket ──▶ gets the file, read-only ──▶ maps it ──▶ copies

Nothing needs to be set up and nothing is left behind: the file has no name, nor has the socket one
in the file system (it lies in Linux's abstract namespace, under a random name that only tickets
tell, and serves only processes of its own user). Once mapped, the memory stays for as long as the
reader wants: an owner that dies in the middle of a read spoils nothing.

A copy is one call into compiled code, without the GIL: 64 MiB in scattered blocks of 384 KiB move
as fast as by one memcpy.
"""

import contextlib
import ctypes
import fcntl
import mmap
import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable

import numba
import numpy as np
from numba import types

from twostroke.arrays import Int64s, UInt8s
from twostroke.connector.base import KvMemory, TransferError
from twostroke.connector.layout import pool_bytes
from twostroke.connector.links import SCRATCH_BYTES
from twostroke.errors import ConfigError
from twostroke.kv_messages import TRANSFER_ID_BYTES, KvLayoutRecord

HANDSHAKE_TIMEOUT_S = 5.0  # the owner's thread answers at once, unless its process is stopped

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_CREDENTIALS = struct.Struct("=iII")  # pid, uid, gid
_HELLO = struct.Struct("=QQQ")  # bytes of pool and scratch, number of lease words
_MADV_POPULATE_READ = 22

_libc = ctypes.CDLL(None)  # its calls let go of the GIL
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

_memcpy = types.ExternalFunction("memcpy", types.intp(types.intp, types.intp, types.uintp))


def _copy_pieces(source: int, target: int, rows: Int64s) -> None:
    for i in range(len(rows)):
        _memcpy(target + rows[i, 1], source + rows[i, 0], rows[i, 2])


_copy: Callable[[int, int, Int64s], None] = numba.njit(
    "void(int64, int64, int64[:, ::1])", nogil=True
)(_copy_pieces)


def shared_memory(layout: KvLayoutRecord) -> tuple[KvMemory, UInt8s]:
    """A rank's pool for `layout` in a memory file, with its lease words, and its bytes as an array.

    All zero; pages come from the system as they are first written. OSError when it refuses. The
    memory lives as long as the arrays do; the file's descriptor is the caller's to close.
    """
    num_pool_bytes = pool_bytes(layout)
    leases_at = _leases_at(num_pool_bytes, SCRATCH_BYTES)
    size = leases_at + layout.num_blocks * TRANSFER_ID_BYTES
    fd = os.memfd_create("twostroke-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        mapping = mmap.mmap(fd, size)
        with contextlib.suppress(OSError):  # most systems have no large pages for shared memory
            mapping.madvise(mmap.MADV_HUGEPAGE)
        whole = np.frombuffer(mapping, np.uint8)
    except BaseException:
        os.close(fd)
        raise
    memory = KvMemory(
        address=whole.ctypes.data,
        pool_bytes=num_pool_bytes,
        scratch_bytes=SCRATCH_BYTES,
        leases=whole[leases_at:].reshape(-1, TRANSFER_ID_BYTES),
        fd=fd,
    )
    return memory, whole[:num_pool_bytes]


def _leases_at(num_pool_bytes: int, scratch_bytes: int) -> int:
    return -(-(num_pool_bytes + scratch_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE


class ShmTransport:
    """Implements `connector.base.Transport` for `shared_memory`. Linux only."""

    name = "shm"
    max_pieces = 1 << 20
    max_piece_bytes = 1 << 40

    def __init__(self) -> None:
        self._memory: KvMemory | None = None
        self._file = -1  # read-only
        self._hello = b""
        self._listener = socket.socket(socket.AF_UNIX)
        self._thread = threading.Thread(target=self._serve, name="kv-shm", daemon=True)

    def open(self, memory: KvMemory, layout: KvLayoutRecord, engine_id: str) -> str:
        sizes = (memory.pool_bytes, memory.scratch_bytes, len(memory.leases))
        self._hello = _HELLO.pack(*sizes) + engine_id.encode()
        address = f"twostroke-kv-{secrets.token_hex(16)}"
        try:
            self._file = os.open(f"/proc/self/fd/{memory.fd}", os.O_RDONLY | os.O_CLOEXEC)
            self._listener.bind("\0" + address)
            self._listener.listen(128)
        except OSError as error:
            raise ConfigError(
                f"cannot share KV through memory: {error.strerror}",
                hint="use --kv-transport nixl",
            ) from error
        self._memory = memory
        self._thread.start()
        return address

    def _serve(self) -> None:
        while True:
            try:
                reader, _ = self._listener.accept()
            except OSError:  # closed
                return
            with reader, contextlib.suppress(OSError):  # it is the reader who asks, or goes
                if _user_of(reader) == os.getuid():
                    socket.send_fds(reader, [self._hello], [self._file])

    def connect(self, address: str, engine_id: str) -> "ShmPeer":
        assert self._memory is not None, "open first"
        with socket.socket(socket.AF_UNIX) as owner:
            owner.settimeout(HANDSHAKE_TIMEOUT_S)
            try:
                owner.connect("\0" + address)
                if _user_of(owner) != os.getuid():
                    raise TransferError("its memory is offered by another user")
                hello, files, _, _ = socket.recv_fds(owner, 1024, 1)
            except TimeoutError:
                raise TransferError(f"no answer within {HANDSHAKE_TIMEOUT_S:g} s") from None
            except OSError as error:
                raise TransferError(f"it cannot be reached: {error.strerror}") from error
        try:
            if not files or len(hello) < _HELLO.size:
                raise TransferError("it does not let us read its memory")
            if (other := hello[_HELLO.size :].decode(errors="replace")) != engine_id:
                raise TransferError(f"engine {other} answers in its place")
            return ShmPeer(self._memory, files[0], *_HELLO.unpack_from(hello))
        finally:
            for file in files:
                os.close(file)

    def close(self) -> None:
        if self._memory is not None:
            self._listener.shutdown(socket.SHUT_RDWR)
            self._thread.join()
            os.close(self._file)
            self._memory = None
        self._listener.close()


class ShmPeer:
    """Another rank's memory, mapped. Reads go on when its owner is gone."""

    def __init__(
        self, ours: KvMemory, file: int, pool_bytes: int, scratch_bytes: int, num_leases: int
    ) -> None:
        self._ours, self._pool_bytes = ours, pool_bytes
        leases_at = _leases_at(pool_bytes, scratch_bytes)
        size = leases_at + num_leases * TRANSFER_ID_BYTES
        # Sealed, it cannot shrink under us, which would be a fatal signal.
        if os.fstat(file).st_size < size or fcntl.fcntl(file, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise TransferError("its memory file is not sealed at its size")
        try:
            self._memory = np.frombuffer(mmap.mmap(file, size, prot=mmap.PROT_READ), np.uint8)
        except OSError as error:
            raise TransferError(f"cannot map its memory: {error.strerror}") from error
        self._leases = self._memory[leases_at:].reshape(-1, TRANSFER_ID_BYTES)
        _map_pages(self._memory.ctypes.data, file, pool_bytes)

    def read(self, pieces: Int64s) -> None:
        sizes = pieces[:, 2]
        limits = np.array([self._pool_bytes, self._ours.pool_bytes + self._ours.scratch_bytes])
        if pieces.min(initial=0) < 0 or (pieces[:, :2] > limits - sizes[:, None]).any():
            raise TransferError("a piece lies outside of the memory")
        memory = self._memory  # stays mapped until this is done
        _copy(memory.ctypes.data, self._ours.address, np.ascontiguousarray(pieces))

    def lease(self, slot: int) -> bytes:
        leases = self._leases
        if not 0 <= slot < len(leases):
            raise TransferError(f"lease slot {slot} of {len(leases)}")
        word: bytes = leases[slot].tobytes()
        return word

    def close(self) -> None:
        self._pool_bytes = 0  # nothing is inside any more
        self._memory = self._leases = np.empty((0, 0), np.uint8)


def _user_of(end: socket.socket) -> int:
    """The user at the other end of a connection."""
    size = _CREDENTIALS.size
    credentials = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    return int(_CREDENTIALS.unpack(credentials)[1])


def _map_pages(address: int, file: int, size: int) -> None:
    """Enter the pages that the file has into our page table, which the first reads would do else.

    The others stay holes: to touch one is to allocate it. Older systems than Linux 5.14 refuse.
    """
    end = 0
    with contextlib.suppress(OSError):  # no data beyond
        while (start := os.lseek(file, end, os.SEEK_DATA)) < size:
            end = os.lseek(file, start, os.SEEK_HOLE)
            _libc.madvise(address + start, min(end, size) - start, _MADV_POPULATE_READ)
