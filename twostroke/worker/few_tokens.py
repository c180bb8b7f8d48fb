"""A step of few tokens as one call: every layer's kernels in a `Program`.

    residual sum + norm ▶ qkv ▶ rotate ▶ attend ▶ output ▶ residual sum + norm ▶ gate, up ▶ SiLU ▶ down

The kernels are those that `DecoderModel.forward` calls one by one, so a token's result is the same
to the last bit; what is saved is the way to them (some 3 ms of a step of SmolLM2 on two cores).

Weights that are kept in 4 or 8 bits have a program of their own, for very few tokens.
"""  # noqa: E501

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from twostroke.model import tile_ir
from twostroke.model.elementwise import float_bits, kernels
from twostroke.model.few_rows import MAX_ROWS
from twostroke.model.few_rows_quantised import MAX_QUANTISED_ROWS
from twostroke.model.layers import Linear, Mlp
from twostroke.model.llama import DecoderModel
from twostroke.model.quantised import GROUP
from twostroke.worker.attention import PagedAttention

if TYPE_CHECKING:
    from twostroke.model.program import Program
    from twostroke.worker.attention_numba import NumbaAttention


def few_tokens(model: DecoderModel, attention: PagedAttention) -> "FewTokens | None":
    """The fast way for steps of few tokens, or None where some kernel is missing."""
    if kernels() is None or model.shard.size > 1:
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
    whole = all(linear.few_rows is not None for linear in linears)
    few_bits = any(linear.quantised is not None for linear in linears)
    if not whole and any(linear.quantised is None for linear in linears):
        return None
    most = [(MAX_QUANTISED_ROWS if whole else MAX_ROWS, True)] if few_bits else []
    return FewTokens(model, attention, [*most, (MAX_ROWS, False)] if whole else most)


