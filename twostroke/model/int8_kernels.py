"""Rows of x in 8 bits, turned: the compiled side of `int8_rows`, which describes the layout."""

import functools
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types

from twostroke.model import compiled, elementwise_kernels
from twostroke.model.compiled import (
    address_of,
    bits_of,
    float_of,
    floats,
    from_bf16,
    halves,
    in_llvm,
    inner,
    int8s,
    to_bf16,
    use_kernel_cache,
    words,
)
from twostroke.model.elementwise_kernels import NUM_ARGUMENTS, add_row, share_of, silu

TURNED = 64
_LANES = 16
_LARGEST = np.float32(127.0)
_SMALLEST = np.float32(1e-30)  # whose inverse, times _LARGEST, is still a number
_MAGIC = np.float32(12582912.0)  # adding 1.5 * 2**23 rounds to an integer, in the low bits
_MAGIC_BITS = np.int32(0x4B400000)


@in_llvm
def turn(_context: Any, address: types.Type) -> Any:
    """The 64 float32 at this address times the Hadamard matrix, in place, not yet divided by 8.

    Six rounds, of sums and differences of what is 1, 2, 4, ... 32 apart: within a vector a value's
    partner is brought by a shuffle, and one multiplication by +-1 and addition makes both.
    """

    def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        vector = ir.VectorType(ir.FloatType(), _LANES)
        start = builder.inttoptr(values[0], vector.as_pointer())
        places = [
            builder.gep(start, [ir.Constant(ir.IntType(32), i)]) for i in range(TURNED // _LANES)
        ]
        rows = [builder.load(place, align=4) for place in places]
        for apart in (1, 2, 4, 8):
            order = ir.Constant(
                ir.VectorType(ir.IntType(32), _LANES), [i ^ apart for i in range(_LANES)]
            )
            signs = ir.Constant(vector, [-1.0 if i & apart else 1.0 for i in range(_LANES)])
            for i, row in enumerate(rows):
                partner = builder.shuffle_vector(row, ir.Constant(vector, ir.Undefined), order)
                product = builder.fmul(row, signs, flags=("contract",))
                rows[i] = builder.fadd(product, partner, flags=("contract",))
        for apart in (1, 2):
            for i in range(len(rows)):
                if not i & apart:
                    a, b = rows[i], rows[i | apart]
                    rows[i], rows[i | apart] = builder.fadd(a, b), builder.fsub(a, b)
        for row, place in zip(rows, places, strict=True):
            builder.store(row, place, align=4)
        return context.get_dummy_value()

    return types.void(types.int64), generate


@inner
def _padded(width: int) -> int:
    return -(-width // TURNED) * TURNED


@inner
def _row_bytes(width: int) -> int:
    return _padded(width) + 64


@inner
def _to_bytes(scratch: int, width: int, out: int) -> None:
    """`width` float32, which are turned in place, to a row of bytes.

    The largest of a row is found among the bits, whose order is that of positive numbers: it takes
    NaN and infinity for the largest, so that the row's scale, and all results, show them.
    """
    padded = _padded(width)
    turned, bits = floats(scratch, padded), words(scratch, padded)
    for i in range(width, padded):
        turned[i] = np.float32(0.0)
    for start in range(0, padded, TURNED):
        turn(scratch + start * 4)
    largest = np.int32(0)
    for i in range(padded):
        largest = max(largest, bits[i] & np.int32(0x7FFFFFFF))
    top = float_of(largest)
    scale = np.float32(0.0)
    if top > _SMALLEST:
        scale = _LARGEST / top
    rounded = int8s(out, padded)
    total = np.int32(0)
    for i in range(padded):
        n = bits_of(turned[i] * scale + _MAGIC) - _MAGIC_BITS
        rounded[i] = np.int8(n)
        total += n
    floats(out + padded, 1)[0] = top / (np.float32(8.0) * _LARGEST)
    words(out + padded + 4, 1)[0] = total


@inner
def turned_bytes_rows(x: int, out: int, first: int, last: int, width: int) -> None:
    """x, bfloat16 [rows, width] -> rows of 8 bits."""
    scratch = np.empty(_padded(width), np.float32)
    for row in range(first, last):
        values = halves(x + row * width * 2, width)
        for i in range(width):
            scratch[i] = from_bf16(values[i])
        _to_bytes(scratch.ctypes.data, width, out + row * _row_bytes(width))


@inner
def norm_bytes_rows(
    h: int, y: int, weight: int, out: int, first: int, last: int, width: int, eps: float
) -> None:
    """`add_norm_rows`, and its result as rows of 8 bits."""
    scratch = np.empty(_padded(width), np.float32)
    w = floats(weight, width)
    for row in range(first, last):
        hs = floats(h + row * width * 4, width)
        scale = add_row(hs, y + row * width * 2 if y else 0, width, eps)
        for i in range(width):
            scratch[i] = from_bf16(to_bf16(hs[i] * scale * w[i]))
        _to_bytes(scratch.ctypes.data, width, out + row * _row_bytes(width))


@inner
def silu_bytes_rows(gate_up: int, out: int, first: int, last: int, width: int) -> None:
    """`silu_multiply_rows`, and its result as rows of 8 bits."""
    scratch = np.empty(_padded(width), np.float32)
    for row in range(first, last):
        gate = halves(gate_up + row * width * 4, width)
        up = halves(gate_up + row * width * 4 + width * 2, width)
        for i in range(width):
            scratch[i] = from_bf16(to_bf16(silu(gate[i]) * from_bf16(up[i])))
        _to_bytes(scratch.ctypes.data, width, out + row * _row_bytes(width))


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
_CACHE = use_kernel_cache(__file__, compiled.__file__, elementwise_kernels.__file__)


@functools.cache
def address(name: str) -> int:
    """Address of a kernel, compiled now if it is not in the cache."""
    signature = types.void(types.CPointer(types.int64))
    return address_of(_FUNCTIONS[name], signature, cache=_CACHE)
