"""Products of few rows with a weight of 4 or 8 bits, read as it is: a decode step's linear layers.

What a weight of few bits saves is the way from memory, so it is never written out in full: the
kernel turns 4 bits into bfloat16 by a table in a register (one instruction for 32 weights), and
multiplies as `few_rows` does. Integers up to 256 are exact in bfloat16, so nothing is rounded that
the dequantised product would not round; it rounds each weight, this one none.

Inputs come in groups of 32 that share a scale, and in some formats a minimum, for each output:

    y[o] = sum over groups g of  scale[o, g] * sum of q[o, i] * x[i]  +  minimum[o, g] * sum of x[i]

An 8-bit weight is two planes of 4 bits, its upper and its lower half, each with a table of its own.
64 outputs lie together, and in them each group of 32 inputs:

    nibbles of plane 0 [eighth][64 / 16][16 outputs][2][4 bits x 4] | of plane 1 | scale [64] | minimum [64]

where an eighth is 8 inputs, 16 bits hold inputs 2 n + p for n = 0 .. 3 at p = 0 or 1, and scales are
float16. Needs AVX512-BF16 and AVX512-BW.
"""  # noqa: E501

from dataclasses import dataclass

from torch import Tensor

from twostroke.model.few_rows import (
    OUTPUTS,
)

GROUP = 32  # inputs that share a scale
_EIGHTH = 8  # inputs of a 64-byte vector of nibbles
_PLANE_BYTES = OUTPUTS * GROUP // 2
_PREFETCH_BYTES = 2048


@dataclass(frozen=True)
class QuantisedWeight:
    """A weight [out, in] as integers with a scale, and perhaps a minimum, a group.

    values: uint8 or int8 [out, in], 0 .. 15 with 4 bits, -128 .. 127 with 8
    scales, minima: float32 [out, in / GROUP]; minima None: 0
    """

    bits: int
    values: Tensor
    scales: Tensor
    minima: Tensor | None

    def dequantised(self) -> Tensor:
        """float32 [out, in]."""
        groups = self.values.float().unflatten(-1, (-1, GROUP)) * self.scales[..., None]
        if self.minima is not None:
            groups += self.minima[..., None]
        return groups.flatten(-2)
