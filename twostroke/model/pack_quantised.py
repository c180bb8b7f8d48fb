"""Puts weights of few bits into the layout of `few_rows_quantised`, compiled: starting up is partly
this, and torch takes five passes over the weights for it.
"""

import numpy as np

from twostroke.arrays import UInt8s
from twostroke.model import compiled as compiled_file
from twostroke.model.compiled import kernel, use_kernel_cache

_CACHE = use_kernel_cache(__file__, compiled_file.__file__)


@kernel(cache=_CACHE)
def pack_planes(values: UInt8s, bits: int, num_groups: int, out: UInt8s) -> None:
    """values [rows, 32 * groups], of 4 or 8 bits -> out [rows / 64, groups, bytes of a group].

    Only the planes are written; see `few_rows_quantised` for where each weight goes.
    """
    num_rows = values.shape[0]
    for row in range(num_rows):
        block, lane = row // 64, row % 64
        for group in range(num_groups):
            target = out[block, group]
            for eight in range(4):
                first = group * 32 + eight * 8
                place = (eight * 64 + lane) * 4
                for plane in range(bits // 4):
                    shift = np.uint8(4 if bits == 8 and plane == 0 else 0)
                    at = plane * 1024 + place
                    for p in range(2):
                        a = (values[row, first + p] >> shift) & np.uint8(15)
                        b = (values[row, first + 2 + p] >> shift) & np.uint8(15)
                        c = (values[row, first + 4 + p] >> shift) & np.uint8(15)
                        d = (values[row, first + 6 + p] >> shift) & np.uint8(15)
                        target[at + 2 * p] = a | np.uint8(b << np.uint8(4))
                        target[at + 2 * p + 1] = c | np.uint8(d << np.uint8(4))


@kernel(cache=_CACHE)
def pack_numbers(numbers: UInt8s, offset: int, out: UInt8s) -> None:
    """numbers [rows, groups, 2], bytes of float16 -> out, from byte `offset` of a group on."""
    for row in range(numbers.shape[0]):
        block, place = row // 64, offset + row % 64 * 2
        for group in range(numbers.shape[1]):
            out[block, group, place] = numbers[row, group, 0]
            out[block, group, place + 1] = numbers[row, group, 1]
