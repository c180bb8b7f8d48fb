"""Blocks of 32 values in 4 or 8 bits as bfloat16, in one pass: torch needs six, and a start waits.

The results are those of `dequantise`'s arithmetic in torch: a product of few bits and a scale is
exact in float32, so what is rounded is the sum, if there is one, and then the value to bfloat16.
"""

from typing import Any

import numpy as np

from twostroke.arrays import UInt8s, UInt16s
from twostroke.model import compiled as compiled_file
from twostroke.model.compiled import float_of, inner, kernel, to_bf16, use_kernel_cache

_CACHE = use_kernel_cache(__file__, compiled_file.__file__)
_LOW, _HIGH, _MINUS_EIGHT = np.uint8(15), np.uint8(4), np.float32(-8.0)
_MAGNITUDE, _NOT_FINITE, _SIGN = np.int32(0x7FFF), np.int32(0x7C00), np.int32(0x8000)
_REBIAS = np.float32(2.0**112)  # the exponents of float16 and float32 begin at -15 and -127


@inner
def _half(low: int, high: int) -> Any:
    """The float32 of a float16's two bytes."""
    bits = np.int32(low) | (np.int32(high) << np.int32(8))
    wide = np.int32((bits & _MAGNITUDE) << np.int32(13))
    if bits & _NOT_FINITE == _NOT_FINITE:
        value = float_of(np.int32(wide | np.int32(0x7F800000)))
    else:
        value = float_of(wide) * _REBIAS
    return -value if bits & _SIGN else value


@kernel(cache=_CACHE)
def q4(blocks: UInt8s, has_minimum: bool, out: UInt16s) -> None:
    """Q4_1, or Q4_0, which stores no minimum: it is -8 times the scale. [n, bytes] -> [n, 32]."""
    first = 4 if has_minimum else 2
    for row in range(blocks.shape[0]):
        block, target = blocks[row], out[row]
        d = _half(block[0], block[1])
        m = _half(block[2], block[3]) if has_minimum else d * _MINUS_EIGHT
        packed, width = block[first:], blocks.shape[1] - first
        for i in range(width):
            target[i] = to_bf16(np.float32(np.int32(packed[i] & _LOW)) * d + m)
        for i in range(width):
            target[width + i] = to_bf16(np.float32(np.int32(packed[i] >> _HIGH)) * d + m)


@kernel(cache=_CACHE)
def nibbles(packed: UInt8s, row_bytes: int, out: UInt8s) -> None:
    """Rows of b bytes, every `row_bytes` -> out [n, 2 b]: all low halves, then all high ones."""
    width = out.shape[1] // 2
    for row in range(out.shape[0]):
        source, target = packed[row * row_bytes : row * row_bytes + width], out[row]
        for i in range(width):
            target[i] = source[i] & _LOW
        for i in range(width):
            target[width + i] = source[i] >> _HIGH


@kernel(cache=_CACHE)
def q8(blocks: UInt8s, out: UInt16s) -> None:
    """Q8_0: [n, 34] -> [n, 32]."""
    for row in range(blocks.shape[0]):
        block, target = blocks[row], out[row]
        d, values = _half(block[0], block[1]), block[2:]
        for i in range(32):
            target[i] = to_bf16(np.float32(np.int32(np.int8(values[i]))) * d)
