"""A sequence of kernels as one call: every thread runs the table from top to bottom.

    for entry in table:   run it on all threads, or on whichever came last; wait for the others

A step of few tokens is hundreds of short kernels; called one by one from Python, each with its own
waking of threads, they take longer to start than to run. What is too short to be shared is done by
the last thread to arrive, before it lets the others go on: that costs no waiting of its own.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
import torch
from numba import types

from twostroke.arrays import Bools, Float64s, Int64s
from twostroke.model import barrier as barrier_file
from twostroke.model import compiled
from twostroke.model.barrier import (
    Barrier,
    is_last_to_arrive,
    release,
    turn_of,
    wait,
)
from twostroke.model.compiled import (
    address_of,
    call_with,
    clock_ns,
    inner,
    numbers,
    use_kernel_cache,
)
from twostroke.model.openmp import address_in, load_openmp

# Of the arguments, which are: table, how much of it to run, barrier, stamps, clock_gettime.
_COUNT, _STAMPS = 1, 3


@inner
def _stamp(a: Any, place: int) -> None:
    if a[_STAMPS]:
        numbers(a[_STAMPS], place + 1)[place] = clock_ns(a[4])


def _run(arguments: Any) -> None:
    a = numba.carray(arguments, 5)
    table, count, barrier = numbers(a[0], 3 * a[_COUNT]), a[_COUNT], a[2]
    turn, i = turn_of(barrier), 0
    while True:
        # All have done entry i - 1, or nothing yet. The last to arrive does what is not shared.
        if is_last_to_arrive(barrier):
            _stamp(a, i)
            while i < count and not table[3 * i + 2]:
                call_with(table[3 * i], table[3 * i + 1])
                i += 1
                _stamp(a, i)
            release(barrier, turn)
        else:
            wait(barrier, turn)
            while i < count and not table[3 * i + 2]:
                i += 1
        turn += 1
        if i == count:
            break
        call_with(table[3 * i], table[3 * i + 1])
        i += 1


_CACHE = use_kernel_cache(__file__, compiled.__file__, barrier_file.__file__)


class Program:
    """Runs `calls`, functions and their arguments by address, each when the one before is done.

    The caller keeps what the addresses point to. `num_threads` threads (0: as many as torch uses)
    run it, or as many as `run` is told; only kernels that share their work by ticket can do with
    any number.
    """

    def __init__(self, calls: Sequence[tuple[int, int]], num_threads: int = 0) -> None:
        openmp = load_openmp()
        self.num_threads = (num_threads or torch.get_num_threads()) if openmp else 1
        self._openmp = openmp if self.num_threads > 1 else None
        self._table = np.ones((len(calls), 3), np.int64)
        self._table[:, :2] = calls
        self._barrier = Barrier(self._openmp)
        self._stamps = np.zeros(len(calls) + 1, np.int64)
        self._arguments: Int64s = np.array(
            [
                *(self._table.ctypes.data, len(self._table), self._barrier.address),
                *(0, address_in(ctypes.CDLL(None).clock_gettime)),
            ],
            np.int64,
        )
        signature = types.void(types.CPointer(types.int64))
        self._here = self._arguments.ctypes.data
        self._address = address_of(_run, signature, cache=_CACHE)
        self._run_alone = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._address)

    def share(self, calls: Bools, shared: bool) -> None:
        """Whether these calls are run by all threads, as all are at first, or by one alone."""
        self._table[calls, 2] = shared

    def run(self, num_threads: int, num_calls: int) -> None:
        """The first `num_calls` of the calls."""
        self._arguments[_COUNT] = num_calls
        if self._openmp is None or num_threads == 1:
            self._run_alone(self._here)
        else:
            self._openmp.GOMP_parallel(self._address, self._here, num_threads, 0)

    def run_timed(self, num_threads: int, num_calls: int) -> Float64s:
        """Run, and return the seconds from each call's beginning, when all threads had done what
        comes before, to its end, when all have done it."""
        self._arguments[_STAMPS] = self._stamps.ctypes.data
        self.run(num_threads, num_calls)
        self._arguments[_STAMPS] = 0
        return np.diff(self._stamps[: num_calls + 1]) / 1e9
