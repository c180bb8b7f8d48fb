"""Rows of x in 8 bits, turned: the compiled side of `int8_rows`, which describes the layout."""

import functools
from typing import Any

import numba
import numpy as np
from numba import types

from twostroke.model import compiled, elementwise_kernels, int8_rows, vectors
from twostroke.model.compiled import (
    address_of,
    bits_of,
    float_of,
    floats,
    in_llvm,
    inner,
    int8s,
    use_kernel_cache,
    words,
)
from twostroke.model.elementwise_kernels import (
    NUM_ARGUMENTS,
    add_row,
    copy_floats,
    copy_halves,
    share_of,
)
from twostroke.model.int8_rows import TURNED
from twostroke.model.vectors import LANES, Vectors

padded, row_bytes = inner(int8_rows.padded), inner(int8_rows.row_bytes)
_VECTORS = TURNED // LANES
_LARGEST = np.float32(127.0)
_SMALLEST = np.float32(1e-30)  # whose inverse, times _LARGEST, is still a number
_MAGIC = np.float32(12582912.0)  # adding 1.5 * 2**23 rounds to an integer, in the low bits
_MAGIC_BITS = np.int32(0x4B400000)


@in_llvm
def _turn(_context: Any, x: types.Type, largest: types.Type) -> Any:
    """The 64 float32 at x times the Hadamard matrix, in place, not yet divided by 8; their bits
    without signs go to `largest`, 16 lanes of int32, where they are above what is there."""

    def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        v, (x, largest) = Vectors(builder), values
        top = v.load_words(largest)
        for i, turned in enumerate(v.hadamard([v.load(x, i) for i in range(_VECTORS)])):
            v.store(turned, x, i)
            top = v.largest(v.magnitudes(turned), top)
        v.store(top, largest)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@in_llvm
def _widen(_context: Any, x: types.Type, out: types.Type) -> Any:
    """64 bfloat16 as float32."""

    def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        v, (x, out) = Vectors(builder), values
        for i in range(_VECTORS):
            v.store(v.load_halves(x, i), out, i)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@in_llvm
def _scale(
    _context: Any, h: types.Type, weight: types.Type, scale: types.Type, out: types.Type
) -> Any:
    """h * scale * weight, 64 float32, rounded to bfloat16."""

    def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        v, (h, weight, scale, out) = Vectors(builder), values
        factor = v.splat(scale)
        for i in range(_VECTORS):
            scaled = builder.fmul(builder.fmul(v.load(h, i), factor), v.load(weight, i))
            v.store(v.rounded(scaled), out, i)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32, types.int64), generate


@in_llvm
def _silu_multiply(_context: Any, gate: types.Type, up: types.Type, out: types.Type) -> Any:
    """`silu_multiply_rows` of 64 bfloat16 each, as float32."""

    def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        v, (gate, up, out) = Vectors(builder), values
        for i in range(_VECTORS):
            product = builder.fmul(v.silu(v.load_halves(gate, i)), v.load_halves(up, i))
            v.store(v.rounded(product), out, i)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), generate


@inner
def _scratch_of(width: int) -> Any:
    """For a row of x, the largest in each lane, and two blocks, zeroed: the last of what x is made
    of, where that is not whole. And room to begin with a cache line: `_aligned`."""
    return np.zeros(LANES + padded(width) + LANES + 2 * TURNED, np.float32)


@inner
def _aligned(address: int) -> int:
    """Vectors that lie in two cache lines take twice as long to write."""
    return -(-address // 64) * 64


@inner
def _end_row(scratch: Any, width: int, out: int) -> None:
    """Turn the row, and write it. (Given the array: numba frees one after its last use, and that it
    is used by its address numba does not see.)"""
    here = _aligned(scratch.ctypes.data)
    largest = here + padded(width) * 4
    for i in range(0, padded(width), TURNED):
        _turn(here + i * 4, largest)
    _to_bytes(here, width, out)


@inner
def _to_bytes(scratch: int, width: int, out: int) -> None:
    """A turned row to a row of bytes.

    The largest of a row is found among the bits, whose order is that of positive numbers: it takes
    NaN and infinity for the largest, so that the row's scale, and all results, show them.
    """
    end = padded(width)
    turned, tops = floats(scratch, end), words(scratch + end * 4, LANES)
    largest = np.int32(0)
    for i in range(LANES):
        largest = max(largest, tops[i])
        tops[i] = np.int32(0)
    top = float_of(largest)
    scale = np.float32(0.0)
    if top > _SMALLEST:
        scale = _LARGEST / top
    rounded = int8s(out, end)
    total = np.int32(0)
    for i in range(end):
        n = bits_of(turned[i] * scale + _MAGIC) - _MAGIC_BITS
        rounded[i] = np.int8(n)
        total += n
    floats(out + end, 1)[0] = top / (np.float32(8.0) * _LARGEST)
    words(out + end + 4, 1)[0] = total


@inner
def turned_bytes_rows(x: int, out: int, first: int, last: int, width: int) -> None:
    """x, bfloat16 [rows, width] -> rows of 8 bits."""
    scratch = _scratch_of(width)
    here, whole = _aligned(scratch.ctypes.data), width // TURNED * TURNED
    block = here + (padded(width) + LANES) * 4
    for row in range(first, last):
        values = x + row * width * 2
        for i in range(0, whole, TURNED):
            _widen(values + i * 2, here + i * 4)
        if whole < width:
            copy_halves(values + whole * 2, block, width - whole)
            _widen(block, here + whole * 4)
        _end_row(scratch, width, out + row * row_bytes(width))


@inner
def norm_bytes_rows(
    h: int, y: int, weight: int, out: int, first: int, last: int, width: int, eps: float
) -> None:
    """`add_norm_rows`, and its result as rows of 8 bits."""
    scratch = _scratch_of(width)
    here, whole = _aligned(scratch.ctypes.data), width // TURNED * TURNED
    block = here + (padded(width) + LANES) * 4
    last_weights = block + TURNED * 4
    copy_floats(weight + whole * 4, last_weights, width - whole)
    for row in range(first, last):
        values = h + row * width * 4
        hs = floats(values, width)
        scale = add_row(hs, y + row * width * 2 if y else 0, width, eps)
        for i in range(0, whole, TURNED):
            _scale(values + i * 4, weight + i * 4, scale, here + i * 4)
        if whole < width:
            copy_floats(values + whole * 4, block, width - whole)
            _scale(block, last_weights, scale, here + whole * 4)
        _end_row(scratch, width, out + row * row_bytes(width))


@inner
def silu_bytes_rows(gate_up: int, out: int, first: int, last: int, width: int) -> None:
    """`silu_multiply_rows`, and its result as rows of 8 bits."""
    scratch = _scratch_of(width)
    here, whole = _aligned(scratch.ctypes.data), width // TURNED * TURNED
    block = here + (padded(width) + LANES) * 4
    last_up = block + TURNED * 4
    for row in range(first, last):
        gate = gate_up + row * width * 4
        up = gate + width * 2
        for i in range(0, whole, TURNED):
            _silu_multiply(gate + i * 2, up + i * 2, here + i * 4)
        if whole < width:
            copy_halves(gate + whole * 2, block, width - whole)
            copy_halves(up + whole * 2, last_up, width - whole)
            _silu_multiply(block, last_up, here + whole * 4)
        _end_row(scratch, width, out + row * row_bytes(width))


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
