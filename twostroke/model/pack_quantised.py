"""Puts weights of few bits into the layout of `few_rows_quantised`, compiled: torch would take five
passes over the weights, for which a start waits.
"""

import numpy as np

from twostroke.arrays import UInt8s
from twostroke.model import compiled as compiled_file
from twostroke.model.compiled import kernel, use_kernel_cache

_CACHE = use_kernel_cache(__file__, compiled_file.__file__)


@kernel(cache=_CACHE)
def pack_values(values: UInt8s, order: UInt8s, num_groups: int, out: UInt8s) -> None:
    """values [rows, 32 * groups] -> out [rows / 64, groups, bytes of a group].

    `order` says which 8 inputs of 4 bits, or 4 of 8, an output's 4 bytes hold. Only the values are
    written; see `few_rows_quantised` for where each goes.
    """
    bits = 32 // len(order)
    for row in range(values.shape[0]):
        block, place = row // 64, row % 64 * 4
        for group in range(num_groups):
            target, first = out[block, group], group * 32
            if bits == 4:
                for eight in range(4):
                    for k in range(4):
                        i = first + 8 * eight
                        upper = values[row, i + order[2 * k + 1]] << np.uint8(4)
                        both = values[row, i + order[2 * k]] | np.uint8(upper)
                        target[256 * eight + place + k] = both
            else:
                for quad in range(8):
                    for k in range(4):
                        value = values[row, first + 4 * quad + order[k]]
                        target[256 * quad + place + k] = value ^ np.uint8(128)  # + 128


@kernel(cache=_CACHE)
def pack_numbers(numbers: UInt8s, offset: int, out: UInt8s) -> None:
    """numbers [rows, groups, 2], bytes of float16 -> out, from byte `offset` of a group on."""
    for row in range(numbers.shape[0]):
        block, place = row // 64, offset + row % 64 * 2
        for group in range(numbers.shape[1]):
            out[block, group, place] = numbers[row, group, 0]
            out[block, group, place + 1] = numbers[row, group, 1]
