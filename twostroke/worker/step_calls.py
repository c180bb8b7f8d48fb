"""The kernels of a step, in order, and what each is given: one list for steps of any size.

    embed ▶ [ norm ▶ qkv ▶ rotate ▶ (attend) ▶ output ▶ residual sum, norm ▶ gate, up ▶ SiLU ▶ down
            ▶ residual sum ] x layers ▶ norm ▶ LM head ▶ the most likely token

What a product takes depends on the form in which its weight is kept. A form says how its input is
made: of the residual sum, of bfloat16, or of gate and up.
"""

from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor

from twostroke.arrays import Int64s
from twostroke.model import tile_ir
from twostroke.model.elementwise import Kernels, float_bits
from twostroke.model.layers import Linear, Mlp
from twostroke.model.llama import DecoderModel
from twostroke.model.quantised import GROUP
from twostroke.model.tile_ir import ADDED, ROUNDED, WIDE

ROTATIONS = 0, 3  # the first call, and which of its words, that is the table of rotations
_X, _Y = tile_ir.ARGUMENTS.index("x"), tile_ir.ARGUMENTS.index("y")


class Place(NamedTuple):
    """Where rows are that a kernel reads or writes."""

    address: int
    row_bytes: int = 0  # from a row of the step to the next; 0 where a thread's rows are its own
    thread_bytes: int = 0  # from a thread's own rows to the next one's


class Places(NamedTuple):
    """What kernels hand to each other. Shapes as in `layers`; W is the width of the MLP."""

    token_ids: Place  # int32 [T]
    positions: Place  # int32 [T]
    rotations: Place  # float32 [T, 2, D / 2]
    h: Place  # float32 [T, hidden]
    hidden: Place  # [T, hidden], after the final norm
    x: Place  # [T, hidden]
    y: Place  # [T, hidden]
    qkv: Place  # [T, all heads, D]
    attended: Place  # [T, H * D]
    gate_up: Place  # [T, 2 * W], in float32 if `silu` of weights of few bits reads it
    act: Place  # [T, W]
    wide: Place  # float32, what becomes integers of few_rows_quantised
    integers: Place  # x as bytes: see int8_rows and few_rows_quantised
    logits: Place  # float32 [T, vocabulary]
    best: Place  # int32 [T]


class Call(NamedTuple):
    """A kernel and its arguments."""

    kind: str
    address: int
    rows: int  # which argument is the number of rows
    words: list[int | Place]

    @property
    def is_product(self) -> bool:
        return self.rows == tile_ir.ROWS


class Product(Protocol):
    def call(self, x: int, y: int, row: Int64s, result: int) -> tuple[int, int]:
        """See `tile_ir.TileProduct`."""
        ...


