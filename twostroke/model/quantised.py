"""Weights as integers with a scale for each group of inputs: ggml's formats, and our own rounding.

Formats of ggml whose values are 4-bit with a scale, and perhaps a minimum, for every 32 inputs are
kept as they are, as is Q8_0. Weights in any other format are dequantised.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from twostroke.gguf_header import GgmlType
from twostroke.model.dequantise import half, nibbles, scales_and_minima

GROUP = 32  # inputs that share a scale


@dataclass(frozen=True)
class QuantisedWeight:
    """A weight [out, in] as integers with a scale, and perhaps a minimum, for each group.

    values: uint8 0 .. 15 with 4 bits, int8 with 8, [out, in]
    scales, minima: float16 [out, in / GROUP]; minima None: 0
    """

    bits: int
    values: Tensor
    scales: Tensor
    minima: Tensor | None

    def dequantised(self) -> Tensor:
        """float32 [out, in]."""
        groups = self.values.view(len(self.values), -1, GROUP).float()
        groups = groups * self.scales.float()[..., None]
        if self.minima is not None:
            groups = groups + self.minima.float()[..., None]
        return groups.flatten(1)

    def rows(self, order: Tensor) -> "QuantisedWeight":
        """The rows `order`, an index."""
        minima = None if self.minima is None else self.minima[order]
        return QuantisedWeight(self.bits, self.values[order], self.scales[order], minima)


def stack(parts: list[QuantisedWeight]) -> QuantisedWeight | None:
    """One weight from the rows of several; None when they are of different kinds."""
    if len({(part.bits, part.minima is None) for part in parts}) > 1:
        return None
    minima = [part.minima for part in parts if part.minima is not None]
    return QuantisedWeight(
        parts[0].bits,
        torch.cat([part.values for part in parts]),
        torch.cat([part.scales for part in parts]),
        torch.cat(minima) if minima else None,
    )


def is_kept(kind: GgmlType) -> bool:
    """Whether weights of that kind can stay as they are."""
    return kind.name in _FORMATS


def from_ggml(blocks: Tensor, kind: GgmlType, width: int) -> QuantisedWeight | None:
    """The blocks of a weight, uint8 [blocks, bytes], as they are; None for other formats."""
    make = _FORMATS.get(kind.name)
    if make is None or width % kind.block_size:
        return None
    bits, values, scales, minima = make(blocks)
    return QuantisedWeight(
        bits,
        values.reshape(-1, width),
        scales.half().reshape(-1, width // GROUP),
        None if minima is None else minima.half().reshape(-1, width // GROUP),
    )


_Parts = tuple[int, Tensor, Tensor, Tensor | None]


def _q8_0(blocks: Tensor) -> _Parts:
    return 8, blocks[:, 2:].view(torch.int8), half(blocks[:, :2]), None


def _q4_0(blocks: Tensor) -> _Parts:
    d = half(blocks[:, :2])
    return 4, nibbles(blocks[:, 2:]), d, d * -8


def _q4_1(blocks: Tensor) -> _Parts:
    return 4, nibbles(blocks[:, 4:]), half(blocks[:, :2]), half(blocks[:, 2:4])


def _q4_k(blocks: Tensor) -> _Parts:
    d, m = scales_and_minima(blocks)
    return 4, nibbles(blocks[:, 16:].reshape(-1, 4, 32)).view(-1, 256), d, -m


_FORMATS = {"Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_1": _q4_1, "Q4_K": _q4_k}


def quantise(weight: Tensor, bits: int) -> QuantisedWeight:
    """Round a weight [out, in] of any float type: 8 bits symmetric, 4 bits from minimum to maximum.

    The last dimension must be a multiple of GROUP. Scales are rounded to float16 first, so that
    the integers fit the scale that is kept.
    """
    groups = weight.float().view(len(weight), -1, GROUP)
    if bits == 8:
        scales = (groups.abs().amax(-1) / 127).half()
        minima = None
        values = groups / scales.float()[..., None]
        rounded = values.nan_to_num_(0.0).round_().clamp_(-127, 127).to(torch.int8)
    else:
        low, high = groups.aminmax(dim=-1)
        scales, minima = ((high - low) / 15).half(), low.half()
        values = (groups - minima.float()[..., None]) / scales.float()[..., None]
        rounded = values.nan_to_num_(0.0).round_().clamp_(0, 15).to(torch.uint8)
    return QuantisedWeight(bits, rounded.flatten(1), scales, minima)
