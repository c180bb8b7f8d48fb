"""What lies between a decoder's matrix products, compiled: residual sum and norm, rotation, SiLU.

torch needs three to six passes over the data and as many calls for each of these, some 40 us a
layer; here each is one pass. Rows are tokens. Roundings to bfloat16 are where torch has them.

A kernel handles the rows [first, last), so that threads can share a step. A row's result does not
depend on the others.
"""

import functools
from typing import Any

import numba
import numpy as np
from numba import types

from twostroke.model import compiled
from twostroke.model.compiled import (
    address_of,
    bits_of,
    call_for_int,
    float_of,
    floats,
    from_bf16,
    halves,
    inner,
    to_bf16,
    use_kernel_cache,
    words,
)

GROUP = 32  # see `quantised`
_LANES = 32  # partial sums, added up in a fixed order
_LOG2_E = np.float32(1.4426950408889634)
# 2**x on [-0.5, 0.5], lowest power first: least relative error in float32 at degree 5 with 2**0
# exactly 1, 9.1e-08.
_P1, _P2, _P3 = np.float32(0.693146978), np.float32(0.240222421), np.float32(0.0555073377)
_P4, _P5 = np.float32(0.00967151277), np.float32(0.00132647151)
_MAGIC = np.float32(12582912.0)  # adding 1.5 * 2**23 rounds to an integer, in the low bits
_ONE = np.float32(1.0)
_HALF, _UPPER = np.int32(16), np.int32(-65536)  # a pair of bfloat16: shift and mask of the second


@inner
def exp(x: float) -> Any:
    """e**x for float32, in a form that vectorises; beyond 2**+-126 it stays there."""
    t = min(max(x * _LOG2_E, np.float32(-126.0)), np.float32(126.0))
    shifted = t + _MAGIC
    f = t - (shifted - _MAGIC)
    power = _ONE + f * (_P1 + f * (_P2 + f * (_P3 + f * (_P4 + f * _P5))))
    return float_of(bits_of(power) + (bits_of(shifted) << np.int32(23)))


@inner
def _scale_of(sums: Any, count: int, eps: float) -> Any:
    """1 / sqrt(mean of squares + eps); `sums` are partial."""
    total = np.float32(0.0)
    for i in range(_LANES):
        total += sums[i]
    return _ONE / np.sqrt(total / np.float32(count) + np.float32(eps))


@inner
def group_sums_rows(x: int, sums: int, first: int, last: int, groups: int) -> None:
    """Sums of each GROUP values of x, bfloat16 [rows, groups * GROUP]; float32 [rows, groups]."""
    for row in range(first, last):
        values = halves(x + row * groups * GROUP * 2, groups * GROUP)
        out = floats(sums + row * groups * 4, groups)
        for group in range(groups):
            total = np.float32(0.0)
            for i in range(group * GROUP, (group + 1) * GROUP):
                total += from_bf16(values[i])
            out[group] = total


