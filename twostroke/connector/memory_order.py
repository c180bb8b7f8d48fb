"""What keeps memory accesses of one thread in order, as another engine sees them.

A lease word says whether the data beside it still is what a ticket promised (see `kv_messages`).
Two engines share that memory and no lock: what orders word and data is the processor, and only x86
does so unasked. Others, like ARM's, may show a word before or after the data next to which it was
written or read; and a lock that one of the two takes in between holds back accesses on one side of
it only.
"""

from collections.abc import Callable
from typing import Any

import numba
from numba import types
from numba.extending import intrinsic

_in_llvm: Callable[[Callable[..., Any]], Any] = intrinsic


@_in_llvm
def _emit_fence(_context: Any) -> Any:
    def generate(context: Any, builder: Any, _signature: Any, _values: Any) -> Any:
        builder.fence("acq_rel")
        return context.get_dummy_value()

    return types.void(), generate


def _fence() -> None:
    _emit_fence()


# Loads before it are done before anything after it, stores before it before stores after it. On
# x86, where that is so anyway, no instruction; on ARM `dmb ish`.
fence: Callable[[], None] = numba.njit("void()")(_fence)
