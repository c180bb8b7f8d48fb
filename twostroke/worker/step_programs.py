"""Steps of few tokens as a program, and what kernels hand to each other in steps of any size.

A product of few rows is bound by reading its weight, so threads share the weight, kernel by kernel.
For more, see `many_rows`.
"""

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from twostroke.arrays import Int32s
from twostroke.model import tile_ir
from twostroke.model.elementwise import LEVELS_BYTES, Kernels
from twostroke.model.int8_rows import row_bytes
from twostroke.model.layers import Mlp
from twostroke.model.llama import DecoderModel
from twostroke.model.quantised import GROUP
from twostroke.worker.step_calls import ROTATIONS, Place, Places, StepCalls, outputs

if TYPE_CHECKING:
    from twostroke.worker.attention_numba import NumbaAttention


class Buffers:
    """What kernels hand to each other, for up to `capacity` tokens.

    `own_rows` says how many rows each of `num_threads` threads has for itself, where not all of a
    step's rows are kept. A large buffer takes memory only as far as it has been written.
    """

    def __init__(
        self, model: DecoderModel, capacity: int, own_rows: int = 0, num_threads: int = 1
    ) -> None:
        shape, shard = model.shape, model.shard
        widest = max(
            outputs(layer.mlp.gate_up) // 2 for layer in model.layers if isinstance(layer.mlp, Mlp)
        )
        attended = shard.num_heads * shape.head_dim
        largest = max(shape.hidden_size, widest, attended)
        integers = max(-(-largest // GROUP) * LEVELS_BYTES, row_bytes(largest))
        self._keep: list[Tensor] = []
        self._own_rows, self._num_threads, self.capacity = own_rows, num_threads, capacity
        self.token_ids, self.positions, self.best = np.zeros((3, capacity), np.int32)
        self.h = self._rows(shape.hidden_size, dtype=torch.float32)
        self.hidden = self._rows(shape.hidden_size)
        self.qkv = self._rows(shard.num_heads + 2 * shard.num_kv_heads, shape.head_dim)
        self.attended = self._rows(attended)
        few = capacity if own_rows == 0 else 0  # rows of what only steps of few tokens need
        self.logits = torch.empty((few, shape.vocab_size), dtype=torch.float32)
        self.places = Places(
            token_ids=self._place(self.token_ids),
            positions=self._place(self.positions),
            best=self._place(self.best),
            rotations=self._place(self._rows(shape.head_dim, dtype=torch.float32)),
            h=self._place(self.h),
            hidden=self._place(self.hidden),
            qkv=self._place(self.qkv),
            attended=self._place(self.attended),
            x=self._own(2 * shape.hidden_size),
            y=self._own(2 * shape.hidden_size),
            gate_up=self._own(4 * 2 * widest),
            act=self._own(2 * widest),
            integers=self._own(integers),
            wide=self._own(4 * largest),
            logits=self._place(self.logits),
        )

    def _rows(self, *dims: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        rows = torch.empty((self.capacity, *dims), dtype=dtype)
        self._keep.append(rows)
        return rows

    @staticmethod
    def _place(rows: Tensor | Int32s) -> Place:
        if isinstance(rows, Tensor):
            return Place(rows.data_ptr(), rows.stride(0) * rows.element_size())
        return Place(rows.ctypes.data, rows.itemsize)

    def _own(self, num_bytes: int) -> Place:
        """Rows of so many bytes, of a thread or of the step."""
        threads, rows = (
            (self._num_threads, self._own_rows) if self._own_rows else (1, self.capacity)
        )
        buffer = torch.empty((threads, rows, num_bytes), dtype=torch.uint8)
        self._keep.append(buffer)
        return Place(buffer.data_ptr(), 0, rows * num_bytes)


class FewRowsProgram:
    """Steps of up to `max_tokens` tokens, all threads on each product.

    What is between the products of a single token is too short to be shared: one thread does it.
    """

    def __init__(
        self,
        model: DecoderModel,
        attention: "NumbaAttention",
        kernels: Kernels,
        buffers: Buffers,
        max_tokens: int,
        *,
        few_bits: bool,
    ) -> None:
        """`few_bits`: with those weights that are kept in few bits."""
        from twostroke.model.elementwise_kernels import NUM_ARGUMENTS
        from twostroke.model.program import Program

        self.max_tokens = max_tokens
        self._kernels = kernels
        self._attention = attention.program(buffers.qkv, buffers.attended)
        parts = StepCalls(model, buffers.places, kernels, few_bits=few_bits).layers()
        # The LM head's form is the one that `Linear` takes for as many rows.
        head = model.lm_head
        few_bits = head.takes_few_bits(max_tokens)
        self.has_logits = head.int8 is None and (few_bits or head.few_rows is not None)
        if self.has_logits:
            ends = StepCalls(model, buffers.places, kernels, few_bits=few_bits).head()
            parts.append(ends)
        listed = [call for part in parts for call in part]
        num_products = sum(call.is_product for call in listed)
        self._products = np.zeros((num_products, tile_ir.NUM_ARGUMENTS), np.int64)
        self._small = np.zeros((len(listed) - num_products, NUM_ARGUMENTS), np.int64)
        product_rows, small_rows = iter(self._products), iter(self._small)
        calls: list[tuple[int, int]] = []
        self._kinds: list[str] = []
        are_small: list[bool] = []
        attends = iter(self._attention.calls)
        for part in parts:
            for call in part:
                row = next(product_rows if call.is_product else small_rows)
                row[: len(call.words)] = [
                    word.address if isinstance(word, Place) else word for word in call.words
                ]
                calls.append((call.address, row.ctypes.data))
                self._kinds.append(call.kind)
                are_small.append(not call.is_product)
            if (attend := next(attends, None)) is not None:
                calls.append(attend)
                self._kinds.append("attention")
                are_small.append(False)
        self._num_to_hidden = len(calls) - (len(parts[-1]) if self.has_logits else 0)
        self._program = Program(calls, attention.num_threads)
        self._are_small = np.array(are_small)
        self._begun = 0, 0  # tokens and threads of the last run

    @property
    def num_threads(self) -> int:
        """At most."""
        return self._program.num_threads

    def look_up_in(self, rotations: Tensor) -> None:
        """A table of each position's rotations."""
        call, word = ROTATIONS
        self._small[call, word] = rotations.data_ptr()

    def kinds(self, *, with_logits: bool) -> Counter[str]:
        """How many kernels of each kind a step runs."""
        return Counter(self._kinds[: self._num_calls(with_logits)])

    def run(
        self,
        num_tokens: int,
        num_threads: int,
        seconds_by_kind: defaultdict[str, float] | None,
        *,
        with_logits: bool,
    ) -> None:
        """A step that the attention has planned; adds to `seconds_by_kind` where there is one."""
        self._attention.begin(None)
        self._begin(num_tokens, num_threads)
        num_calls = self._num_calls(with_logits)
        if seconds_by_kind is None:
            self._program.run(num_threads, num_calls)
            return
        times = self._program.run_timed(num_threads, num_calls).tolist()
        for kind, seconds in zip(self._kinds, times, strict=False):
            seconds_by_kind[kind] += seconds

    def _num_calls(self, with_logits: bool) -> int:
        return len(self._kinds) if with_logits else self._num_to_hidden

    def _begin(self, num_tokens: int, num_threads: int) -> None:
        self._products[:, tile_ir.TICKET] = 0
        if (num_tokens, num_threads) == self._begun:
            return
        self._begun = num_tokens, num_threads
        self._products[:, tile_ir.ROWS] = num_tokens
        shared = num_tokens > 1 and num_threads > 1
        self._small[:, :3] = self._kernels.first(num_tokens, num_threads if shared else 1)
        self._program.share(self._are_small, shared)
