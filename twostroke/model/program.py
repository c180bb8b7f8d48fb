"""A sequence of kernels as one call: every thread runs the table from top to bottom.

    for entry in table:   run it on all threads, or on whichever came first; wait for the others

A step of few tokens is hundreds of short kernels; called one by one from Python, each with its own
waking of threads, they take longer to start than to run. What is too short to be shared is done by
the last thread to arrive, before it lets the others go on: that costs no waiting of its own.

The waiting is ours: OpenMP's barrier asks the kernel to wake sleepers at every turn, and a step
has some 200.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
import torch
from numba import types

from twostroke.arrays import Bools, Float64s, Int64s
from twostroke.model import compiled
from twostroke.model.compiled import (
    add_atomically,
    address_of,
    call_for_int,
    call_with,
    clock_ns,
    inner,
    load_atomically,
    numbers,
    pause,
    store_atomically,
    use_kernel_cache,
)
from twostroke.model.openmp import load_openmp

_SPINS = 200  # about 3 us; a thread that waits longer lets others have its processor

# Of the state that threads share; the two words that all write have cache lines of their own.
_ARRIVED, _TURN, _STATE_WORDS = 0, 8, 16


@inner
def _wait_for_turn(state: int, turn: int, sched_yield: int) -> None:
    spins = 0
    while load_atomically(state + 8 * _TURN) == turn:
        spins += 1
        if spins < _SPINS:
            pause()
        else:
            call_for_int(sched_yield)


@inner
def _stamp(stamps: int, place: int, clock: int) -> None:
    if stamps:
        numbers(stamps, place + 1)[place] = clock_ns(clock)


def _run(arguments: Any) -> None:
    a = numba.carray(arguments, 7)
    table, count, state, num_threads = numbers(a[0], 3 * a[1]), a[1], a[2], 1
    if a[3]:
        num_threads = call_for_int(a[3])
    turn, i = load_atomically(state + 8 * _TURN), 0
    while True:
        # All have done entry i - 1, or nothing yet. The last to arrive does what is not shared.
        if add_atomically(state + 8 * _ARRIVED, 1) == num_threads - 1:
            _stamp(a[5], i, a[6])
            while i < count and not table[3 * i + 2]:
                call_with(table[3 * i], table[3 * i + 1])
                i += 1
                _stamp(a[5], i, a[6])
            store_atomically(state + 8 * _ARRIVED, 0)
            store_atomically(state + 8 * _TURN, turn + 1)
        else:
            _wait_for_turn(state, turn, a[4])
            while i < count and not table[3 * i + 2]:
                i += 1
        turn += 1
        if i == count:
            break
        call_with(table[3 * i], table[3 * i + 1])
        i += 1


_CACHE = use_kernel_cache(__file__, compiled.__file__)


class Program:
    """Runs `calls`, functions and their arguments by address, each when the one before is done.

    The caller keeps what the addresses point to. `num_threads` threads run it, and no other number:
    kernels share their work by it.
    """

    def __init__(self, calls: Sequence[tuple[int, int]]) -> None:
        openmp = load_openmp()
        self.num_threads = torch.get_num_threads() if openmp is not None else 1
        self._table = np.ones((len(calls), 3), np.int64)
        self._table[:, :2] = calls
        self._state = np.zeros(_STATE_WORDS, np.int64)
        self._stamps = np.zeros(len(calls) + 1, np.int64)
        libc = ctypes.CDLL(None)
        several = openmp is not None and self.num_threads > 1
        self._arguments: Int64s = np.array(
            [
                *(self._table.ctypes.data, len(self._table), self._state.ctypes.data),
                # OpenMP may give fewer threads than were asked for
                _address(openmp.omp_get_num_threads) if openmp is not None and several else 0,
                *(_address(libc.sched_yield), 0, _address(libc.clock_gettime)),
            ],
            np.int64,
        )
        signature = types.void(types.CPointer(types.int64))
        self._address = address_of(_run, signature, cache=_CACHE)
        self._openmp = openmp

    def share(self, calls: Bools, shared: bool) -> None:
        """Whether these calls are run by all threads, as all are at first, or by one alone."""
        self._table[calls, 2] = shared

    def run(self) -> None:
        here = self._arguments.ctypes.data
        if self._openmp is None or self.num_threads == 1:
            ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._address)(here)
        else:
            self._openmp.GOMP_parallel(self._address, here, self.num_threads, 0)

    def run_timed(self) -> Float64s:
        """Run, and return the seconds from each call's beginning, when all threads had done what
        comes before, to its end, when all have done it."""
        self._arguments[5] = self._stamps.ctypes.data
        self.run()
        self._arguments[5] = 0
        return np.diff(self._stamps) / 1e9


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0
