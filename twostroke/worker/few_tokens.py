"""A step of few tokens as one call: every layer's kernels in a `Program`.

    embed ▶ [ norm ▶ qkv ▶ rotate ▶ attend ▶ output ▶ residual sum, norm ▶ gate, up ▶ SiLU ▶ down
            ▶ residual sum ] x layers ▶ norm ▶ LM head ▶ the most likely token

The last two run where every token of the step is sampled from, as in a step of decodes.

With weights in bfloat16 the kernels are those that `DecoderModel.forward` calls one by one, so a
token's result is the same to the last bit; what is saved is the way to them (some 3 ms of a step of
SmolLM2 on two cores).

Weights that are kept in 4 or 8 bits have a program of their own, for very few tokens, whose
products take and give more than bfloat16 holds: what is between them stays in float32, and products
add to the residual sum themselves.
"""

import time
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from twostroke.arrays import Int32s, Int64s
from twostroke.model import tile_ir
from twostroke.model.elementwise import LEVELS_BYTES, float_bits, kernels
from twostroke.model.few_rows import MAX_ROWS
from twostroke.model.few_rows_quantised import MAX_QUANTISED_ROWS
from twostroke.model.int8_rows import row_bytes
from twostroke.model.layers import Linear, Mlp
from twostroke.model.llama import DecoderModel
from twostroke.model.quantised import GROUP
from twostroke.model.thread_count import ThreadCounts
from twostroke.model.tile_ir import ADDED, ROUNDED, WIDE
from twostroke.worker.attention import PagedAttention

if TYPE_CHECKING:
    from twostroke.worker.attention_numba import NumbaAttention

_FIRST_ROTATIONS = 2048  # positions whose rotations are computed at once
_ROTATIONS = 0  # of the small kernels' arguments, those of looking rotations up
_TRIED_TOKENS = 16  # up to here, one thread may be faster than all
_SHARED_TOKENS = 4  # from here on, what is between the products is shared by the threads


def few_tokens(model: DecoderModel, attention: PagedAttention) -> "FewTokens | None":
    """The fast way for steps of few tokens, or None where some kernel is missing."""
    if kernels() is None or model.shard.size > 1 or not model.embedding.is_contiguous():
        return None
    from twostroke.worker.attention_numba import NumbaAttention  # here, because numba is there

    if not isinstance(attention, NumbaAttention):
        return None
    linears = [
        linear
        for layer in model.layers
        if isinstance(layer.mlp, Mlp)
        for linear in (layer.qkv, layer.output, layer.mlp.gate_up, layer.mlp.down)
    ]
    if len(linears) < 4 * len(model.layers):
        return None
    whole = all(linear.few_rows is not None or linear.int8 is not None for linear in linears)
    few_bits = any(linear.quantised is not None for linear in linears)
    if not whole and any(linear.quantised is None for linear in linears):
        return None
    programs = [(MAX_ROWS, not whole)]
    if whole and (few_bits or model.lm_head.quantised is not None):
        programs.insert(0, (MAX_QUANTISED_ROWS, few_bits))
    return FewTokens(model, attention, programs)


class StepOutput(NamedTuple):
    """Of a step of `num_tokens` tokens, in rows of tensors that may have more."""

    num_tokens: int
    hidden_rows: Tensor
    logit_rows: Tensor | None = None
    best: Int32s | None = None  # each one's most likely next token, or -1: its logit is no number

    @property
    def hidden(self) -> Tensor:
        """[T, hidden]"""
        return self.hidden_rows[: self.num_tokens]

    @property
    def logits(self) -> Tensor | None:
        """Those of `DecoderModel.logits`: [T, vocab] float32."""
        return None if self.logit_rows is None else self.logit_rows[: self.num_tokens]


