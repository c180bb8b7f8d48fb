"""Attention over the paged KV pool: the interface, its choice, and the plain torch version.

The pool is block-major, `pool[block, layer, 2, kv_head, slot, head_dim]` (0: keys, 1: values).
`plan` is called once a step with the rows of the step, and turns them into indices that all layers
share; the object is then called once a layer. Each call first writes the keys and values of the
step's tokens into the pool, then attends: the query at position p sees positions 0 to p of its own
row, and nothing else is read into a result (stale or undefined memory in other blocks, and
in the unused slots of a row's last block, may hold anything, NaN included).

A pool of int8 has rows of head_dim numbers and, in 4 more, a float32: the scale of the row. What
comes in and goes out is bfloat16 then.

    row i:  tokens query_start[i] .. query_start[i+1]-1  of q, k and v
            at positions num_computed[i], num_computed[i]+1, ...
            position p lives in block block_tables[i, p // block_size], slot p % block_size

Letters in shapes: T tokens of the step, R rows, H heads, G query heads per KV head, D head_dim,
L context length, B blocks.
"""

import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from twostroke.errors import ConfigError
from twostroke.kv_messages import SCALE_BYTES
from twostroke.messages import Int32s

# Decode rows are attended in batches of similar length. A batch gathers a copy of its keys and
# values, padded to the longest, of at most this many positions (64 MiB of bf16 for 1,024 values).
MAX_GATHERED_TOKENS = 1 << 15


class PagedAttention(ABC):
    """Writes the step's keys and values, and attends causally over each row's context."""

    kind = "torch"  # in words

    def __init__(self, pool: Tensor, num_heads: int, scale: float) -> None:
        if pool.dim() != 6 or pool.shape[2] != 2 or not pool.is_contiguous():
            raise ValueError(
                f"pool has shape {tuple(pool.shape)}; it must be contiguous "
                "[block, layer, 2, kv_head, slot, head_dim]"
            )
        if num_heads % pool.shape[3]:
            raise ValueError(f"{num_heads} heads do not divide over {pool.shape[3]} KV heads")
        self.pool = pool
        self.num_heads = num_heads
        self.num_kv_heads = pool.shape[3]
        self.group = num_heads // self.num_kv_heads
        self.block_size = pool.shape[4]
        # Of what comes in and goes out.
        self.dtype = torch.bfloat16 if pool.dtype == torch.int8 else pool.dtype
        self.head_dim = pool.shape[5] - (SCALE_BYTES["int8"] if pool.dtype == torch.int8 else 0)
        self.scale = scale

    @abstractmethod
    def plan(self, query_start: Int32s, num_computed: Int32s, block_tables: Int32s) -> None:
        """Prepare a step: `query_start` [R+1], `num_computed` [R], `block_tables` [R, any].

        Entries of a block table beyond the row's context are ignored. Rows may be empty. The
        arrays are read here only; they may be reused once this returns.
        """

    @abstractmethod
    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """One layer: `q` [T, H, D], `k` and `v` [T, kv heads, D], rotated, of `dtype`.

        Returns [T, H*D], of the same dtype.
        """

    def scores_in_int8(self, num_queries: int, num_keys: int) -> bool:
        """Whether a row of so many queries multiplies most of them with keys in 8 bits."""
        del num_queries, num_keys
        return False


NO_INT8_HINT = "leave --kv-cache-dtype at auto"


def why_no_int8(device: torch.device, dtype: torch.dtype, head_dim: int = 2) -> str:
    """Why keys and values of `dtype` cannot be kept in int8; empty if they can."""
    if device.type != "cpu" or dtype != torch.bfloat16:
        name = str(dtype).removeprefix("torch.")
        why = f"the model runs in {name} on {device.type}; it goes with bfloat16 on a CPU"
    else:
        try:
            from twostroke.worker.attention_numba import why_no_int8 as of_kernels
        except ImportError as error:
            why = f"numba cannot be imported: {error}"
        else:
            why = of_kernels(head_dim)
    return why


def make_attention(
    pool: Tensor, num_heads: int, scale: float, *, int8_scores: bool = False
) -> PagedAttention:
    """The best attention for the pool's device: compiled kernels on a CPU, torch elsewhere.

    With `int8_scores`, kernels that can multiply the queries of prompts with keys in 8 bits do.

    The first use of an element type compiles for some seconds; the result is kept in the user's
    cache directory. Where numba cannot be imported, torch it is. Raises ConfigError for a pool of
    int8 where that does not work.
    """
    if pool.dtype == torch.int8 and (why := why_no_int8(pool.device, torch.bfloat16)):
        raise ConfigError(f"the KV pool is of int8, but {why}", hint=NO_INT8_HINT)
    if pool.device.type == "cpu":
        try:
            from twostroke.worker.attention_numba import NumbaAttention
        except ImportError as error:
            logging.getLogger(__name__).warning("attention runs on plain torch: %s", error)
        else:
            return NumbaAttention(pool, num_heads, scale, int8_scores=int8_scores)
    return TorchAttention(pool, num_heads, scale)


@dataclass(frozen=True)
class _DecodeBatch:
    """Rows with one query each, their contexts padded to L = a whole number of blocks."""

    tokens: Tensor  # [R] index into the step's tokens
    blocks: Tensor  # [R, L / block_size]
    visible: Tensor  # [R, 1, L, 1] bool


