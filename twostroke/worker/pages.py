"""Memory of a KV pool, asked of the system before a step writes to it.

A pool on a CPU begins without memory: the system gives a page, zeroed, when it is first written.
In a step that is time in which all threads wait for one. 256 tokens of SmolLM2 take three pages of
2 MiB, at 0.2 ms each where the system has them at hand, and at 4 ms each in a virtual machine whose
host has to find them first. Blocks are first used in the order of their ids (`kv.blocks`), so the
next pages are known, and a worker that has no step to run asks for them.
"""

import ctypes
import sys

from torch import Tensor

AHEAD_BYTES = 64 << 20  # behind the highest block used so far: not all, for it is resident memory
PIECE_BYTES = 2 << 20  # a large page; a plan that comes waits for the piece that was begun

_PAGE_BYTES = 4096
_MADV_POPULATE_WRITE = 23  # Linux 5.14: as if written to, while what is there stays as it is


class PagesAhead:
    """Keeps the next `ahead_bytes` of a pool [block, ...] in memory, where the system can."""

    def __init__(self, kv_pool: Tensor, ahead_bytes: int = AHEAD_BYTES) -> None:
        self._kv_pool = kv_pool  # whose memory stays as long as we may ask for more of it
        self._block_bytes = kv_pool.stride(0) * kv_pool.element_size()
        self._start = self._next = kv_pool.data_ptr()  # before `_next` nothing is to be asked for
        self._end = self._start + len(kv_pool) * self._block_bytes
        self._ahead_bytes = ahead_bytes
        self._can = kv_pool.device.type == "cpu" and sys.platform == "linux"
        self._libc = ctypes.CDLL(None)  # whose calls let go of the interpreter's lock

    def fetch(self, highest_block: int) -> bool:
        """Ask for a piece, if there is less behind `highest_block`; False: there is no need."""
        used = self._start + (highest_block + 1) * self._block_bytes
        wanted = min(used + self._ahead_bytes, self._end)
        at = max(self._next, used)
        if not self._can or at >= wanted:
            return False
        start = max(at - at % PIECE_BYTES, self._start)
        self._next = min(at - at % PIECE_BYTES + PIECE_BYTES, self._end)
        start -= start % _PAGE_BYTES
        piece = ctypes.c_void_p(start), ctypes.c_size_t(self._next - start)
        # Refused (an older system, or no memory): steps get their pages as they write them.
        self._can = self._libc.madvise(*piece, _MADV_POPULATE_WRITE) == 0
        return True
