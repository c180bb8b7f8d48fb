"""A run of kernels that each thread takes some rows through, from the first to the last.

    thread 1:   rows 0-84     norm ▶ product ▶ SiLU ▶ product     rows 170-255   norm ▶ ...
    thread 2:   rows 85-169   norm ▶ product ▶ ...

What lies between two attentions needs no other row, so a large step need not wait for all rows
after each kernel, and what a kernel leaves to the next is still in the core's own cache. Threads
take chunks of rows by ticket, as they get done. Kernels are those that a `Program` runs, on as many
rows as a chunk has; what they are given moves along with the chunk's first row, or with the thread.
"""

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import numba
import numpy as np
from numba import types

from twostroke.arrays import Float64s, Int64s
from twostroke.model import compiled, tile_ir
from twostroke.model.compiled import (
    address_of,
    call_for_int,
    call_with,
    clock_ns,
    inner,
    numbers,
    take_ticket,
    use_kernel_cache,
)
from twostroke.model.elementwise_kernels import NUM_ARGUMENTS
from twostroke.model.openmp import address_in

# A chunk's rows between two products fit into a core's second cache, and as many rows as these
# share a weight that comes from further away.
CHUNK_ROWS = 96
_MIN_ROWS = 16  # of a chunk: a weight is read once for each

_WORDS = max(NUM_ARGUMENTS, tile_ir.NUM_ARGUMENTS)
# Of a stage: function, which argument is the number of rows, and for each argument what it is at
# row 0 and thread 0, and what it grows by with each row and with each thread.
_STAGE_WORDS = 2 + 3 * _WORDS
# Of the kernel's arguments.
_CHUNK, _THREAD_NUM, _BOUNDS, _CHUNKS, _STAGES, _STAGE, _TIMES, _CLOCK, _NUM_WORDS = range(9)


class Stage(NamedTuple):
    """A kernel and its arguments."""

    address: int
    rows: int  # which argument is told the number of rows
    words: Sequence[int]  # at the first row, for the first thread
    row_bytes: Sequence[int]
    thread_bytes: Sequence[int]


def chunks_of(num_rows: int, num_threads: int) -> Int64s:
    """First and end row of chunks that hold all rows: as many, or nearly, for each thread."""
    turns = -(-num_rows // (num_threads * CHUNK_ROWS))
    count = min(turns * num_threads, -(-num_rows // _MIN_ROWS))
    ends = num_rows * np.arange(count + 1, dtype=np.int64) // max(1, count)
    return np.stack((ends[:-1], ends[1:]), 1)


def chunks_with(rows: Int64s, num_threads: int) -> Int64s:
    """The same for some rows, ascending: those that lie far from each other are in chunks of their
    own, and rows between others may be in a chunk too."""
    if not len(rows):
        return np.empty((0, 2), np.int64)
    cuts = np.flatnonzero(np.diff(rows) > _MIN_ROWS)
    firsts = rows[np.concatenate(([0], cuts + 1))]
    ends = rows[np.concatenate((cuts, [len(rows) - 1]))] + 1
    parts = [
        chunks_of(end - first, num_threads) + first
        for first, end in zip(firsts.tolist(), ends.tolist(), strict=True)
    ]
    return np.concatenate(parts)


class RowChunks:
    """`stages` for all rows of a step; an entry of a `Program`, whose threads share the rows.

    `begin` before each run. The caller keeps what the addresses point to.
    """

    def __init__(self, stages: Sequence[Stage], num_threads: int, thread_num: int) -> None:
        """`thread_num` is the address of omp_get_thread_num, or 0 for a lone thread."""
        self._stages = np.zeros((len(stages), _STAGE_WORDS), np.int64)
        for row, stage in zip(self._stages, stages, strict=True):
            row[:2] = stage.address, stage.rows
            for i, words in enumerate((stage.words, stage.row_bytes, stage.thread_bytes)):
                start = 2 + i * _WORDS
                row[start : start + len(words)] = words
        self._times = np.zeros((num_threads, len(stages)), np.int64)
        self._arguments: Int64s = np.zeros(_NUM_WORDS, np.int64)
        self._thread_num = thread_num
        self._arguments[[_STAGES, _STAGE, _CLOCK]] = (
            *(len(stages), self._stages.ctypes.data),
            address_in(ctypes.CDLL(None).clock_gettime),
        )
        self.call = _address(), self._arguments.ctypes.data

    def begin(self, chunks: Int64s, num_threads: int, *, timed: bool) -> None:
        """To be called before each run, with `chunks_of` its rows."""
        self._times.fill(0)
        self._chunks = chunks
        self._arguments[[_CHUNK, _THREAD_NUM, _BOUNDS, _CHUNKS, _TIMES]] = (
            *(0, self._thread_num if num_threads > 1 else 0),
            *(chunks.ctypes.data, len(chunks)),
            self._times.ctypes.data if timed else 0,
        )

    def shares(self) -> Float64s:
        """Of the last run's time, each stage's; all 0 where it was not timed."""
        times = self._times.sum(0)
        shares: Float64s = times / max(1, times.sum())
        return shares

    def set(self, stage: int, word: int, value: int) -> None:
        """An argument at the first row."""
        self._stages[stage, 2 + word] = value


@inner
def _run_stage(stage: Any, words: Any, first: int, last: int, thread: int) -> None:
    for i in range(_WORDS):
        moved = first * stage[2 + _WORDS + i] + thread * stage[2 + 2 * _WORDS + i]
        words[i] = stage[2 + i] + moved
    words[stage[1]] = last - first
    call_with(stage[0], words.ctypes.data)


def _run(arguments: Any) -> None:
    a = numba.carray(arguments, _NUM_WORDS)
    words, count = np.empty(_WORDS, np.int64), a[_STAGES]
    stages = a[_STAGE]
    thread = call_for_int(a[_THREAD_NUM]) if a[_THREAD_NUM] else 0
    chunk = take_ticket(a.ctypes.data + 8 * _CHUNK)
    while chunk < a[_CHUNKS]:
        bounds = numbers(a[_BOUNDS], 2 * a[_CHUNKS])
        first, last = bounds[2 * chunk], bounds[2 * chunk + 1]
        for i in range(count):
            stage = numbers(stages + i * 8 * _STAGE_WORDS, _STAGE_WORDS)
            if a[_TIMES]:
                start = clock_ns(a[_CLOCK])
                _run_stage(stage, words, first, last, thread)
                numbers(a[_TIMES], (thread + 1) * count)[thread * count + i] += (
                    clock_ns(a[_CLOCK]) - start
                )
            else:
                _run_stage(stage, words, first, last, thread)
        chunk = take_ticket(a.ctypes.data + 8 * _CHUNK)


_CACHE = use_kernel_cache(__file__, compiled.__file__, tile_ir.__file__)


def _address() -> int:
    return address_of(_run, types.void(types.CPointer(types.int64)), cache=_CACHE)