class FewTokens:
    """Runs steps of at most `max_tokens` tokens. Made by `few_tokens`."""

    max_tokens = MAX_ROWS

    def __init__(
        self, model: DecoderModel, attention: "NumbaAttention", programs: list[tuple[int, bool]]
    ) -> None:
        """`programs`: for up to how many tokens, and whether with weights of few bits; the first
        that is large enough runs."""
        self._model = model
        self._buffers = _Buffers(model)
        self._attention = attention.program(self._buffers.qkv, self._buffers.attended)
        self._programs = [
            (most, _Table(model, self._buffers, self._attention.calls, few_bits))
            for most, few_bits in programs
        ]

    def forward(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """token_ids and positions [T] -> hidden states [T, hidden], as `DecoderModel.forward`.

        The attention must have planned the step. The result is overwritten by the next step.
        """
        count, buffers = len(token_ids), self._buffers
        buffers.h[:count] = self._model.embed(token_ids)
        buffers.rotations[:count] = self._model.rotary.rotations(positions)
        self._attention.begin()
        next(table for most, table in self._programs if count <= most).run(count)
        return buffers.x[:count]

    def programs_by_kind(self, num_tokens: int) -> dict[str, tuple[int, Callable[[], None]]]:
        """The kernels of a step of that many tokens, kind by kind: their number, and their run.

        To find out what takes how long; what they compute is of no use. A step must have been run.
        """
        from twostroke.model.program import Program

        table = next(table for most, table in self._programs if num_tokens <= most)
        return {
            kind: (len(calls), self._run_alone(table, Program(calls), num_tokens))
            for kind, calls in table.calls_by_kind.items()
        }

    def _run_alone(self, table: "_Table", program: "Program", count: int) -> Callable[[], None]:
        def run() -> None:
            self._attention.begin()
            table.begin(count)
            program.run()

        return run


class _Buffers:
    """What kernels hand to each other, for MAX_ROWS tokens."""

    def __init__(self, model: DecoderModel) -> None:
        shape, shard = model.shape, model.shard
        widest = max(
            _width(layer.mlp.gate_up) // 2 for layer in model.layers if isinstance(layer.mlp, Mlp)
        )

        def buffer(*dims: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return torch.zeros((MAX_ROWS, *dims), dtype=dtype)

        self.h = buffer(shape.hidden_size, dtype=torch.float32)
        self.x, self.y = buffer(shape.hidden_size), buffer(shape.hidden_size)
        self.qkv = buffer(shard.num_heads + 2 * shard.num_kv_heads, shape.head_dim)
        self.attended = buffer(shard.num_heads * shape.head_dim)
        self.gate_up, self.act = buffer(2 * widest), buffer(widest)
        self.rotations = buffer(2, shape.head_dim // 2, dtype=torch.float32)
        largest = max(shape.hidden_size, widest, shard.num_heads * shape.head_dim)
        self.sums = buffer(-(-largest // GROUP), dtype=torch.float32)


class _Table:
    """A `Program`, and its kernels' arguments."""

    def __init__(
        self,
        model: DecoderModel,
        buffers: _Buffers,
        attention: list[tuple[int, int]],
        few_bits: bool,
    ) -> None:
        from twostroke.model.elementwise_kernels import NUM_ARGUMENTS
        from twostroke.model.program import Program

        kernel = kernels()
        assert kernel is not None
        self._kernel = kernel
        self._few_bits = few_bits
        self._sums = buffers.sums.data_ptr()
        self._threads = torch.get_num_threads()
        num_layers = len(model.layers)
        self._products = np.zeros((4 * num_layers, tile_ir.NUM_ARGUMENTS), np.int64)
        self._small = np.zeros((5 * num_layers + 1, NUM_ARGUMENTS), np.int64)
        self._num_products = self._num_small = 0
        self._calls: list[tuple[int, int]] = []
        self._kinds: list[str] = []
        self._list_calls(model, buffers, attention)
        self._program = Program(self._calls)

    def run(self, num_tokens: int) -> None:
        self.begin(num_tokens)
        self._program.run()

    def begin(self, num_tokens: int) -> None:
        self._products[:, tile_ir.ROWS] = num_tokens
        self._products[:, tile_ir.TICKET] = 0
        self._small[:, 0] = num_tokens

    @property
    def calls_by_kind(self) -> dict[str, list[tuple[int, int]]]:
        by_kind: dict[str, list[tuple[int, int]]] = {}
        for kind, call in zip(self._kinds, self._calls, strict=True):
            by_kind.setdefault(kind, []).append(call)
        return by_kind

    def _list_calls(
        self, model: DecoderModel, buffers: _Buffers, attention: list[tuple[int, int]]
    ) -> None:
        shape, shard, kernel = model.shape, model.shard, self._kernel
        eps = float_bits(shape.rms_norm_eps)
        h, x, y = buffers.h.data_ptr(), buffers.x.data_ptr(), buffers.y.data_ptr()
        qkv, attended = buffers.qkv.data_ptr(), buffers.attended.data_ptr()
        gate_up, act = buffers.gate_up.data_ptr(), buffers.act.data_ptr()
        rotations, rotated = buffers.rotations.data_ptr(), shard.num_heads + shard.num_kv_heads
        heads, hidden, added = rotated + shard.num_kv_heads, shape.hidden_size, 0
        for layer, attend in zip(model.layers, attention, strict=True):
            mlp = layer.mlp
            assert isinstance(mlp, Mlp)
            norm = 0 if layer.qk_norm is None else layer.qk_norm.data_ptr()
            norms = layer.input_norm.data_ptr(), layer.mlp_norm.data_ptr()
            sums = [self._sums_for(it) for it in (layer.qkv, mlp.gate_up, mlp.down)]
            self._add("norm", kernel.add_norm, h, added, norms[0], x, hidden, eps, sums[0])
            self._multiply("qkv", layer.qkv, x, qkv)
            turn = (qkv, rotations, norm, rotated, heads, shape.head_dim, eps)
            self._add("rotate", kernel.rotate, *turn)
            self._call("attention", attend)
            if sums_of_attended := self._sums_for(layer.output):
                groups = shard.num_heads * shape.head_dim // GROUP
                self._add("group sums", kernel.group_sums, attended, sums_of_attended, groups)
            self._multiply("output", layer.output, attended, y)
            self._add("norm", kernel.add_norm, h, y, norms[1], x, hidden, eps, sums[1])
            self._multiply("gate, up", mlp.gate_up, x, gate_up)
            width = _width(mlp.gate_up) // 2
            self._add("SiLU", kernel.silu_multiply, gate_up, act, width, sums[2])
            self._multiply("down", mlp.down, act, y)
            added = y
        self._add("norm", kernel.add_norm, h, added, model.final_norm.data_ptr(), x, hidden, eps, 0)

    def _sums_for(self, linear: Linear) -> int:
        """Where the linear layer, in this program, wants the group sums of its input; else 0."""
        quantised = linear.quantised
        return self._sums if self._few_bits and quantised and quantised.needs_sums else 0

    def _call(self, kind: str, call: tuple[int, int]) -> None:
        self._kinds.append(kind)
        self._calls.append(call)

    def _add(self, kind: str, address: int, *arguments: int) -> None:
        """One of the small kernels."""
        row = self._small[self._num_small]
        self._num_small += 1
        values = (*self._kernel.first(0, self._threads), *arguments)
        row[: len(values)] = values
        self._call(kind, (address, row.ctypes.data))

    def _multiply(self, kind: str, linear: Linear, x: int, y: int) -> None:
        """A product, with the form of the weight that this program takes."""
        row = self._products[self._num_products]
        self._num_products += 1
        quantised = linear.quantised
        if quantised is not None and self._few_bits:
            self._call(kind, quantised.call(x, self._sums, y, row))
        else:
            assert linear.few_rows is not None
            self._call(kind, linear.few_rows.call(x, y, row))


def _width(linear: Linear) -> int:
    """Outputs of a linear layer that has one of the kernels."""
    kernel = linear.quantised or linear.few_rows
    assert kernel is not None
    return kernel.out
