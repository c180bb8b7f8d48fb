"""A sequence of kernels as one call: every thread runs the table from top to bottom.

    for function, argument in table:  function(argument); wait for the other threads

A step of few tokens is hundreds of short kernels; called one by one from Python, each with its own
waking of threads, they take longer to start than to run.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
import torch
from numba import types

from twostroke.arrays import Int64s
from twostroke.model import compiled
from twostroke.model.compiled import address_of, call, call_with, numbers, use_kernel_cache
from twostroke.model.openmp import load_openmp


def _run(arguments: Any) -> None:
    a = numba.carray(arguments, 3)
    table = numbers(a[0], 2 * a[1])
    for i in range(a[1]):
        call_with(table[2 * i], table[2 * i + 1])
        if a[2]:
            call(a[2])


_CACHE = use_kernel_cache(__file__, compiled.__file__)


class Program:
    """Kernels `void function(void *)` and their arguments, by address, in order.

    The caller keeps what the addresses point to. `num_threads` threads run it, and no other number:
    kernels share their work by it.
    """

    def __init__(self, calls: Sequence[tuple[int, int]]) -> None:
        openmp = load_openmp()
        self.num_threads = torch.get_num_threads() if openmp is not None else 1
        self._table = np.array(calls, np.int64)
        barrier = 0
        if openmp is not None and self.num_threads > 1:
            barrier = ctypes.cast(openmp.GOMP_barrier, ctypes.c_void_p).value or 0
        self._arguments: Int64s = np.array(
            [self._table.ctypes.data, len(self._table), barrier], np.int64
        )
        signature = types.void(types.CPointer(types.int64))
        self._address = address_of(_run, signature, cache=_CACHE)
        self._openmp = openmp

    def run(self) -> None:
        here = self._arguments.ctypes.data
        if self._openmp is None or self.num_threads == 1:
            ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._address)(here)
        else:
            self._openmp.GOMP_parallel(self._address, here, self.num_threads, 0)
