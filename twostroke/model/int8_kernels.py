"""Rows of x in 8 bits, turned: the compiled side of `int8_rows`, which describes the layout."""

import functools
from typing import Any

import numba
import numpy as np
from numba import types
from numba.core import cgutils

from twostroke.model import compiled, elementwise_kernels, int8_rows, vectors
from twostroke.model.compiled import (
    address_of,
    float_of,
    floats,
    in_llvm,
    inner,
    use_kernel_cache,
    words,
)
from twostroke.model.elementwise_kernels import (
    NUM_ARGUMENTS,
    TOGETHER,
    add_norm_rows,
    copy_halves,
    share_of,
    silu_multiply_rows,
)
from twostroke.model.int8_rows import TURNED
from twostroke.model.vectors import LANES, Vectors

padded, row_bytes = inner(int8_rows.padded), inner(int8_rows.row_bytes)
_LINE = 32  # bfloat16 in a cache line
_LARGEST = np.float32(127.0)
_SMALLEST = np.float32(1e-30)  # whose inverse, times _LARGEST, is still a number


@in_llvm
def _turn(_context: Any, x: types.Type, out: types.Type, blocks: types.Type) -> Any:
    """Blocks of 64 bfloat16 times the Hadamard matrix, not yet divided by 8, to `out`: float32, in
    the order of `Vectors.hadamard`.

    Returns the bits of the largest without signs: their order is that of the numbers, with infinity
    and NaN above all, so that a row's scale, and all results, show these.
    """

    def generate(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        v, (x, out, blocks) = Vectors(builder), values
        largest = cgutils.alloca_once_value(builder, v.words(0))
        with cgutils.for_range(builder, blocks) as loop:
            source = v.moved(x, loop.index, TURNED * 2)
            target = v.moved(out, loop.index, TURNED * 4)
            top = builder.load(largest)
            turned = v.hadamard([v.load_words(source, i) for i in range(2)])
            for i, row in enumerate(turned):
                v.store(row, target, i)
                top = v.largest(v.magnitudes(row), top)
            builder.store(top, largest)
        return v.largest_lane(builder.load(largest))

    return types.int32(*[types.int64] * 3), generate


@in_llvm
def _round(
    _context: Any, turned: types.Type, scale: types.Type, out: types.Type, blocks: types.Type
) -> Any:
    """What `_turn` wrote times `scale`, as bytes in the order of x; returns their sum."""

    def generate(_context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        v, (turned, scale, out, blocks) = Vectors(builder), values
        factor, ones = v.splat(scale), v.words(0x01010101)
        total = cgutils.alloca_once_value(builder, v.words(0))
        with cgutils.for_range(builder, blocks) as loop:
            source = v.moved(turned, loop.index, TURNED * 4)
            rows = [builder.fmul(v.load(source, i), factor) for i in range(TURNED // LANES)]
            rounded = v.in_bytes([v.nearest(row) for row in rows])
            v.store(rounded, v.moved(out, loop.index, TURNED))
            builder.store(v.dot_bytes(builder.load(total), ones, rounded), total)
        return v.sum_of_lanes(builder.load(total))

    return types.int32(types.int64, types.float32, types.int64, types.int64), generate


@inner
def _scratch_of(width: int) -> Any:
    """For some rows: x, in bfloat16 and filled up with zeros, and x turned, in float32. And room to
    begin with a cache line: `_aligned`."""
    return np.zeros(TOGETHER * padded(width) * 3 + _LINE, np.uint16)


@inner
def _aligned(scratch: Any) -> int:
    """Vectors that lie in two cache lines take twice as long to write."""
    address: int = scratch.ctypes.data
    return -(-address // 64) * 64


@inner
def _turn_rows(scratch: Any, x: int, out: int, count: int, width: int) -> None:
    """Up to TOGETHER rows of x, `padded(width)` bfloat16 each, to rows of 8 bits.

    (Given the array: numba frees one after its last use, and that it is used by its address numba
    does not see.)
    """
    end, bits = padded(width), np.empty(TOGETHER, np.int32)
    turned = _aligned(scratch) + TOGETHER * end * 2
    for i in range(count):
        bits[i] = _turn(x + i * end * 2, turned + i * end * 4, end // TURNED)
    for i in range(count):
        top, scale, target = float_of(bits[i]), np.float32(0.0), out + i * row_bytes(width)
        if top > _SMALLEST:
            scale = _LARGEST / top
        total = _round(turned + i * end * 4, scale, target, end // TURNED)
        floats(target + end, 1)[0] = top / (np.float32(8.0) * _LARGEST)
        words(target + end + 4, 1)[0] = total


@inner
def turned_bytes_rows(x: int, out: int, first: int, last: int, width: int) -> None:
    """x, bfloat16 [rows, width] -> rows of 8 bits."""
    scratch = _scratch_of(width)
    here = _aligned(scratch)
    for row in range(first, last, TOGETHER):
        count, source = min(TOGETHER, last - row), x + row * width * 2
        if width != padded(width):
            for i in range(count):
                copy_halves(source + i * width * 2, here + i * padded(width) * 2, width)
            source = here
        _turn_rows(scratch, source, out + row * row_bytes(width), count, width)


@inner
def norm_bytes_rows(
    h: int, y: int, weight: int, out: int, first: int, last: int, width: int, eps: float
) -> None:
    """`add_norm_rows`, and its result as rows of 8 bits."""
    scratch = _scratch_of(width)
    here = _aligned(scratch)
    for row in range(first, last, TOGETHER):
        count, source = min(TOGETHER, last - row), h + row * width * 4
        added = y + row * width * 2 if y else 0
        add_norm_rows(source, added, weight, here, padded(width) * 2, 0, count, width, eps)
        _turn_rows(scratch, here, out + row * row_bytes(width), count, width)


@inner
def silu_bytes_rows(gate_up: int, out: int, first: int, last: int, width: int) -> None:
    """`silu_multiply_rows`, and its result as rows of 8 bits."""
    scratch = _scratch_of(width)
    here = _aligned(scratch)
    for row in range(first, last, TOGETHER):
        count, source = min(TOGETHER, last - row), gate_up + row * width * 4
        silu_multiply_rows(source, here, padded(width) * 2, 0, count, width)
        _turn_rows(scratch, here, out + row * row_bytes(width), count, width)


def _turned_bytes(arguments: Any) -> None:
    a = numba.carray(arguments, NUM_ARGUMENTS)
    first, last = share_of(a)
    turned_bytes_rows(a[3], a[4], first, last, a[5])


def _norm_bytes(arguments: Any) -> None:
    a = numba.carray(arguments, NUM_ARGUMENTS)
    first, last = share_of(a)
    norm_bytes_rows(a[3], a[4], a[5], a[6], first, last, a[7], float_of(np.int32(a[8])))


def _silu_bytes(arguments: Any) -> None:
    a = numba.carray(arguments, NUM_ARGUMENTS)
    first, last = share_of(a)
    silu_bytes_rows(a[3], a[4], first, last, a[5])


_FUNCTIONS = {
    "turned_bytes": _turned_bytes,
    "norm_bytes": _norm_bytes,
    "silu_bytes": _silu_bytes,
}
_CACHE = use_kernel_cache(
    *(__file__, compiled.__file__, elementwise_kernels.__file__),
    *(int8_rows.__file__, vectors.__file__),
)


@functools.cache
def address(name: str) -> int:
    """Address of a kernel, compiled now if it is not in the cache."""
    signature = types.void(types.CPointer(types.int64))
    return address_of(_FUNCTIONS[name], signature, cache=_CACHE)
