"""Names of the array types that columns are made of, and what is quick to ask of short ones."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Float32s = NDArray[np.float32]
Float64s = NDArray[np.float64]
UInt8s = NDArray[np.uint8]
UInt16s = NDArray[np.uint16]
Bools = NDArray[np.bool_]

NO_TOKENS: Int32s = np.empty(0, np.int32)

_FEW = 64  # entries up to which Python's own sum is faster than NumPy's
_ONES: Int32s = np.ones(4096, np.int32)
_PLACES: Int64s = np.arange(4096)
# For NumPy: with one of Python's numbers each operation on a few entries takes twice as long.
ZERO, ONE = np.zeros((), np.int32), np.ones((), np.int32)
for _constant in (_ONES, _PLACES, ZERO, ONE):
    _constant.flags.writeable = False


def total(column: Int32s | Int64s) -> int:
    """The sum of a column of whole numbers."""
    return sum(column.tolist()) if len(column) <= _FEW else int(np.add.reduce(column))


def least(column: Int32s | Int64s) -> int:
    """The smallest entry; there must be one. Faster by far than `min` where they are few."""
    smallest: int = column.item(column.argmin())
    return smallest


def most(column: Int32s | Int64s) -> int:
    """The largest entry, likewise."""
    largest: int = column.item(column.argmax())
    return largest


def quantiles(values: Float64s, shares: Sequence[float]) -> list[float]:
    """`np.quantile(values, shares)` to the last bit, without the masked arrays that it imports.

    That takes 20 ms, which a short simulation feels. There must be a value.
    """
    ordered = np.sort(values)
    if np.isnan(ordered[-1]):
        return [math.nan] * len(shares)
    found = []
    for share in shares:
        place = (len(ordered) - 1) * share
        below = min(int(place), len(ordered) - 1)
        low, high = ordered.item(below), ordered.item(min(below + 1, len(ordered) - 1))
        part = place - below
        near_low = part < 0.5
        found.append(low + (high - low) * part if near_low else high - (high - low) * (1 - part))
    return found


def has_any(flags: Bools) -> bool:
    """Whether any of them is set. Of a few far faster than `np.count_nonzero`."""
    return 1 in flags.tobytes()


def has_all(flags: Bools) -> bool:
    """Whether all of them are set."""
    return 0 not in flags.tobytes()


def ones(count: int) -> Int32s:
    """So many ones, which nobody may change."""
    return _ONES[:count] if count <= len(_ONES) else np.ones(count, np.int32)


def places(count: int) -> Int64s:
    """0, 1, ... count - 1, likewise."""
    return _PLACES[:count] if count <= len(_PLACES) else np.arange(count)


def are_same(one: Int32s | Int64s, other: Int32s | Int64s) -> bool:
    """Whether two columns of one type, each in one piece of memory, are equal."""
    return one.tobytes() == other.tobytes()