class FewTokens:
    """Runs steps of at most `max_tokens` tokens. Made by `few_tokens`."""

    max_tokens = MAX_ROWS

    def __init__(
        self, model: DecoderModel, attention: "NumbaAttention", programs: list[tuple[int, bool]]
    ) -> None:
        """`programs`: for up to how many tokens, and whether with weights of few bits; the first
        that is large enough runs."""
        # Where there is one, each step adds to it.
        self.seconds_by_kind: defaultdict[str, float] | None = None
        self._model = model
        self._buffers = _Buffers(model)
        self._rotations = torch.empty(0)
        self._attention = attention.program(self._buffers.qkv, self._buffers.attended)
        self._programs = [
            (most, _Table(model, self._buffers, self._attention.calls, few_bits, most))
            for most, few_bits in programs
        ]
        self._trials = ThreadCounts(_TRIED_TOKENS)
        self._know_rotations(1)

    def forward(
        self, token_ids: Int64s, positions: Int64s, *, with_logits: bool = False
    ) -> StepOutput:
        """token_ids and positions [T] -> hidden states [T, hidden], as `DecoderModel.forward`.

        `with_logits` asks for logits too, which are given where the LM head has a kernel. The
        attention must have planned the step. What is returned is overwritten by the next step.
        """
        count, buffers = len(token_ids), self._buffers
        buffers.token_ids[:count], buffers.positions[:count] = token_ids, positions
        self._know_rotations(int(positions.max()) + 1)
        self._attention.begin()
        table = self._table(count)
        with_logits &= table.has_logits
        num_threads = table.program.num_threads
        trial = self._trials.of(count) if with_logits else None
        if trial is not None:
            num_threads = trial.choose(num_threads)
        table.begin(count, num_threads)
        start_s = time.perf_counter()
        self._run(table, num_threads, with_logits)
        if trial is not None:
            trial.add(time.perf_counter() - start_s)
        if not with_logits:
            return StepOutput(count, buffers.x)
        return StepOutput(count, buffers.x, buffers.logits, buffers.best[:count])

    def _run(self, table: "_Table", num_threads: int, with_logits: bool) -> None:
        num_calls = len(table.kinds) if with_logits else table.num_calls_to_hidden
        if self.seconds_by_kind is None:
            table.program.run(num_threads, num_calls)
            return
        times = table.program.run_timed(num_threads, num_calls).tolist()
        for kind, seconds in zip(table.kinds, times, strict=False):
            self.seconds_by_kind[kind] += seconds

    def _know_rotations(self, num_positions: int) -> None:
        """Those of `Rotary`, kept: computing a few anew takes six operations of torch."""
        if num_positions > len(self._rotations):
            every = torch.arange(max(2 * num_positions, _FIRST_ROTATIONS))
            self._rotations = self._model.rotary.rotations(every).contiguous()
            for _, table in self._programs:
                table.look_up_in(self._rotations)

    def calls_by_kind(self, num_tokens: int, *, with_logits: bool) -> Counter[str]:
        """How many kernels of each kind a step of that many tokens runs."""
        table = self._table(num_tokens)
        return Counter(table.kinds if with_logits else table.kinds[: table.num_calls_to_hidden])

    def _table(self, num_tokens: int) -> "_Table":
        return next(table for most, table in self._programs if num_tokens <= most)


