"""The pieces of a decoder: linear layers, norms, rotary embedding, the dense MLP.

Plain functions and small classes on tensors; no modules and no autograd. Shapes: T tokens of the
step (all requests together), H query heads, K KV heads, D head size, R rows.

A head's values are kept in pairs: where Hugging Face rotates value i with value i + D/2, the rows
of q and k are reordered at load so that the two are neighbours, which one load brings. Attention
scores are sums over a head, so the order does not change them.
"""

import functools
import math
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from twostroke.model.elementwise import Elementwise
from twostroke.model.few_rows import MAX_ROWS, FewRows, few_rows, most_rows
from twostroke.model.few_rows_quantised import MAX_QUANTISED_ROWS, QuantisedRows
from twostroke.model.int8_rows import Int8Rows
from twostroke.model.quantised import QuantisedWeight
from twostroke.shape import ModelShape, RopeScaling


class Attention(Protocol):
    """Writes the step's keys and values to the KV pool and attends."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [T, H, D], k and v [T, K, D] -> [T, H * D].

        q and k are rotated. All three may be strided views; the last dimension is contiguous.
        """
        ...


class Linear:
    """y = x @ weight.T + bias, for x [R, in] and weight [out, in].

    On a CPU the weight is kept in oneDNN's own layout: twice as fast as F.linear for one row, and
    no slower for many. Few rows of bfloat16 take a kernel of our own, twice as fast again. With a
    `quantised` form of the weight, very few rows take that, of which less must be read; without the
    other form, all do. With an `int8` form, which has the bias, any number of rows take that alone.
    """

    __slots__ = (
        *("_bias", "_packed", "_weight", "_weight_bytes"),
        *("few_rows", "int8", "num_weights", "quantised", "weight_bytes"),
    )

    def __init__(
        self,
        weight: Tensor | None,
        bias: Tensor | None = None,
        quantised: QuantisedWeight | None = None,
        int8: Int8Rows | None = None,
    ) -> None:
        self._bias = bias
        self.int8 = int8
        self.quantised = None if quantised is None else QuantisedRows(quantised, bias)
        self.weight_bytes = 0 if bias is None else bias.nbytes
        self._packed, self._weight = False, weight
        self.few_rows: FewRows | None = None
        if self.quantised is not None:
            self.weight_bytes += self.quantised.nbytes
        self.num_weights = self._weight_bytes = 0
        if int8 is not None:
            self.num_weights, self._weight_bytes = int8.num_weights, int8.nbytes
            self.weight_bytes += int8.nbytes
        if quantised is not None:
            self.num_weights = quantised.values.numel()
        if weight is not None:
            self.num_weights, self._weight_bytes = weight.numel(), weight.nbytes
            self.weight_bytes += weight.nbytes
            self._packed = weight.device.type == "cpu" and _can_pack(weight.dtype)
        if weight is not None and self._packed:
            self._weight = _pack(weight)
            self.few_rows = few_rows(self._weight, bias)

    def __call__(self, x: Tensor) -> Tensor:
        if self.int8 is not None:
            return self.int8(x.contiguous())
        if self.takes_few_bits(len(x)):
            assert self.quantised is not None
            return self.quantised(x.contiguous())
        assert self._weight is not None
        if self.few_rows is not None and x.stride(-1) == 1 and len(x) <= (most_rows() or MAX_ROWS):
            return self.few_rows(x)
        if self._packed:
            return _packed_linear(x, self._weight, self._bias)
        return F.linear(x, self._weight, self._bias)

    def bytes_read(self, num_rows: int) -> int:
        """Of the weight, in a product with that many rows."""
        if self.quantised is not None and self.takes_few_bits(num_rows):
            return self.quantised.nbytes
        return self._weight_bytes

    def takes_few_bits(self, num_rows: int) -> bool:
        """Whether a product with that many rows is one of the weight in few bits."""
        few = self._weight is None or num_rows <= MAX_QUANTISED_ROWS
        return self.quantised is not None and few

    def in_float32(self, x: Tensor) -> Tensor:
        """The product with its sums kept in float32 where the kernel can, else widened."""
        if self.takes_few_bits(len(x)):
            assert self.quantised is not None
            y = torch.empty((x.shape[0], self.quantised.out), dtype=torch.float32)
            return self.quantised.into(y, x.contiguous())
        if self.few_rows is None:
            return self(x).float()
        y = torch.empty((x.shape[0], self.few_rows.out), dtype=torch.float32)
        for rows, part in zip(torch.split(x, MAX_ROWS), torch.split(y, MAX_ROWS), strict=True):
            self.few_rows.into(part, rows)
        return y