@dataclass(frozen=True)
class _PrefillRow:
    """One row with several queries."""

    start: int
    end: int
    context: int
    blocks: Tensor  # [blocks of the context]
    mask: Tensor | None  # [queries, context] bool; None: no prefix, plain causal


class TorchAttention(PagedAttention):
    """Plain torch on any device: the reference, and what a GPU runs.

    After `plan`, nothing here waits for the device. It copies the contexts that it reads.
    """

    def __init__(self, pool: Tensor, num_heads: int, scale: float) -> None:
        super().__init__(pool, num_heads, scale)
        if pool.dtype == torch.int8:
            raise ValueError("plain torch does not read a pool of int8")

    def plan(self, query_start: Int32s, num_computed: Int32s, block_tables: Int32s) -> None:
        counts = np.diff(query_start)
        contexts = np.where(counts > 0, num_computed + counts, 0)
        row_of_token = np.repeat(np.arange(len(counts)), counts)
        positions = np.arange(query_start[-1]) - np.repeat(query_start[:-1] - num_computed, counts)
        self._block_of_token = self._to_device(
            block_tables[row_of_token, positions // self.block_size]
        )
        self._slot_of_token = self._to_device(positions % self.block_size)
        self._decodes = self._decode_batches(query_start, counts, contexts, block_tables)
        self._prefills = [
            self._prefill_row(query_start[i], query_start[i + 1], contexts[i], block_tables[i])
            for i in np.flatnonzero(counts > 1)
        ]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cache = self.pool[:, layer]
        cache[:, 0][self._block_of_token, :, self._slot_of_token] = k
        cache[:, 1][self._block_of_token, :, self._slot_of_token] = v
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for batch in self._decodes:
            out[batch.tokens] = self._decode(cache, q[batch.tokens], batch)
        for row in self._prefills:
            out[row.start : row.end] = self._prefill(cache, q[row.start : row.end], row)
        return out.flatten(1)

    def _decode(self, cache: Tensor, q: Tensor, batch: _DecodeBatch) -> Tensor:
        """q [R, H, D]. The G heads of a KV head attend as if they were G queries of one head."""
        num_rows = q.shape[0]
        gathered = cache[batch.blocks]  # [R, B, 2, kv heads, slot, D]
        keys, values = gathered.permute(2, 0, 3, 1, 4, 5).flatten(3, 4)  # [R, kv heads, L, D] each
        # Undefined values would pass through a weight of zero: 0 * NaN is NaN.
        attended = F.scaled_dot_product_attention(
            q.view(num_rows, self.num_kv_heads, self.group, self.head_dim),
            keys.masked_fill(~batch.visible, 0),
            values.masked_fill(~batch.visible, 0),
            attn_mask=batch.visible.transpose(2, 3),
            scale=self.scale,
        )
        return attended.reshape(num_rows, self.num_heads, self.head_dim)

    def _prefill(self, cache: Tensor, q: Tensor, row: _PrefillRow) -> Tensor:
        """q [queries, H, D]."""
        gathered = cache[row.blocks].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, : row.context]
        keys, values = gathered.repeat_interleave(self.group, dim=1)  # [H, L, D] each
        attended = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            keys[None],
            values[None],
            attn_mask=row.mask,
            is_causal=row.mask is None,
            scale=self.scale,
        )
        return attended[0].transpose(0, 1)

    def _decode_batches(
        self, query_start: Int32s, counts: Int32s, contexts: Int32s, block_tables: Int32s
    ) -> list[_DecodeBatch]:
        rows = np.flatnonzero(counts == 1)
        rows = rows[np.argsort(contexts[rows], kind="stable")[::-1]]
        batches = []
        while len(rows):
            num_blocks = -(-int(contexts[rows[0]]) // self.block_size)
            padded = num_blocks * self.block_size
            limit = max(1, MAX_GATHERED_TOKENS // padded)
            # Longest first; padding never more than doubles what a row reads.
            batch = rows[:limit][contexts[rows[:limit]] * 2 >= contexts[rows[0]]]
            rows = rows[len(batch) :]
            lengths = contexts[batch]
            blocks = block_tables[batch, :num_blocks]
            used = np.arange(num_blocks) * self.block_size < lengths[:, None]
            positions = torch.arange(padded, device=self.pool.device)
            visible = positions < self._to_device(lengths)[:, None]
            batches.append(
                _DecodeBatch(
                    tokens=self._to_device(query_start[batch]),
                    blocks=self._to_device(np.where(used, blocks, 0)),
                    visible=visible[:, None, :, None],
                )
            )
        return batches

    def _prefill_row(self, start: int, end: int, context: int, table: Int32s) -> _PrefillRow:
        num_queries, num_blocks = int(end - start), -(-int(context) // self.block_size)
        mask = None
        if num_queries < context:
            columns = torch.arange(int(context), device=self.pool.device)
            mask = columns <= columns[int(context) - num_queries :, None]
        blocks = self._to_device(table[:num_blocks])
        return _PrefillRow(int(start), int(end), int(context), blocks, mask)

    def _to_device(self, values: Int32s) -> Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(self.pool.device)
