"""Attention on a CPU: plans a step for the compiled kernels, and calls them once a layer."""

import ctypes
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba import types
from torch import Tensor

from twostroke.arrays import Int64s
from twostroke.messages import Int32s
from twostroke.model.barrier import Barrier
from twostroke.model.compiled import CPU_NAME
from twostroke.model.openmp import load_openmp
from twostroke.worker.attention import PagedAttention
from twostroke.worker.attention_emit import HAS_DOTS, LANES
from twostroke.worker.attention_int8 import MAX_HEAD_DIM
from twostroke.worker.attention_int8_scores import can_score
from twostroke.worker.attention_kernels import (
    LARGE_ITEM_KEYS,
    LARGE_ITEM_ROWS,
    TICKETS,
    Arguments,
    compile_attend,
    scratch_floats,
    shared_floats,
)
from twostroke.worker.attention_plan import (
    ITEM_COLUMNS,
    MAX_ITEM_ROWS,
    MERGE_COLUMNS,
    locate_tokens,
    plan_step,
)
from twostroke.worker.attention_simd import STATE

_ELEMENTS = {
    torch.float32: types.float32,
    torch.bfloat16: types.uint16,
    torch.float16: types.int16,
    torch.int8: types.int8,
}
_CACHE_LINE = 64


def why_no_int8(head_dim: int) -> str:
    """Why the kernels cannot do with a pool of int8; empty if they can."""
    if not HAS_DOTS:
        return "this processor has no AVX512-BF16 and AVX512-VNNI"
    if head_dim > MAX_HEAD_DIM:
        return f"head_dim is {head_dim}; at most {MAX_HEAD_DIM}"
    return ""


