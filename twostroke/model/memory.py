"""What a process hands back to the system, and when; and memory for weights on large pages.

Freed memory goes back once, after loading, and not after every operation, as glibc does it: it maps
and unmaps each temporary tensor above a threshold (128 KiB at first, 32 MiB at most) anew, and
every one of its pages faults on first use. On a CPU that is most of the time of cheap operations:
an RMS norm of 1,024 x 576 bf16 takes 2.0 ms with the default and 0.18 ms without (2 cores, Zen 4).
"""

import contextlib
import ctypes
import functools
import mmap
import re
import threading
from pathlib import Path

import torch
from torch import Tensor

# mallopt parameters, from malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3

# Larger blocks than these (weights, the KV pool) are still mapped, and unmapped when freed. Older
# versions of glibc refuse more than the second.
_LARGEST_KEPT_BYTES = (256 << 20, 32 << 20)


def keep_freed_memory() -> bool:
    """Let the process reuse freed memory. True where the C library is glibc and took it."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # musl, macOS, Windows
        return False
    return any(
        mallopt(_M_MMAP_THRESHOLD, most) and mallopt(_M_TRIM_THRESHOLD, most)
        for most in _LARGEST_KEPT_BYTES
    )


def give_back_freed_memory() -> None:
    """Hand what is free now to the system, where glibc can: loading leaves 150 MB that steps do not
    need (SmolLM2, see benchmarks/memory.py)."""
    if (malloc_trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        malloc_trim(0)


_MADV_DONTNEED = 4
_LETTING_GO = threading.Lock()


def unmap_clean_pages_once() -> int:
    """`unmap_clean_pages` of a process's first model, before it maps any weights.

    Others that load meanwhile wait, and those that load later do not disturb it. What it returned.
    """
    with _LETTING_GO:
        return _first_unmapping()


@functools.cache
def _first_unmapping() -> int:
    return unmap_clean_pages()


def unmap_clean_pages() -> int:
    """Let go of the pages of files that are only read, code above all; returns their bytes.

    Importing torch and numba touches 300 MB of libraries, most of them for the last time (CUDA's,
    LLVM). They stay in the system's cache: what is needed again is mapped again, in a millisecond
    or two. A mapping with a page of its own, changed by the dynamic linker, is left alone: no
    thread may load a library meanwhile.
    """
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    try:
        text = Path("/proc/self/smaps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    if madvise is None:
        return 0
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    let_go = 0
    for mapping in _MAPPING.finditer(text):
        start, end, anonymous_kb, swap_kb = (int(mapping[i], 16 if i < 3 else 10) for i in _FIELDS)
        resident = 1024 * int(mapping["rss"])
        if resident and not anonymous_kb and not swap_kb:
            let_go += resident if madvise(start, end - start, _MADV_DONTNEED) == 0 else 0
    return let_go


# A private mapping of a file that cannot be written to, in /proc/self/smaps.
_MAPPING = re.compile(
    r"^([0-9a-f]+)-([0-9a-f]+) r-[x-]p \S+ \S+ [1-9]\d* +/[^\n]*\n"
    r"(?:(?![0-9a-f]+-)[^\n]*\n)*?Rss: +(?P<rss>\d+) kB\n"
    r"(?:(?![0-9a-f]+-)[^\n]*\n)*?Anonymous: +(\d+) kB\n"
    r"(?:(?![0-9a-f]+-)[^\n]*\n)*?Swap: +(\d+) kB\n",
    re.MULTILINE,
)
_FIELDS = (1, 2, 4, 5)


class HugePages:
    """Memory for weights, on pages of 2 MiB where the system gives them to those who ask.

    Cut from chunks, in the order in which it is asked for; a chunk goes when all its parts have.
    glibc, even when told to, asks only for some of what it hands out to threads that load weights.
    """

    CHUNK_BYTES = 32 << 20

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chunk = memoryview(b"")

    def empty(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes], at a multiple of 64 bytes."""
        padded = -(-num_bytes // 64) * 64
        with self._lock:
            if padded > len(self._chunk):
                flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
                chunk = mmap.mmap(-1, max(padded, self.CHUNK_BYTES), flags=flags)
                if hasattr(mmap, "MADV_HUGEPAGE"):
                    with contextlib.suppress(OSError):  # a system without them
                        chunk.madvise(mmap.MADV_HUGEPAGE)
                self._chunk = memoryview(chunk)
            part, self._chunk = self._chunk[:num_bytes], self._chunk[padded:]
        return torch.frombuffer(part, dtype=torch.uint8)


HUGE_PAGES = HugePages()