class _Buffers:
    """What kernels hand to each other, for MAX_ROWS tokens."""

    def __init__(self, model: DecoderModel) -> None:
        shape, shard = model.shape, model.shard
        widest = max(
            _width(layer.mlp.gate_up) // 2 for layer in model.layers if isinstance(layer.mlp, Mlp)
        )

        def buffer(*dims: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return torch.zeros((MAX_ROWS, *dims), dtype=dtype)

        attended = shard.num_heads * shape.head_dim
        # What steps are given, and what comes of them.
        self.token_ids, self.positions, self.best = np.zeros((3, MAX_ROWS), np.int32)
        self.logits = buffer(shape.vocab_size, dtype=torch.float32)
        self.h = buffer(shape.hidden_size, dtype=torch.float32)
        self.x, self.y = buffer(shape.hidden_size), buffer(shape.hidden_size)
        self.qkv = buffer(shard.num_heads + 2 * shard.num_kv_heads, shape.head_dim)
        self.attended = buffer(attended)
        self.gate_up, self.act = buffer(2 * widest), buffer(widest)
        self.rotations = buffer(2, shape.head_dim // 2, dtype=torch.float32)
        # For weights of few bits: what products are given, in float32 and as levels.
        largest = max(shape.hidden_size, widest, attended)
        self.gate_up_wide = buffer(2 * widest, dtype=torch.float32)
        self.wide = buffer(largest, dtype=torch.float32)
        levels_bytes = max(-(-largest // GROUP) * LEVELS_BYTES, row_bytes(largest))
        self.levels = buffer(levels_bytes, dtype=torch.uint8)


class _Table:
    """A `Program`, and its kernels' arguments."""

    def __init__(
        self,
        model: DecoderModel,
        buffers: _Buffers,
        attention: list[tuple[int, int]],
        few_bits: bool,
        max_tokens: int,
    ) -> None:
        from twostroke.model.elementwise_kernels import NUM_ARGUMENTS
        from twostroke.model.program import Program
        from twostroke.model.step_ends import address

        kernel = kernels()
        assert kernel is not None
        self._kernel, self._address = kernel, address
        self._model, self._buffers = model, buffers
        self._few_bits = few_bits
        num_layers = len(model.layers)
        self._products = np.zeros((4 * num_layers + 1, tile_ir.NUM_ARGUMENTS), np.int64)
        self._small = np.zeros((9 * num_layers + 5, NUM_ARGUMENTS), np.int64)
        self._num_products = self._num_small = 0
        self._begun = 0, 0  # tokens and threads of the last run
        self._calls: list[tuple[int, int]] = []
        self.kinds: list[str] = []
        self._are_small: list[bool] = []
        self._list_layers(attention)
        self.num_calls_to_hidden = len(self.kinds)
        # The LM head's form is the one that `Linear` takes for as many rows.
        head = model.lm_head
        self._few_bits = max_tokens <= MAX_QUANTISED_ROWS or head.few_rows is None
        self.has_logits = head.int8 is None and (head.few_rows or head.quantised) is not None
        if self.has_logits:
            self._list_head()
        self.program = Program(self._calls)
        self._small_calls = np.array(self._are_small)

    def begin(self, num_tokens: int, num_threads: int) -> None:
        """To be called before each run."""
        self._products[:, tile_ir.TICKET] = 0
        if (num_tokens, num_threads) == self._begun:
            return
        self._begun = num_tokens, num_threads
        self._products[:, tile_ir.ROWS] = num_tokens
        shared = num_tokens >= _SHARED_TOKENS and num_threads > 1
        self._small[:, :3] = self._kernel.first(num_tokens, num_threads if shared else 1)
        self.program.share(self._small_calls, shared)

    def look_up_in(self, rotations: Tensor) -> None:
        """A table of each position's rotations."""
        self._small[_ROTATIONS, 3] = rotations.data_ptr()

    def _list_layers(self, attention: list[tuple[int, int]]) -> None:
        model, buffers = self._model, self._buffers
        shape, shard, kernel = model.shape, model.shard, self._kernel
        eps = float_bits(shape.rms_norm_eps)
        h, x, y = buffers.h.data_ptr(), buffers.x.data_ptr(), buffers.y.data_ptr()
        qkv, attended = buffers.qkv.data_ptr(), buffers.attended.data_ptr()
        self._look_up()
        rotations, rotated = buffers.rotations.data_ptr(), shard.num_heads + shard.num_kv_heads
        heads, hidden, added = rotated + shard.num_kv_heads, shape.hidden_size, 0
        summed = (h, ADDED) if self._few_bits else (y, ROUNDED)
        for layer, attend in zip(model.layers, attention, strict=True):
            mlp = layer.mlp
            assert isinstance(mlp, Mlp)
            norm = 0 if layer.qk_norm is None else layer.qk_norm.data_ptr()
            self._norm(layer.qkv, layer.input_norm, added)
            self._multiply("qkv", layer.qkv, x, qkv, ROUNDED)
            turn = (qkv, rotations, norm, rotated, heads, shape.head_dim, eps)
            self._add("rotate", kernel.rotate, *turn)
            self._call("attention", attend)
            if self._takes_levels(layer.output):
                groups, wide = shard.num_heads * shape.head_dim // GROUP, buffers.wide.data_ptr()
                levels = buffers.levels.data_ptr()
                self._add("levels", kernel.levels, attended, levels, groups, wide)
            self._multiply("output", layer.output, attended, *summed)
            added = 0 if self._few_bits else y
            self._norm(mlp.gate_up, layer.mlp_norm, added)
            self._mlp(mlp, *summed)
        self._add("norm", kernel.add_norm, h, added, model.final_norm.data_ptr(), x, hidden, eps)

    def _look_up(self) -> None:
        """The tokens' embeddings, and their positions' rotations in a table yet to be told."""
        buffers, width = self._buffers, self._model.shape.hidden_size
        positions, rotations = buffers.positions.ctypes.data, buffers.rotations
        assert self._num_small == _ROTATIONS
        size = rotations[0].numel()
        self._add("embed", self._address("look_up"), 0, positions, rotations.data_ptr(), size)
        table, token_ids = self._model.embedding.data_ptr(), buffers.token_ids.ctypes.data
        self._add("embed", self._address("embed"), table, token_ids, buffers.h.data_ptr(), width)

    def _list_head(self) -> None:
        """From the hidden states to logits, and to the most likely token of each."""
        buffers, head, shape = self._buffers, self._model.lm_head, self._model.shape
        x, logits = buffers.x.data_ptr(), buffers.logits.data_ptr()
        if self._takes_levels(head):
            groups, wide = shape.hidden_size // GROUP, buffers.wide.data_ptr()
            levels = buffers.levels.data_ptr()
            self._add("levels", self._kernel.levels, x, levels, groups, wide)
        self._multiply("lm head", head, x, logits, WIDE)
        self._add("best", self._address("best"), logits, buffers.best.ctypes.data, shape.vocab_size)

    def _norm(self, linear: Linear, weight: Tensor, added: int) -> None:
        """The residual sum's norm, as the linear layer takes it."""
        shape, buffers, kernel = self._model.shape, self._buffers, self._kernel
        h, x = buffers.h.data_ptr(), buffers.x.data_ptr()
        last = (shape.hidden_size, float_bits(shape.rms_norm_eps))
        if self._takes_levels(linear):
            wide, levels = buffers.wide.data_ptr(), buffers.levels.data_ptr()
            self._add("norm", kernel.norm_levels, h, weight.data_ptr(), wide, levels, *last)
        else:
            self._add("norm", kernel.add_norm, h, added, weight.data_ptr(), x, *last)

    def _mlp(self, mlp: Mlp, y: int, result: int) -> None:
        buffers, kernel, x = self._buffers, self._kernel, self._buffers.x.data_ptr()
        width, act = _width(mlp.gate_up) // 2, buffers.act.data_ptr()
        if self._takes_levels(mlp.down):
            gate_up = buffers.gate_up_wide.data_ptr()
            wide, levels = buffers.wide.data_ptr(), buffers.levels.data_ptr()
            self._multiply("gate, up", mlp.gate_up, x, gate_up, WIDE)
            self._add("SiLU", kernel.silu_levels, gate_up, wide, levels, width)
        else:
            gate_up = buffers.gate_up.data_ptr()
            self._multiply("gate, up", mlp.gate_up, x, gate_up, ROUNDED)
            self._add("SiLU", kernel.silu_multiply, gate_up, act, width)
        self._multiply("down", mlp.down, act, y, result)

    def _takes_levels(self, linear: Linear) -> bool:
        return self._few_bits and linear.quantised is not None

    def _call(self, kind: str, call: tuple[int, int], *, is_small: bool = False) -> None:
        self.kinds.append(kind)
        self._calls.append(call)
        self._are_small.append(is_small)

    def _add(self, kind: str, address: int, *arguments: int) -> None:
        """One of the small kernels."""
        row = self._small[self._num_small]
        self._num_small += 1
        row[3 : 3 + len(arguments)] = arguments
        self._call(kind, (address, row.ctypes.data), is_small=True)

    def _multiply(self, kind: str, linear: Linear, x: int, y: int, result: int) -> None:
        """A product, with the form of the weight that this program takes; x in that form's."""
        row = self._products[self._num_products]
        self._num_products += 1
        levels = self._buffers.levels.data_ptr()
        if linear.int8 is not None:
            self._add("to int8", self._kernel.turned_bytes, x, levels, linear.int8.width)
            self._call(kind, linear.int8.call(levels, y, row, result))
        elif self._few_bits and linear.quantised is not None:
            self._call(kind, linear.quantised.call(levels, y, row, result))
        else:
            assert linear.few_rows is not None
            self._call(kind, linear.few_rows.call(x, y, row, result))


def _width(linear: Linear) -> int:
    """Outputs of a linear layer that has one of the kernels."""
    kernel = linear.int8 or linear.quantised or linear.few_rows
    assert kernel is not None
    return kernel.out
