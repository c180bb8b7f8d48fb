"""A step of few tokens as one call: every layer's kernels in a `Program`.

    residual sum + norm ▶ qkv ▶ rotate ▶ attend ▶ output ▶ residual sum + norm ▶ gate, up ▶ SiLU ▶ down

The kernels are those that `DecoderModel.forward` calls one by one, so a token's result is the same
to the last bit; what is saved is the way to them (some 8 ms of a step of SmolLM2 on two cores).
"""  # noqa: E501

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from twostroke.model import tile_ir
from twostroke.model.elementwise import float_bits, kernels
from twostroke.model.few_rows import MAX_ROWS, FewRows
from twostroke.model.layers import Linear, Mlp
from twostroke.model.llama import DecoderModel
from twostroke.worker.attention import PagedAttention

if TYPE_CHECKING:
    from twostroke.worker.attention_numba import NumbaAttention


def few_tokens(model: DecoderModel, attention: PagedAttention) -> "FewTokens | None":
    """The fast way for steps of few tokens, or None where some kernel is missing."""
    if kernels() is None or model.shard.size > 1:
        return None
    from twostroke.worker.attention_numba import NumbaAttention  # here, because numba is there

    linears = [
        linear
        for layer in model.layers
        if isinstance(layer.mlp, Mlp)
        for linear in (layer.qkv, layer.output, layer.mlp.gate_up, layer.mlp.down)
    ]
    if len(linears) < 4 * len(model.layers) or any(linear.few_rows is None for linear in linears):
        return None
    return FewTokens(model, attention) if isinstance(attention, NumbaAttention) else None


class FewTokens:
    """Runs steps of at most `max_tokens` tokens. Made by `few_tokens`."""

    max_tokens = MAX_ROWS

    def __init__(self, model: DecoderModel, attention: "NumbaAttention") -> None:
        from twostroke.model.elementwise_kernels import NUM_ARGUMENTS
        from twostroke.model.program import Program

        shape, shard = model.shape, model.shard
        self._model = model
        self._threads = torch.get_num_threads()
        dense = [layer.mlp for layer in model.layers if isinstance(layer.mlp, Mlp)]
        heads = shard.num_heads + 2 * shard.num_kv_heads

        def buffer(*dims: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return torch.zeros((MAX_ROWS, *dims), dtype=dtype)

        self._h = buffer(shape.hidden_size, dtype=torch.float32)
        self._x, self._y = buffer(shape.hidden_size), buffer(shape.hidden_size)
        self._qkv = buffer(heads, shape.head_dim)
        self._attended = buffer(shard.num_heads * shape.head_dim)
        widest = max(_product_of(mlp.gate_up).out // 2 for mlp in dense)
        self._gate_up, self._act = buffer(2 * widest), buffer(widest)
        self._rotations = buffer(2, shape.head_dim // 2, dtype=torch.float32)
        self._attention = attention.program(self._qkv, self._attended)
        self._linear_arguments = np.zeros((4 * len(model.layers), tile_ir.NUM_ARGUMENTS), np.int64)
        self._small_arguments = np.zeros((4 * len(model.layers) + 1, NUM_ARGUMENTS), np.int64)
        self._num_linears = self._num_small = 0
        self._program = Program(self._calls(model))

    def forward(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """token_ids and positions [T] -> hidden states [T, hidden], as `DecoderModel.forward`.

        The attention must have planned the step. The result is overwritten by the next step.
        """
        count = len(token_ids)
        self._h[:count] = self._model.embed(token_ids)
        self._rotations[:count] = self._model.rotary.rotations(positions)
        self._linear_arguments[:, tile_ir.ROWS] = count
        self._linear_arguments[:, tile_ir.TICKET] = 0
        self._small_arguments[:, 0] = count
        self._attention.begin()
        self._program.run()
        return self._x[:count]

    # ------------------------------------------------------------ the table

    def _calls(self, model: DecoderModel) -> list[tuple[int, int]]:
        kernel = kernels()
        assert kernel is not None
        shape, shard = model.shape, model.shard
        eps = float_bits(shape.rms_norm_eps)
        h, x, y = self._h.data_ptr(), self._x.data_ptr(), self._y.data_ptr()
        qkv, attended = self._qkv.data_ptr(), self._attended.data_ptr()
        gate_up, act = self._gate_up.data_ptr(), self._act.data_ptr()
        rotations, rotated = self._rotations.data_ptr(), shard.num_heads + shard.num_kv_heads
        hidden, added, calls = shape.hidden_size, 0, []
        for layer, attend in zip(model.layers, self._attention.calls, strict=True):
            mlp = layer.mlp
            assert isinstance(mlp, Mlp)
            norm = 0 if layer.qk_norm is None else layer.qk_norm.data_ptr()
            width = _product_of(mlp.gate_up).out // 2
            calls += [
                self._small(kernel.add_norm, h, added, layer.input_norm.data_ptr(), x, hidden, eps),
                self._product(layer.qkv, x, qkv),
                self._small(
                    *(kernel.rotate, qkv, rotations, norm),
                    *(rotated, rotated + shard.num_kv_heads, shape.head_dim, eps),
                ),
                attend,
                self._product(layer.output, attended, y),
                self._small(kernel.add_norm, h, y, layer.mlp_norm.data_ptr(), x, hidden, eps),
                self._product(mlp.gate_up, x, gate_up),
                self._small(kernel.silu_multiply, gate_up, act, width),
                self._product(mlp.down, act, y),
            ]
            added = y
        final = model.final_norm.data_ptr()
        return [*calls, self._small(kernel.add_norm, h, added, final, x, hidden, eps)]

    def _small(self, address: int, *arguments: int) -> tuple[int, int]:
        kernel = kernels()
        assert kernel is not None
        row = self._small_arguments[self._num_small]
        self._num_small += 1
        values = (*kernel.first(0, self._threads), *arguments)
        row[: len(values)] = values
        return address, row.ctypes.data

    def _product(self, linear: Linear, x: int, y: int) -> tuple[int, int]:
        row = self._linear_arguments[self._num_linears]
        self._num_linears += 1
        return _product_of(linear).call(x, y, row)


def _product_of(linear: Linear) -> FewRows:
    assert linear.few_rows is not None
    return linear.few_rows
