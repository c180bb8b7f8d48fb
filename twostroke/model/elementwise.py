"""A decoder's small operations on tensors: residual sum and norm, rotation, SiLU.

`Elementwise` is what the model calls: compiled kernels for bfloat16 on a CPU, torch elsewhere.
Roundings to the model's type are in the same places, so the two agree but for the order of sums;
only SiLU(gate) is not rounded by itself before it is multiplied.
"""

import ctypes
import functools
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from twostroke.model.openmp import address_in, load_openmp

LEVELS_BYTES = 72  # of a group of 32 values as integers: see `few_rows_quantised`


class Elementwise(Protocol):
    """Shapes: T tokens, N the hidden size, W the width of the MLP, D the head size."""

    def add_norm(self, h: Tensor, y: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        """h [T, N] += y, in place; returns the RMS norm of h times weight, in the model's type.

        h and weight are float32.
        """
        ...

    def rotate(
        self, qkv: Tensor, rotations: Tensor, heads: int, head_norm: Tensor | None, eps: float
    ) -> None:
        """Rotate the first `heads` heads of qkv [T, all heads, D] in place, kept in pairs.

        `rotations` [T, 2, D / 2] are cosines and sines. With `head_norm` [heads, D] each of these
        heads is RMS-normed and multiplied by it first.
        """
        ...

    def silu_multiply(self, gate_up: Tensor) -> Tensor:
        """SiLU(gate) * up, for gate_up [T, 2 W]."""
        ...


class TorchElementwise:
    """Any device, any type."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def add_norm(self, h: Tensor, y: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        if y is not None:
            h += y
        return F.rms_norm(h, weight.shape, weight, eps).to(self._dtype)

    def rotate(
        self, qkv: Tensor, rotations: Tensor, heads: int, head_norm: Tensor | None, eps: float
    ) -> None:
        qk = qkv[:, :heads]
        if head_norm is not None:
            qk = F.rms_norm(qk, (qk.shape[-1],), None, eps) * head_norm
        a, b = qk.float().view(*qk.shape[:-1], -1, 2).unbind(-1)
        cos, sin = rotations[:, None].unbind(2)
        turned = torch.stack((a * cos - b * sin, a * sin + b * cos), -1)
        qkv[:, :heads] = turned.flatten(-2).to(qkv.dtype)

    def silu_multiply(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)


def make_elementwise(device: torch.device, dtype: torch.dtype) -> Elementwise:
    """The fastest that works here."""
    if device.type == "cpu" and dtype == torch.bfloat16 and kernels() is not None:
        return CompiledElementwise()
    return TorchElementwise(dtype)


class Kernels:
    """The compiled kernels' addresses; each is `void kernel(int64 *arguments)`.

    Arguments begin with FIRST; what follows is the kernel's own (see `elementwise_kernels`). Run on
    several threads, a kernel does the calling thread's share.
    """

    def __init__(self) -> None:
        from twostroke.model import elementwise_kernels as compiled

        self._num_arguments = compiled.NUM_ARGUMENTS
        self.add_norm = compiled.address("add_norm")
        self.rotate = compiled.address("rotate")
        self.silu_multiply = compiled.address("silu_multiply")
        self.levels = compiled.address("levels")
        self.norm_levels = compiled.address("norm_levels")
        self.silu_levels = compiled.address("silu_levels")
        self._openmp = load_openmp()
        self.num_threads = self.thread_num = 0
        if self._openmp is not None:
            self.num_threads = address_in(self._openmp.omp_get_num_threads)
            self.thread_num = address_in(self._openmp.omp_get_thread_num)
        self._call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

    # Not before they are needed: see `int8_rows`.

    @functools.cached_property
    def turned_bytes(self) -> int:
        return self._for_int8("turned_bytes")

    @functools.cached_property
    def norm_bytes(self) -> int:
        return self._for_int8("norm_bytes")

    @functools.cached_property
    def silu_bytes(self) -> int:
        return self._for_int8("silu_bytes")

    @staticmethod
    def _for_int8(name: str) -> int:
        from twostroke.model import int8_kernels

        return int8_kernels.address(name)

    def first(self, rows: int, num_threads: int) -> tuple[int, int, int]:
        """The arguments that all kernels begin with."""
        return (rows, self.num_threads, self.thread_num) if num_threads > 1 else (rows, 0, 0)

    def run(self, address: int, rows: int, *arguments: int) -> None:
        """On torch's threads, when there are rows enough to share."""
        threads = (
            torch.get_num_threads() if self._openmp is not None and rows >= _SHARED_ROWS else 1
        )
        values = np.zeros(self._num_arguments, np.int64)
        given = (*self.first(rows, threads), *arguments)
        values[: len(given)] = given
        if threads == 1:
            self._call(address)(values.ctypes.data)
        else:
            assert self._openmp is not None
            self._openmp.GOMP_parallel(address, values.ctypes.data, threads, 0)


_SHARED_ROWS = 8  # from here on threads are worth waking


@functools.cache
def kernels() -> Kernels | None:
    """None where numba cannot be imported."""
    try:
        return Kernels()
    except ImportError:
        return None


class CompiledElementwise:
    """bfloat16 on a CPU. Tensors must be contiguous."""

    def __init__(self) -> None:
        found = kernels()
        assert found is not None
        self._kernels = found

    def add_norm(self, h: Tensor, y: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        x = torch.empty(h.shape, dtype=torch.bfloat16)
        self._kernels.run(
            self._kernels.add_norm,
            *(len(h), h.data_ptr(), 0 if y is None else y.data_ptr()),
            *(weight.data_ptr(), x.data_ptr(), h.shape[1], float_bits(eps)),
        )
        return x

    def rotate(
        self, qkv: Tensor, rotations: Tensor, heads: int, head_norm: Tensor | None, eps: float
    ) -> None:
        norm = 0 if head_norm is None else head_norm.data_ptr()
        self._kernels.run(
            self._kernels.rotate,
            *(len(qkv), qkv.data_ptr(), rotations.data_ptr(), norm),
            *(heads, qkv.shape[1], qkv.shape[2], float_bits(eps)),
        )

    def silu_multiply(self, gate_up: Tensor) -> Tensor:
        width = gate_up.shape[1] // 2
        out = torch.empty((len(gate_up), width), dtype=torch.bfloat16)
        self._kernels.run(
            self._kernels.silu_multiply,
            *(len(gate_up), gate_up.data_ptr(), out.data_ptr(), width),
        )
        return out


def float_bits(value: float) -> int:
    """A float32 as an integer, to be passed among addresses."""
    return int(np.float32(value).view(np.int32))