class LayerCalls:
    """One attention call for each layer, as a `Program` makes them."""

    def __init__(self, attention: "NumbaAttention", address: int, arguments: Arguments) -> None:
        num_layers = attention.pool.shape[1]
        self._attention, self._source = attention, arguments
        names = [field[0] for field in arguments._fields_]
        self._arguments = np.empty((num_layers, len(names)), np.int64)
        self._tickets = np.zeros((num_layers, TICKETS * _CACHE_LINE // 8), np.int64)
        self._layer, self._ticket = names.index("layer"), names.index("tickets")
        self._step = slice(names.index("query_start"), names.index("partials") + 1)
        self._work = [names.index(name) for name in ("num_items", "items", "num_merges", "merges")]
        self._arguments[:] = np.frombuffer(memoryview(arguments), np.int64)
        self._arguments[:, self._layer] = np.arange(num_layers)
        self._arguments[:, self._ticket] = (
            self._tickets.ctypes.data + np.arange(num_layers) * self._tickets.strides[0]
        )
        start, stride = self._arguments.ctypes.data, self._arguments.strides[0]
        self.calls = [(address, start + layer * stride) for layer in range(num_layers)]

    def begin(self, wanted: Int64s | None) -> None:
        """Take over what `plan` has prepared.

        `wanted` are the tokens that the last layer attends for, where not all; it writes the keys
        and values of all.
        """
        self._arguments[:, self._step] = np.frombuffer(memoryview(self._source), np.int64)[
            self._step
        ]
        self._tickets.fill(0)
        if wanted is not None:
            self._last = self._attention.work_for(wanted)
            counts = (it for work in self._last for it in (len(work), work.ctypes.data))
            self._arguments[-1, self._work] = list(counts)


class NumbaAttention(PagedAttention):
    """Reads the pool's blocks in place, on `num_threads` threads (0: as many as torch uses).

    A row's result does not depend, in any bit, on the other rows of the step or on the threads.
    Not for concurrent use: scratch belongs to the object. Where torch brings no OpenMP with GNU's
    entry points (macOS), one thread does all.
    """

    kind = f"compiled for {CPU_NAME}"

    def __init__(
        self,
        pool: Tensor,
        num_heads: int,
        scale: float,
        num_threads: int = 0,
        *,
        int8_scores: bool = False,
    ) -> None:
        """With `int8_scores`, where they can be, chunks have theirs from 8 bits."""
        super().__init__(pool, num_heads, scale)
        element = _ELEMENTS[pool.dtype]
        if int8_scores and element == types.uint16 and HAS_DOTS and can_score(self.head_dim):
            element = types.uint8
            self.kind += ", scores of prompts in 8 bits"
        openmp = load_openmp()
        self.num_threads = (num_threads or torch.get_num_threads()) if openmp else 1
        address = compile_attend(element)
        self._address, self._element = address, element
        self._run = _runner(address, self.num_threads, openmp)

        itemsize = self.dtype.itemsize
        num_units, planes = self.head_dim * itemsize // 4, 4 // itemsize
        padded = -(-num_units // LANES) * LANES
        floats = scratch_floats(planes * padded, max(MAX_ITEM_ROWS, self.group))
        # Whole pages a thread, so that no two write into one cache line. Torch's memory begins with
        # one: a vector that lies in two takes twice as long.
        self._scratch = torch.zeros((self.num_threads, -(-floats // 1024) * 1024))
        self._scale = np.array([scale * math.log2(math.e)], np.float32)
        self._tickets = np.zeros(TICKETS * _CACHE_LINE // 8, np.int64)
        block, layer, side, head, row, _ = (
            stride * pool.element_size() for stride in pool.stride()
        )
        self._barrier = Barrier(openmp)
        self._arguments = Arguments(
            pool=pool.data_ptr(),
            block_bytes=block,
            layer_bytes=layer,
            side_bytes=side,
            head_bytes=head,
            row_bytes=row,
            block_size=self.block_size,
            num_kv_heads=self.num_kv_heads,
            group=self.group,
            num_units=num_units,
            padded=padded,
            width=planes * padded,
            scale=self._scale.ctypes.data,
            barrier=self._barrier.address if self.num_threads > 1 else 0,
            scratch=self._scratch.data_ptr(),
            scratch_bytes=4 * self._scratch.stride(0),
            shared_bytes=4 * shared_floats(planes * padded),
            tickets=self._tickets.ctypes.data,
            out_token_bytes=num_heads * self.head_dim * itemsize,
            out_head_bytes=self.head_dim * itemsize,
        )
        self._here = ctypes.addressof(self._arguments)
        self._step: tuple[Any, ...] = ()

    def plan(self, query_start: Int32s, num_computed: Int32s, block_tables: Int32s) -> None:
        query_start = np.array(query_start, np.int32)
        num_computed = np.array(num_computed, np.int32)
        block_tables = np.array(block_tables, np.int32, order="C")
        rows = (query_start, num_computed, block_tables, self.block_size)
        heads = (self.num_kv_heads, self.group)
        nothing, none = np.empty((0, 0), np.int32), np.empty(0, np.int32)
        counts = plan_step(*rows, *heads, nothing, nothing, none, none)
        num_items, num_merges, num_members, num_partials = counts
        items = np.empty((num_items, ITEM_COLUMNS), np.int32)
        merges = np.empty((num_merges, MERGE_COLUMNS), np.int32)
        members = np.empty(num_members, np.int32)
        bases = np.empty(len(num_computed) * self.num_kv_heads, np.int32)
        plan_step(*rows, *heads, items, merges, members, bases)
        tokens = np.empty((2, query_start[-1]), np.int32)
        locate_tokens(*rows[:3], self.block_size, tokens[0], tokens[1])
        a = self._arguments
        partials = np.empty((num_partials, a.width + STATE), np.float32)
        a.query_start, a.num_computed = query_start.ctypes.data, num_computed.ctypes.data
        a.block_tables, a.table_blocks = block_tables.ctypes.data, block_tables.shape[1]
        a.num_tokens = tokens.shape[1]
        a.token_blocks, a.token_slots = tokens[0].ctypes.data, tokens[1].ctypes.data
        a.num_items, a.items = num_items, items.ctypes.data
        a.num_merges, a.merges = num_merges, merges.ctypes.data
        a.members, a.bases = members.ctypes.data, bases.ctypes.data
        a.partials = partials.ctypes.data
        # The kernels know addresses only: this keeps what they point to.
        self._step = (
            query_start,
            num_computed,
            block_tables,
            tokens,
            items,
            merges,
            members,
            bases,
            partials,
        )

    def scores_in_int8(self, num_queries: int, num_keys: int) -> bool:
        large = num_queries * self.group >= LARGE_ITEM_ROWS and num_keys >= LARGE_ITEM_KEYS
        return large and self._element == types.uint8

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        a = self._arguments
        out = torch.empty((q.shape[0], self.num_heads * self.head_dim), dtype=q.dtype)
        a.layer = layer
        a.q, a.q_token_bytes, a.q_head_bytes = self._rows("q", q, self.num_heads)
        a.k, a.k_token_bytes, a.k_head_bytes = self._rows("k", k, self.num_kv_heads)
        a.v, a.v_token_bytes, a.v_head_bytes = self._rows("v", v, self.num_kv_heads)
        a.out = out.data_ptr()
        self._tickets.fill(0)
        self._run(self._here)
        return out

    def program(self, qkv: Tensor, out: Tensor) -> LayerCalls:
        """All layers' calls for a `Program`; qkv [T, all heads, D] and out [T, H * D] stay."""
        a, size = self._arguments, qkv.element_size()
        token, head = qkv.stride(0) * size, qkv.stride(1) * size
        a.q, a.q_token_bytes, a.q_head_bytes = qkv.data_ptr(), token, head
        a.k, a.k_token_bytes, a.k_head_bytes = a.q + self.num_heads * head, token, head
        a.v, a.v_token_bytes, a.v_head_bytes = a.k + self.num_kv_heads * head, token, head
        a.out = out.data_ptr()
        return LayerCalls(self, self._address, a)

    def work_for(self, wanted: Int64s) -> tuple[Int32s, Int32s]:
        """Of the planned step, the items and merges that these tokens need."""
        a = self._arguments
        before = np.zeros(a.num_tokens + 1, np.int64)  # wanted tokens before each
        before[wanted + 1] = 1
        before = before.cumsum()
        query_start, items, merges = self._step[0], self._step[4], self._step[5]

        def needed(work: Int32s) -> Int32s:
            first = query_start[work[:, 0]] + work[:, 2]
            kept: Int32s = work[before[first + work[:, 3]] > before[first]]
            return kept

        shared = items[:, -1] >= 0  # their rows lie anywhere
        return np.concatenate((needed(items[~shared]), items[shared])), needed(merges)

    def _rows(self, name: str, tensor: Tensor, num_heads: int) -> tuple[int, int, int]:
        """Address and strides in bytes of q, k or v; the kernels trust what passes here."""
        num_tokens, dtype = self._arguments.num_tokens, self.dtype
        if tensor.shape != (num_tokens, num_heads, self.head_dim) or tensor.dtype is not dtype:
            raise ValueError(
                f"{name} is {tuple(tensor.shape)} of {tensor.dtype}; planned: "
                f"{(num_tokens, num_heads, self.head_dim)} of {dtype}"
            )
        token, head, element = tensor.stride()
        if element != 1:
            raise ValueError(f"{name} has strides {tensor.stride()}; the last must be 1")
        size = tensor.element_size()
        return tensor.data_ptr(), token * size, head * size


def _runner(function: int, num_threads: int, openmp: ctypes.CDLL | None) -> Callable[[int], object]:
    """How to run the C function at this address on all of torch's threads, given its argument.

    A call takes 6 us (one decode, two threads); through numba's own parallel loops it took 17, and
    20 s to compile in place of 5, and on numba's workqueue, a second pool of threads, 113 us.
    """
    if openmp is None or num_threads == 1:
        return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)
    parallel = openmp.GOMP_parallel
    return lambda argument: parallel(function, argument, num_threads, 0)
