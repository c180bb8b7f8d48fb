"""What stands before a decoder's first layer and behind its last, compiled: what tokens look up,
and which token is the most likely.

C functions as those of `elementwise_kernels`: rows are tokens, and a row's result does not depend
on the others.
"""

import functools
from typing import Any

import numba
import numpy as np
from numba import types

from twostroke.model import compiled, elementwise_kernels
from twostroke.model.compiled import (
    address_of,
    floats,
    from_bf16,
    halves,
    inner,
    use_kernel_cache,
    words,
)
from twostroke.model.elementwise_kernels import NUM_ARGUMENTS, share_of

_BLOCK = 1024  # values among which the first of the largest is looked for
_LOWER = np.int32(0x7FFFFFFF)
_INFINITY = np.int32(0x7F800000)


@inner
def look_up_rows(table: int, indices: int, out: int, first: int, last: int, width: int) -> None:
    """out[row] = table[indices[row]], float32 rows of `width` values; indices are int32."""
    rows = words(indices, last)
    for row in range(first, last):
        source = floats(table + int(rows[row]) * width * 4, width)
        target = floats(out + row * width * 4, width)
        for i in range(width):
            target[i] = source[i]


@inner
def embed_rows(table: int, indices: int, out: int, first: int, last: int, width: int) -> None:
    """As `look_up_rows`, from a table of bfloat16."""
    rows = words(indices, last)
    for row in range(first, last):
        source = halves(table + int(rows[row]) * width * 2, width)
        target = floats(out + row * width * 4, width)
        for i in range(width):
            target[i] = from_bf16(source[i])


@inner
def _key(bits: Any) -> Any:
    """An integer with the order of the float32 of these bits, and NaN above all."""
    key = bits ^ ((bits >> np.int32(31)) & _LOWER)
    if bits & _LOWER > _INFINITY:
        key = _LOWER
    return key


@inner
def best_rows(logits: int, best: int, first: int, last: int, width: int) -> None:
    """best[row], int32: index of the first of the largest logits, or -1 where that is no number.

    logits are float32 [rows, width]. As in `sampler.argmax`, a NaN counts as the largest.
    """
    found = words(best, last)
    for row in range(first, last):
        bits = words(logits + row * width * 4, width)
        top, where = np.int32(-0x80000000), 0
        for start in range(0, width, _BLOCK):
            # Counted from 0, indices cannot be negative, and the loop becomes one of vectors.
            count = min(_BLOCK, width - start)
            block = words(logits + (row * width + start) * 4, count)
            highest = np.int32(-0x80000000)
            for i in range(count):
                highest = max(highest, _key(block[i]))
            if highest > top:
                top, where = highest, start
        while _key(bits[where]) != top:
            where += 1
        found[row] = np.int32(where) if bits[where] & _LOWER < _INFINITY else np.int32(-1)


def _look_up(arguments: Any) -> None:
    a = numba.carray(arguments, NUM_ARGUMENTS)
    first, last = share_of(a)
    look_up_rows(a[3], a[4], a[5], first, last, a[6])


def _embed(arguments: Any) -> None:
    a = numba.carray(arguments, NUM_ARGUMENTS)
    first, last = share_of(a)
    embed_rows(a[3], a[4], a[5], first, last, a[6])


def _best(arguments: Any) -> None:
    a = numba.carray(arguments, NUM_ARGUMENTS)
    first, last = share_of(a)
    best_rows(a[3], a[4], first, last, a[5])


_FUNCTIONS = {"look_up": _look_up, "embed": _embed, "best": _best}
_CACHE = use_kernel_cache(__file__, compiled.__file__, elementwise_kernels.__file__)


@functools.cache
def address(name: str) -> int:
    """Address of a kernel, compiled now if it is not in the cache."""
    signature = types.void(types.CPointer(types.int64))
    return address_of(_FUNCTIONS[name], signature, cache=_CACHE)
