"""What lies between a decoder's matrix products, compiled: residual sum and norm, rotation, SiLU.

torch needs three to six passes over the data and as many calls for each of these, some 40 us a
layer; here each is one pass. Rows are tokens. Roundings to bfloat16 are where torch has them, but
for one in SiLU.

A kernel handles the rows [first, last), so that threads can share a step. A row's result does not
depend on the others.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np
from numba import types
from numba.core import cgutils

from twostroke.model import compiled, vectors
from twostroke.model.compiled import (
    HAS_VNNI,
    address_of,
    bits_of,
    call_for_int,
    float_of,
    floats,
    fma,
    from_bf16,
    halves,
    in_llvm,
    inner,
    int8s,
    largest_bits,
    to_bf16,
    use_kernel_cache,
    words,
)
from twostroke.model.vectors import LANES, PAIRED, Vectors

_Function = TypeVar("_Function", bound=Callable[..., Any])

# Rows whose scales are all found before the first is scaled: to wait for a sum and its root, or for
# the largest and its inverse, takes as long as a fifth of a row of 576 values.
TOGETHER = 4
GROUP, LEVELS_BYTES = 32, 72  # see `quantised` and `few_rows_quantised`
_LOG2_E = np.float32(1.4426950408889634)
# 2**x on [-0.5, 0.5], lowest power first: least relative error in float32 at degree 5 with 2**0
# exactly 1, 9.1e-08.
_P1, _P2, _P3 = np.float32(0.693146978), np.float32(0.240222421), np.float32(0.0555073377)
_P4, _P5 = np.float32(0.00967151277), np.float32(0.00132647151)
_MAGIC = np.float32(12582912.0)  # adding 1.5 * 2**23 rounds to an integer, in the low bits
_MAGIC_BITS = np.int32(0x4B400000)
_ONE = np.float32(1.0)
_TOP_LEVEL = np.float32(127 * 256 + 127)  # so that both bytes stay within 8 bits
_SMALLEST = np.float32(1e-30)  # whose inverse, times _TOP_LEVEL, is still a number
_HALF, _UPPER = np.int32(16), np.int32(-65536)  # a pair of bfloat16: shift and mask of the second


@inner
def exp(x: float) -> Any:
    """e**x for float32, in a form that vectorises; beyond 2**+-126 it stays there."""
    t = min(max(x * _LOG2_E, np.float32(-126.0)), np.float32(126.0))
    shifted = t + _MAGIC
    f = t - (shifted - _MAGIC)
    power = fma(f, fma(f, fma(f, fma(f, fma(f, _P5, _P4), _P3), _P2), _P1), _ONE)
    return float_of(bits_of(power) + (bits_of(shifted) << np.int32(23)))


# Sums whose order the compiler may choose, so that they are vectors: the same order every time.
_sum: Callable[[_Function], _Function] = numba.njit(
    nogil=True, error_model="numpy", fastmath={"reassoc", "contract"}
)


@_sum
def _squares(values: Any, width: int) -> Any:
    total = np.float32(0.0)
    for i in range(width):
        total += values[i] * values[i]
    return total


@_sum
def _add_squares(values: Any, added: Any, width: int) -> Any:
    """values += added, bfloat16; returns the sum of their squares."""
    total = np.float32(0.0)
    for i in range(width):
        value = values[i] + from_bf16(added[i])
        values[i] = value
        total += value * value
    return total


@inner
def _inverse_norm(squares: Any, width: int, eps: float) -> Any:
    """1 / sqrt(mean of squares + eps)"""
    return _ONE / np.sqrt(squares / np.float32(width) + np.float32(eps))


@inner
def add_row(hs: Any, y: int, width: int, eps: float) -> Any:
    """hs += y, bfloat16 at that address if it is not 0; returns `_inverse_norm` of hs."""
    squares = _add_squares(hs, halves(y, width), width) if y else _squares(hs, width)
    return _inverse_norm(squares, width, eps)


@inner
def levels_rows(x: int, out: int, first: int, last: int, groups: int) -> None:
    """x, float32 [rows, groups * GROUP], as integers: see `few_rows_quantised`.

    NaN and infinity count as the largest of a group, so that its scale, and all results, show them.
    """
    for row in range(first, last):
        start = x + row * groups * GROUP * 4
        values = floats(start, groups * GROUP)
        for group in range(groups):
            top = float_of(largest_bits(start + group * GROUP * 4))
            scale = np.float32(0.0)
            if top > _SMALLEST:
                scale = _TOP_LEVEL / top
            at = out + (row * groups + group) * LEVELS_BYTES
            high, low, whole = int8s(at, GROUP), int8s(at + GROUP, GROUP), halves(at, GROUP)
            total = np.int32(0)
            for i in range(GROUP):
                # To numba a sum of int32 is int64, of which half as many fit into a vector.
                rounded = bits_of(values[group * GROUP + i] * scale + _MAGIC)
                level = np.int32(rounded - _MAGIC_BITS)
                if HAS_VNNI:
                    upper = np.int32(np.int32(level + np.int32(128)) >> np.int32(8))
                    high[i] = np.int8(upper)
                    low[i] = np.int8(level - np.int32(upper << np.int32(8)))
                else:
                    whole[i] = np.uint16(level)
                total += level
            floats(at + 2 * GROUP, 1)[0] = top / _TOP_LEVEL
            words(at + 2 * GROUP + 4, 1)[0] = total


@inner
def widen_row(x: int, out: int, width: int) -> None:
    """out, float32 = x, bfloat16."""
    values, wide = halves(x, width), floats(out, width)
    for i in range(width):
        wide[i] = from_bf16(values[i])


@inner
def norm_levels_rows(
    h: int, weight: int, x: int, out: int, first: int, last: int, width: int, eps: float
) -> None:
    """x = RMS norm of h times weight, all float32 of `width` values a row; and x's levels."""
    w = floats(weight, width)
    for row in range(first, last):
        hs, xs = floats(h + row * width * 4, width), floats(x + row * width * 4, width)
        scale = add_row(hs, 0, width, eps)
        for i in range(width):
            xs[i] = hs[i] * scale * w[i]
    levels_rows(x, out, first, last, width // GROUP)


@inner
def silu_levels_rows(gate_up: int, x: int, out: int, first: int, last: int, width: int) -> None:
    """x = SiLU(gate) * up, float32, gate_up [rows, 2 * width], x [rows, width]; and its levels."""
    for row in range(first, last):
        gate = floats(gate_up + row * width * 8, width)
        up = floats(gate_up + row * width * 8 + width * 4, width)
        target = floats(x + row * width * 4, width)
        for i in range(width):
            target[i] = gate[i] / (_ONE + exp(-gate[i])) * up[i]
    levels_rows(x, out, first, last, width // GROUP)


@in_llvm
def _scale(
    _context: Any,
    h: types.Type,
    weight: types.Type,
    scale: types.Type,
    x: types.Type,
    count: types.Type,
    next_h: types.Type,
    next_y: types.Type,
) -> Any:
    """`count` times PAIRED of h * scale * weight, float32, to x, bfloat16; and ask the memory for
    as many values of h and of y, which are needed next."""

    def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        v, (h, weight, scale, x, count, next_h, next_y) = Vectors(builder), values
        factor = v.splat(scale)
        with cgutils.for_range(builder, count) as loop:
            hs, weights, ahead = (v.moved(it, loop.index, PAIRED * 4) for it in (h, weight, next_h))
            for i in range(2):
                v.prefetch(ahead, i)
            v.prefetch(v.moved(next_y, loop.index, PAIRED * 2))
            one, two = (
                builder.fmul(builder.fmul(v.load(hs, i), factor), v.load(weights, i))
                for i in range(2)
            )
            v.store(v.in_pairs(one, two), v.moved(x, loop.index, PAIRED * 2))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 2, types.float32, *[types.int64] * 4), generate


@inner
def add_norm_rows(
    h: int,
    y: int,
    weight: int,
    x: int,
    x_row_bytes: int,
    first: int,
    last: int,
    width: int,
    eps: float,
) -> None:
    """h += y, then x = RMS norm of h times weight.

    h and weight are float32, y and x bfloat16, all of `width` values a row; y 0: nothing to add.
    """
    scales, whole = np.empty(TOGETHER, np.float32), width // PAIRED * PAIRED
    for start in range(first, last, TOGETHER):
        end = min(start + TOGETHER, last)
        for row in range(start, end):
            hs = floats(h + row * width * 4, width)
            scales[row - start] = add_row(hs, y + row * width * 2 if y else 0, width, eps)
        for row in range(start, end):
            scale, source, target = scales[row - start], h + row * width * 4, x + row * x_row_bytes
            next_h = source + TOGETHER * width * 4
            next_y = y + (row + TOGETHER) * width * 2 if y else next_h
            _scale(source, weight, scale, target, whole // PAIRED, next_h, next_y)
            hs, ws, xs = floats(source, width), floats(weight, width), halves(target, width)
            for i in range(whole, width):
                xs[i] = to_bf16(hs[i] * scale * ws[i])


@in_llvm
def _rotate(
    _context: Any,
    head: types.Type,
    heads: types.Type,
    pairs: types.Type,
    cos: types.Type,
    sin: types.Type,
) -> Any:
    """The whole vectors of `rotate_rows` of so many heads."""

    def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        v, b, (head, heads, pairs, cos, sin) = Vectors(builder), builder, values
        count = b.udiv(pairs, pairs.type(LANES))
        with cgutils.for_range(b, heads) as rows, cgutils.for_range(b, count) as loop:
            start = v.moved(head, b.mul(rows.index, pairs), 4)
            here, cosines, sines = (v.moved(it, loop.index, LANES * 4) for it in (start, cos, sin))
            c, s = v.load(cosines), v.load(sines)
            x, y = v.apart(v.load_words(here))
            first = b.fsub(b.fmul(x, c), b.fmul(y, s))
            second = b.fadd(b.fmul(x, s), b.fmul(y, c))
            v.store(v.paired(first, second), here)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), generate


@inner
def _rotate_rest(head: int, heads: int, pairs: int, cos: int, sin: int) -> None:
    """What `_rotate` leaves."""
    c, s = floats(cos, pairs), floats(sin, pairs)
    for number in range(heads):
        both = words(head + number * pairs * 4, pairs)
        for i in range(pairs // LANES * LANES, pairs):
            x, y = float_of(both[i] << _HALF), float_of(both[i] & _UPPER)
            low = np.int32(to_bf16(x * c[i] - y * s[i]))
            both[i] = low | (np.int32(to_bf16(x * s[i] + y * c[i])) << _HALF)


@inner
def _norm_heads(row: int, head_norm: int, heads: int, head_dim: int, eps: float) -> None:
    for head in range(heads):
        at = halves(row + head * head_dim * 2, head_dim)
        weight = halves(head_norm + head * head_dim * 2, head_dim)
        total = np.float32(0.0)
        for i in range(head_dim):
            total += from_bf16(at[i]) * from_bf16(at[i])
        scale = _inverse_norm(total, head_dim, eps)
        for i in range(head_dim):
            normed = from_bf16(to_bf16(from_bf16(at[i]) * scale))
            at[i] = to_bf16(normed * from_bf16(weight[i]))


@inner
def rotate_rows(
    qkv: int,
    rotations: int,
    head_norm: int,
    first: int,
    last: int,
    heads: int,
    all_heads: int,
    head_dim: int,
    eps: float,
) -> None:
    """Rotate the pairs of the first `heads` of `all_heads` heads of each row, in place.

    qkv is bfloat16 [rows, all_heads, head_dim]; rotations are cosines and sines, float32 [rows, 2,
    head_dim / 2]. With `head_norm`, bfloat16 [heads, head_dim], a head is RMS-normed first.
    """
    pairs = head_dim // 2
    for row in range(first, last):
        at, cos = qkv + row * all_heads * head_dim * 2, rotations + row * head_dim * 4
        if head_norm:
            _norm_heads(at, head_norm, heads, head_dim, eps)
        _rotate(at, heads, pairs, cos, cos + pairs * 4)
        if pairs % LANES:
            _rotate_rest(at, heads, pairs, cos, cos + pairs * 4)


@inner
def copy_halves(source: int, target: int, count: int) -> None:
    values, copies = halves(source, count), halves(target, count)
    for i in range(count):
        copies[i] = values[i]


@in_llvm
def _silu_multiply(
    _context: Any, gate: types.Type, up: types.Type, out: types.Type, count: types.Type
) -> Any:
    """`count` times PAIRED of `silu_multiply_rows`."""

    def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
        v, (gate, up, out, count) = Vectors(builder), values
        with cgutils.for_range(builder, count) as loop:
            gates, ups, here = (v.moved(it, loop.index, PAIRED * 2) for it in (gate, up, out))
            v.store(v.silu_multiply(v.load_words(gates), v.load_words(ups)), here)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


@inner
def silu_multiply_rows(
    gate_up: int, out: int, out_row_bytes: int, first: int, last: int, width: int
) -> None:
    """out = SiLU(gate) * up; gate_up is bfloat16 [rows, 2 * width], out [rows, width].

    torch rounds SiLU(gate) to bfloat16 too; here only the product is.
    """
    scratch, whole = np.zeros((3, PAIRED), np.uint16), width // PAIRED * PAIRED
    for row in range(first, last):
        gate, target = gate_up + row * width * 4, out + row * out_row_bytes
        up = gate + width * 2
        _silu_multiply(gate, up, target, whole // PAIRED)
        if whole < width:
            _silu_multiply_rest(scratch, gate, up, target, whole, width)


@inner
def _silu_multiply_rest(scratch: Any, gate: int, up: int, out: int, first: int, last: int) -> None:
    """Fewer values than PAIRED, by way of `scratch`."""
    here, count = scratch.ctypes.data, last - first
    there, target = here + PAIRED * 2, here + PAIRED * 4
    copy_halves(gate + first * 2, here, count)
    copy_halves(up + first * 2, there, count)
    _silu_multiply(here, there, target, 1)
    copy_halves(target, out + first * 2, count)


# ---------------------------------------------------------------- C functions
# `void kernel(int64 *arguments)`: rows, the addresses of omp_get_num_threads and omp_get_thread_num
# (0: one thread), then what is unpacked below. OpenMP may give fewer threads than it is asked for,
# by OMP_THREAD_LIMIT or OMP_DYNAMIC for one, so that rows are shared by those that there are.

NUM_ARGUMENTS = 10


@inner
def share_of(a: Any) -> tuple[int, int]:
    """The rows of the calling thread."""
    if not a[1]:
        return 0, a[0]
    threads, thread = call_for_int(a[1]), call_for_int(a[2])
    return a[0] * thread // threads, a[0] * (thread + 1) // threads


def _add_norm(arguments: Any) -> None:
    a = numba.carray(arguments, NUM_ARGUMENTS)
    first, last = share_of(a)
    eps = float_of(np.int32(a[8]))
    add_norm_rows(a[3], a[4], a[5], a[6], a[7] * 2, first, last, a[7], eps)


def _rotate_c(arguments: Any) -> None:
    a = numba.carray(arguments, NUM_ARGUMENTS)
    first, last = share_of(a)
    eps = float_of(np.int32(a[9]))
    rotate_rows(a[3], a[4], a[5], first, last, a[6], a[7], a[8], eps)


def _silu_multiply_c(arguments: Any) -> None:
    a = numba.carray(arguments, NUM_ARGUMENTS)
    first, last = share_of(a)
    silu_multiply_rows(a[3], a[4], a[5] * 2, first, last, a[5])


def _levels(arguments: Any) -> None:
    a = numba.carray(arguments, NUM_ARGUMENTS)
    first, last = share_of(a)
    width, source = a[5] * GROUP, a[3]
    if a[6]:  # x is bfloat16, and becomes float32 there
        source = a[6]
        for row in range(first, last):
            widen_row(a[3] + row * width * 2, source + row * width * 4, width)
    levels_rows(source, a[4], first, last, a[5])


def _norm_levels(arguments: Any) -> None:
    a = numba.carray(arguments, NUM_ARGUMENTS)
    first, last = share_of(a)
    eps = float_of(np.int32(a[8]))
    norm_levels_rows(a[3], a[4], a[5], a[6], first, last, a[7], eps)


def _silu_levels(arguments: Any) -> None:
    a = numba.carray(arguments, NUM_ARGUMENTS)
    first, last = share_of(a)
    silu_levels_rows(a[3], a[4], a[5], first, last, a[6])


_FUNCTIONS = {
    "add_norm": _add_norm,
    "rotate": _rotate_c,
    "silu_multiply": _silu_multiply_c,
    "levels": _levels,
    "norm_levels": _norm_levels,
    "silu_levels": _silu_levels,
}
_CACHE = use_kernel_cache(__file__, compiled.__file__, vectors.__file__)


@functools.cache
def address(name: str) -> int:
    """Address of a kernel, compiled now if it is not in the cache."""
    signature = types.void(types.CPointer(types.int64))
    return address_of(_FUNCTIONS[name], signature, cache=_CACHE)