class StepCalls:
    """Lists kernels for the weights of a model; `few_bits`: with those weights of few bits."""

    def __init__(
        self, model: DecoderModel, places: Places, kernels: Kernels, *, few_bits: bool
    ) -> None:
        from twostroke.model.step_ends import address  # here, because it imports numba

        self._address = address
        self.model, self.places, self.kernels = model, places, kernels
        self.eps = float_bits(model.shape.rms_norm_eps)
        self._few_bits = few_bits
        self._calls: list[Call] = []

    def layers(self) -> list[list[Call]]:
        """Up to the hidden states, cut where each layer attends."""
        model, places = self.model, self.places
        shape, shard = model.shape, model.shard
        rotated = shard.num_heads + shard.num_kv_heads
        heads = (rotated, rotated + shard.num_kv_heads, shape.head_dim)
        parts: list[list[Call]] = []
        self._look_up()
        # Products of weights of few bits add to the residual sum themselves.
        y, result = (places.h, ADDED) if self._few_bits else (places.y, ROUNDED)
        added = None if self._few_bits else places.y
        for layer in model.layers:
            mlp = layer.mlp
            assert isinstance(mlp, Mlp)
            form = self._form(layer.qkv)
            x = form.norm(layer.input_norm, added if parts else None)
            form.multiply("qkv", layer.qkv, x, places.qkv, ROUNDED)
            norm = 0 if layer.qk_norm is None else layer.qk_norm.data_ptr()
            turn = (places.qkv, places.rotations, norm, *heads, self.eps)
            self.add("rotate", self.kernels.rotate, *turn)
            parts.append(self._take_calls())

            form = self._form(layer.output)
            x = form.take(places.attended, shard.num_heads * shape.head_dim)
            form.multiply("output", layer.output, x, y, result)
            form, down = self._form(mlp.gate_up), self._form(mlp.down)
            x = form.norm(layer.mlp_norm, added)
            form.multiply("gate, up", mlp.gate_up, x, *down.gate_up)
            down.multiply("down", mlp.down, down.silu(outputs(mlp.gate_up) // 2), y, result)
        self.norm(model.final_norm, added, places.hidden)
        return [*parts, self._take_calls()]

    def head(self) -> list[Call]:
        """From the hidden states to logits, and to the most likely token of each."""
        head, places, shape = self.model.lm_head, self.places, self.model.shape
        form = self._form(head)
        x = form.take(places.hidden, shape.hidden_size)
        form.multiply("lm head", head, x, places.logits, WIDE)
        self.add("best", self._address("best"), places.logits, places.best, shape.vocab_size)
        return self._take_calls()

    def norm(self, weight: Tensor, added: Place | None, x: Place) -> None:
        """h += added; x = its RMS norm times weight, in bfloat16."""
        h, width = self.places.h, self.model.shape.hidden_size
        self.add(
            "norm", self.kernels.add_norm, h, added or 0, weight.data_ptr(), x, width, self.eps
        )

    def add(self, kind: str, address: int, *words: int | Place) -> None:
        """One of the small kernels, whose first arguments are rows, and how to know a share."""
        self._calls.append(Call(kind, address, 0, [0, 0, 0, *words]))

    def multiply(self, kind: str, kernel: Product, x: Place, y: Place, result: int) -> None:
        row = np.zeros(tile_ir.NUM_ARGUMENTS, np.int64)
        address, _ = kernel.call(x.address, y.address, row, result)
        row[tile_ir.TICKET] = 0
        words: list[int | Place] = list(row.tolist())
        words[_X], words[_Y] = x, y
        self._calls.append(Call(kind, address, tile_ir.ROWS, words))

    def _form(self, linear: Linear) -> "_Form":
        if linear.int8 is not None:
            return _Int8(self)
        if self._few_bits and linear.quantised is not None:
            return _FewBits(self)
        return _Form(self)

    def _look_up(self) -> None:
        """The tokens' embeddings, and their positions' rotations in a table yet to be told."""
        model, places = self.model, self.places
        size = model.shape.head_dim
        self.add("embed", self._address("look_up"), 0, places.positions, places.rotations, size)
        table, width = model.embedding.data_ptr(), model.shape.hidden_size
        self.add("embed", self._address("embed"), table, places.token_ids, places.h, width)

    def _take_calls(self) -> list[Call]:
        calls, self._calls = self._calls, []
        return calls


def outputs(linear: Linear) -> int:
    """Of a linear layer that has one of the kernels."""
    kernel = linear.int8 or linear.quantised or linear.few_rows
    assert kernel is not None
    return kernel.out


class _Form:
    """bfloat16, and what others do differently. All but `multiply` say where the input is."""

    def __init__(self, step: StepCalls) -> None:
        self._step, self._places, self._kernels = step, step.places, step.kernels

    @property
    def gate_up(self) -> tuple[Place, int]:
        """Where `silu` wants gate and up, and as which of the products' results."""
        return self._places.gate_up, ROUNDED

    def norm(self, weight: Tensor, added: Place | None) -> Place:
        """h += added; RMS norm of h times weight."""
        self._step.norm(weight, added, self._places.x)
        return self._places.x

    def take(self, x: Place, width: int) -> Place:
        """x [T, width] in bfloat16."""
        del width
        return x

    def silu(self, width: int) -> Place:
        """SiLU(gate) * up, [T, width]."""
        act = self._places.act
        self._step.add("SiLU", self._kernels.silu_multiply, self._places.gate_up, act, width)
        return act

    def multiply(self, kind: str, linear: Linear, x: Place, y: Place, result: int) -> None:
        assert linear.few_rows is not None
        self._step.multiply(kind, linear.few_rows, x, y, result)


class _Int8(_Form):
    """8 bits on both sides."""

    def norm(self, weight: Tensor, added: Place | None) -> Place:
        step, out = self._step, self._places.integers
        width = step.model.shape.hidden_size
        words = (step.places.h, added or 0, weight.data_ptr(), out, width, step.eps)
        step.add("norm", self._kernels.norm_bytes, *words)
        return out

    def take(self, x: Place, width: int) -> Place:
        self._step.add("to int8", self._kernels.turned_bytes, x, self._places.integers, width)
        return self._places.integers

    def silu(self, width: int) -> Place:
        out = self._places.integers
        self._step.add("SiLU", self._kernels.silu_bytes, self._places.gate_up, out, width)
        return out

    def multiply(self, kind: str, linear: Linear, x: Place, y: Place, result: int) -> None:
        assert linear.int8 is not None
        self._step.multiply(kind, linear.int8, x, y, result)


class _FewBits(_Form):
    """4 or 8 bits in groups, and x in two levels of 8 bits; between products all is float32."""

    @property
    def gate_up(self) -> tuple[Place, int]:
        return self._places.gate_up, WIDE

    def norm(self, weight: Tensor, added: Place | None) -> Place:
        step, wide, out = self._step, self._places.wide, self._places.integers
        assert added is None
        words = (step.places.h, weight.data_ptr(), wide, out, step.model.shape.hidden_size)
        step.add("norm", self._kernels.norm_levels, *words, step.eps)
        return out

    def take(self, x: Place, width: int) -> Place:
        wide, out = self._places.wide, self._places.integers
        self._step.add("levels", self._kernels.levels, x, out, width // GROUP, wide)
        return out

    def silu(self, width: int) -> Place:
        wide, out = self._places.wide, self._places.integers
        self._step.add("SiLU", self._kernels.silu_levels, self._places.gate_up, wide, out, width)
        return out

    def multiply(self, kind: str, linear: Linear, x: Place, y: Place, result: int) -> None:
        assert linear.quantised is not None
        self._step.multiply(kind, linear.quantised, x, y, result)