def _pack(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
    return packed


def _packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    y: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, packed, bias, "none", [], "")
    return y


@functools.cache
def _can_pack(dtype: torch.dtype) -> bool:
    """Find out by trying: torch has these operators for its compiler and does not document them,
    and oneDNN computes in bfloat16 on some processors only."""
    if dtype not in (torch.float32, torch.bfloat16):
        return False
    with torch.inference_mode():
        x, weight = torch.ones(2, 64, dtype=dtype), torch.ones(32, 64, dtype=dtype)
        try:
            y = _packed_linear(x, _pack(weight), None)
        except (AttributeError, RuntimeError):
            return False
        return torch.equal(y, F.linear(x, weight))


class Rotary:
    """Rotary position embedding with its scaling, for heads kept in pairs."""

    def __init__(self, shape: ModelShape, device: torch.device) -> None:
        inverse, self._magnitude = inverse_frequencies(shape)
        self._inverse = inverse.to(device)

    def rotations(self, positions: Tensor) -> Tensor:
        """Cosines and sines for positions [T]: float32 [T, 2, D / 2].

        Computed once a step and used by every layer: a table of them would have to be sized for
        the longest context, and saves nothing that can be measured.
        """
        angles = positions.to(torch.float32)[:, None] * self._inverse
        return torch.stack((angles.cos(), angles.sin()), 1).mul_(self._magnitude)


def in_pairs(rows: Tensor, head_dim: int) -> Tensor:
    """Reorder the rows of heads [heads * D, ...] from Hugging Face's order into pairs."""
    heads = rows.view(-1, 2, head_dim // 2, *rows.shape[1:])
    return heads.transpose(1, 2).reshape(rows.shape)


def inverse_frequencies(shape: ModelShape) -> tuple[Tensor, float]:
    """Radians a position adds to each pair, float32 [D / 2], and the factor on cos and sin.

    The formulas are those of transformers' modeling_rope_utils.
    """
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    inverse = 1.0 / (shape.rope_theta**exponents)
    scaling = shape.rope_scaling
    if scaling is None:
        return inverse, 1.0
    if scaling.kind == "factors":
        return inverse / torch.tensor(scaling.factors), 1.0
    if scaling.kind == "linear":
        return inverse / scaling.parameters["factor"], 1.0
    if scaling.kind == "llama3":
        return _llama3(inverse, scaling), 1.0
    return _yarn(inverse, scaling, shape)


def _llama3(inverse: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1: long wavelengths are divided by the factor, short ones kept, those between
    interpolated."""
    parameters = scaling.parameters
    factor, original = parameters["factor"], parameters["original_max_position_embeddings"]
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    wavelength = 2 * math.pi / inverse
    smooth = ((original / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * inverse / factor + smooth * inverse


def _yarn(inverse: Tensor, scaling: RopeScaling, shape: ModelShape) -> tuple[Tensor, float]:
    """YaRN (arXiv 2309.00071): interpolate the pairs that turn seldom in the original context,
    keep those that turn often, with a ramp between them."""
    parameters = scaling.parameters
    factor, original = parameters["factor"], parameters["original_max_position_embeddings"]

    def pair_with_turns(turns: float) -> float:
        wavelengths = math.log(original / (turns * 2 * math.pi))
        return shape.head_dim * wavelengths / (2 * math.log(shape.rope_theta))

    low = pair_with_turns(parameters.get("beta_fast", 32))
    high = pair_with_turns(parameters.get("beta_slow", 1))
    if parameters["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, shape.head_dim - 1)
    pairs = torch.arange(shape.head_dim // 2, dtype=torch.float32)
    ramp = ((pairs - low) / ((high - low) or 0.001)).clamp(0, 1)
    scaled = inverse / factor * ramp + inverse * (1 - ramp)

    def magnitude(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1

    if "attention_factor" in parameters:
        return scaled, parameters["attention_factor"]
    if "mscale" in parameters and "mscale_all_dim" in parameters:
        whole = magnitude(parameters["mscale_all_dim"])
        return scaled, magnitude(parameters["mscale"]) / whole
    return scaled, magnitude(1.0)


class Mlp:
    """SiLU-gated MLP; gate and up are one matrix [2 * width, hidden]."""

    __slots__ = ("down", "gate_up")

    def __init__(self, gate_up: Linear, down: Linear) -> None:
        self.gate_up = gate_up
        self.down = down

    @property
    def linears(self) -> list[Linear]:
        return [self.gate_up, self.down]

    def __call__(self, x: Tensor, ops: Elementwise) -> Tensor:
        return self.down(ops.silu_multiply(self.gate_up(x)))