@inner
def add_norm_rows(
    h: int, y: int, weight: int, x: int, first: int, last: int, width: int, eps: float
) -> None:
    """h += y, then x = RMS norm of h times weight.

    h and weight are float32, y and x bfloat16, all of `width` values a row; y 0: nothing to add.
    """
    w = floats(weight, width)
    sums = np.empty(_LANES, np.float32)
    whole = width // _LANES * _LANES
    for row in range(first, last):
        hs, xs = floats(h + row * width * 4, width), halves(x + row * width * 2, width)
        if y:
            ys = halves(y + row * width * 2, width)
            for i in range(width):
                hs[i] += from_bf16(ys[i])
        sums[:] = np.float32(0.0)
        for start in range(0, whole, _LANES):
            for lane in range(_LANES):
                value = hs[start + lane]
                sums[lane] += value * value
        for i in range(whole, width):
            sums[0] += hs[i] * hs[i]
        scale = _scale_of(sums, width, eps)
        for i in range(width):
            xs[i] = to_bf16(hs[i] * scale * w[i])


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
        cos = floats(rotations + row * head_dim * 4, pairs)
        sin = floats(rotations + row * head_dim * 4 + pairs * 4, pairs)
        for head in range(heads):
            at = halves(qkv + (row * all_heads + head) * head_dim * 2, head_dim)
            if head_norm:
                weight = halves(head_norm + head * head_dim * 2, head_dim)
                total = np.float32(0.0)
                for i in range(head_dim):
                    total += from_bf16(at[i]) * from_bf16(at[i])
                scale = _ONE / np.sqrt(total / np.float32(head_dim) + np.float32(eps))
                for i in range(head_dim):
                    normed = from_bf16(to_bf16(from_bf16(at[i]) * scale))
                    at[i] = to_bf16(normed * from_bf16(weight[i]))
            both = words(qkv + (row * all_heads + head) * head_dim * 2, pairs)
            for i in range(pairs):
                a, b = float_of(both[i] << _HALF), float_of(both[i] & _UPPER)
                low = np.int32(to_bf16(a * cos[i] - b * sin[i]))
                both[i] = low | (np.int32(to_bf16(a * sin[i] + b * cos[i])) << _HALF)


@inner
def silu_multiply_rows(gate_up: int, out: int, first: int, last: int, width: int) -> None:
    """out = SiLU(gate) * up; gate_up is bfloat16 [rows, 2 * width], out [rows, width]."""
    for row in range(first, last):
        gate = halves(gate_up + row * width * 4, width)
        up = halves(gate_up + row * width * 4 + width * 2, width)
        target = halves(out + row * width * 2, width)
        for i in range(width):
            g = from_bf16(gate[i])
            silu = from_bf16(to_bf16(g / (_ONE + exp(-g))))
            target[i] = to_bf16(silu * from_bf16(up[i]))


# ---------------------------------------------------------------- C functions
# `void kernel(int64 *arguments)`: rows, threads, address of omp_get_thread_num (0: one thread),
# then what is unpacked below. Where the last is not 0, the result's group sums go there.

NUM_ARGUMENTS = 10


@inner
def _share(a: Any) -> tuple[int, int]:
    """The rows of the calling thread."""
    thread = call_for_int(a[2]) if a[2] else 0
    return a[0] * thread // a[1], a[0] * (thread + 1) // a[1]


def _add_norm(arguments: Any) -> None:
    a = numba.carray(arguments, NUM_ARGUMENTS)
    first, last = _share(a)
    add_norm_rows(a[3], a[4], a[5], a[6], first, last, a[7], float_of(np.int32(a[8])))
    if a[9]:
        group_sums_rows(a[6], a[9], first, last, a[7] // GROUP)


def _rotate(arguments: Any) -> None:
    a = numba.carray(arguments, NUM_ARGUMENTS)
    first, last = _share(a)
    eps = float_of(np.int32(a[9]))
    rotate_rows(a[3], a[4], a[5], first, last, a[6], a[7], a[8], eps)


def _silu_multiply(arguments: Any) -> None:
    a = numba.carray(arguments, NUM_ARGUMENTS)
    first, last = _share(a)
    silu_multiply_rows(a[3], a[4], first, last, a[5])
    if a[6]:
        group_sums_rows(a[4], a[6], first, last, a[5] // GROUP)


def _group_sums(arguments: Any) -> None:
    a = numba.carray(arguments, NUM_ARGUMENTS)
    first, last = _share(a)
    group_sums_rows(a[3], a[4], first, last, a[5])


_FUNCTIONS = {
    "add_norm": _add_norm,
    "rotate": _rotate,
    "silu_multiply": _silu_multiply,
    "group_sums": _group_sums,
}
_CACHE = use_kernel_cache(__file__, compiled.__file__)


@functools.cache
def address(name: str) -> int:
    """Address of a kernel, compiled now if it is not in the cache."""
    signature = types.void(types.CPointer(types.int64))
    return address_of(_FUNCTIONS[name], signature, cache=_CACHE)
