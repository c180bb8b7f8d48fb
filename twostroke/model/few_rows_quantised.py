"""Products with a weight of 4 or 8 bits, read as it is: a decode step's linear layers, and those of
any step where the processor has no products of bfloat16.

What a weight of few bits saves is the way from memory, so the arithmetic must keep up with that: 64
bytes of the weight, and a row, are 4 instructions with 4 bits and 2 with 8, where the processor
multiplies bytes (`integer_products`). For that x is rounded to integers too, group by group, of 16
bits:

    x[i] = scale_x[g] * n[i]      exact to 1 / 65,278 of the group's largest

bfloat16, which x is elsewhere, has 8 bits; so nothing is lost that was there. Sums over a group are
exact integers; the dequantised weight in bfloat16 is rounded, this one is not.

Inputs come in groups of 32 that share a scale, and in some formats a minimum, for each output:

    y[o] = sum over groups g of  scale_x[g] * (scale[o, g] * sum of q[o, i] * n[i]
                                               + minimum[o, g] * sum of n[i])

Products want weights without sign: 8-bit weights are kept as q + 128, and the sum over the group
begins at -128 * sum of n[i]; where minima are all -8 times the scale (Q4_0), at -8 times it.

64 outputs lie together as a block, in it each group of 32 inputs:

    values | scale [64] | minimum [64]       float16; minimum if there are

    values, 4 bits: [32 / 8 inputs][64 outputs][4 bytes]      which inputs of these 8, or 4, a byte
            8 bits: [32 / 4 inputs][64 outputs][4 bytes]      holds, `integer_products` says

and a row of x ("levels"): [groups][n 64 bytes | scale float32 | sum of n int32], where n is 32 high
bytes and 32 low ones, n = 256 * high + low, or 32 int16.
"""

import functools
import math

import numpy as np
import torch
from torch import Tensor

from twostroke.arrays import Int64s
from twostroke.model.elementwise import LEVELS_BYTES, kernels
from twostroke.model.integer_products import IntegerProducts, Sums, products_of
from twostroke.model.memory import HUGE_PAGES
from twostroke.model.quantised import GROUP, QuantisedWeight
from twostroke.model.tile_ir import (
    OUTPUTS,
    VECTORS,
    Arguments,
    Compiled,
    TileProduct,
    broadcast,
    compile_kernel,
    head_of,
    prefetch,
    row_pointer,
    tail_of,
)

# Above, arithmetic of two levels takes longer than reading 16 bits: see benchmarks/linear.py.
MAX_QUANTISED_ROWS = 8
_NUMBER_BYTES = OUTPUTS * 2  # a float16 for each output


class QuantisedRows(TileProduct):
    """Any number of rows, with a weight of few bits."""

    __slots__ = ("nbytes", "num_groups")

    def __init__(self, weight: QuantisedWeight, bias: Tensor | None) -> None:
        """See `can_multiply` for the conditions; `bias` is bfloat16 [out]."""
        out, width = weight.values.shape
        self.num_groups = width // GROUP
        offset = 128 if weight.bits == 8 else 0
        if weight.minima is not None and torch.equal(weight.minima, weight.scales * -8):
            weight = QuantisedWeight(weight.bits, weight.values, weight.scales, None)
            offset += 8
        packed = _pack(weight)
        self.nbytes = packed.nbytes
        arguments = Arguments(
            weight=packed.data_ptr(),
            block_bytes=packed.nbytes // (out // OUTPUTS),
            bias=0 if bias is None else bias.data_ptr(),
            first=self.num_groups,
            second=offset,
            blocks=out // OUTPUTS,
        )
        kernel = _compiled(weight.bits, weight.minima is not None)
        super().__init__(kernel, arguments, out, (packed, bias))

    def call(self, levels: int, y: int, row: Int64s, result: int) -> tuple[int, int]:
        """For a `Program`; see `TileProduct._call`. `levels` are those of x."""
        return self._call(levels, self.num_groups * LEVELS_BYTES, y, row, result)

    def into(self, y: Tensor, x: Tensor) -> Tensor:
        return super().into(y, levels_of(x))


def levels_of(x: Tensor) -> Tensor:
    """x [R, in] of any type as the kernels take it: uint8 [R, in / GROUP * LEVELS_BYTES]."""
    wide, groups = x.float().contiguous(), x.shape[1] // GROUP
    kernel = kernels()
    assert kernel is not None
    levels = torch.empty((len(x), groups * LEVELS_BYTES), dtype=torch.uint8)
    kernel.run(kernel.levels, len(x), wide.data_ptr(), levels.data_ptr(), groups)
    return levels


def can_multiply(out: int, width: int) -> bool:
    """Whether there is a kernel for a weight [out, width] on this processor."""
    return out % OUTPUTS == 0 and width % GROUP == 0 and works()


@functools.cache
def works() -> bool:
    """Whether this processor has what the kernels need."""
    if kernels() is None:
        return False
    try:
        _compiled(4, True)
    except (ImportError, AttributeError, OSError, RuntimeError):
        return False
    return True


def _pack(weight: QuantisedWeight) -> Tensor:
    """The layout that the module's text describes: uint8 [out / 64, groups, bytes of a group]."""
    from twostroke.model.pack_quantised import pack_numbers, pack_values  # here: imports numba

    num_rows, num_groups = weight.scales.shape
    values_bytes = OUTPUTS * GROUP * weight.bits // 8
    numbers = [weight.scales] if weight.minima is None else [weight.scales, weight.minima]
    group_bytes = values_bytes + len(numbers) * _NUMBER_BYTES
    shape = (num_rows // OUTPUTS, num_groups, group_bytes)
    packed = HUGE_PAGES.empty(math.prod(shape)).view(shape)
    values = weight.values.view(torch.uint8).contiguous()
    order = np.array(products_of(weight.bits).order, np.uint8)
    pack_values(values.numpy(), order, num_groups, packed.numpy())
    for i, number in enumerate(numbers):
        halves = number.contiguous().view(torch.uint8).view(num_rows, num_groups, 2)
        pack_numbers(halves.numpy(), values_bytes + i * _NUMBER_BYTES, packed.numpy())
    return packed


# ---------------------------------------------------------------- the kernel


@functools.cache
def _compiled(bits: int, has_minima: bool) -> Compiled:
    """Raises one of the errors that `_works` names where there is no kernel."""
    products = products_of(bits)
    return compile_kernel(
        lambda rows: _tile(rows, bits, has_minima, products),
        len(products.together),
        products.feature,
        *products.declarations,
    )


def _tile(rows: int, bits: int, has_minima: bool, products: IntegerProducts) -> str:
    """`rows` rows of levels times one block of `first` groups; values are `second` too large.

    In a group vectors follow each other, and all rows are multiplied with one before the next: the
    weight is read and masked once, and the memory has the time of all rows to bring what follows.
    """
    together = products.together[rows - 1]
    lines = [
        *head_of(rows),
        *(line for r in range(rows) for line in row_pointer(f"x_of{r}", "x", "x_row_bytes", r)),
        "%offset = trunc i64 %second to i32",
        "%offset_one = insertelement <16 x i32> poison, i32 %offset, i32 0",
        "%offset_all = shufflevector <16 x i32> %offset_one, <16 x i32> poison, "
        "<16 x i32> zeroinitializer",
        "br label %sum",
        "sum:",
        "%group = phi i64 [ 0, %entry ], [ %group1, %group_summed ]",
        *_group_pointers(rows, bits, has_minima),
        "br label %sum_vectors",
        "sum_vectors:",
        "%vector = phi i64 [ 0, %sum ], [ %vector1, %sum_vectors ]",
        "%values_offset = shl i64 %vector, 6",
        "%numbers_offset = shl i64 %vector, 5",
    ]
    for what in ("here", "ahead"):
        lines += [
            f"%values_{what} = getelementptr i8, ptr %group_{what}, i64 %values_offset",
            f"%numbers_{what} = getelementptr i8, ptr %group_{what}, i64 %numbers_offset",
        ]
    sums: Sums = {
        (r, number, v): f"%start{r}" if number == products.num_sums - 1 else "zeroinitializer"
        for r in range(rows)
        for number in range(products.num_sums)
        for v in range(together)
    }
    for part in range(GROUP * bits // 32):
        lines += [*_load_bytes(part, together), *products.multiply(part, sums, together)]
    lines += [
        *_load_numbers(bits, has_minima, together),
        *_scale(has_minima, sums, products),
        f"%vector1 = add i64 %vector, {together}",
        f"%more_vectors = icmp ult i64 %vector1, {VECTORS}",
        "br i1 %more_vectors, label %sum_vectors, label %group_summed",
        "group_summed:",
        "%group1 = add i64 %group, 1",
        "%more = icmp ult i64 %group1, %first",
        "br i1 %more, label %sum, label %summed",
        *tail_of(rows),
    ]
    return "\n".join(lines)


def _groups_ahead(rows: int, bits: int) -> int:
    """How far ahead the memory is asked for weights.

    Far enough that several rows never wait. One row does nothing but wait; with 8 bits it is faster
    (32 GB/s to one thread, not 22: Zen 4) when it comes close behind, and the processor, which sees
    it miss, reads ahead too.
    """
    if bits == 4:
        return 8
    return 1 if rows == 1 else 3


def _group_pointers(rows: int, bits: int, has_minima: bool) -> list[str]:
    """%group_here, %group_ahead, and for each row %x_p, %sum and the %start of sums."""
    group_bytes = OUTPUTS * GROUP * bits // 8 + (1 + has_minima) * _NUMBER_BYTES
    lines = [
        f"%group_ahead_here = add i64 %group, {_groups_ahead(rows, bits)}",
        "%group_ahead_there = sub i64 %group_ahead_here, %first",
        "%is_here = icmp ult i64 %group_ahead_here, %first",
        "%ahead = select i1 %is_here, i64 %group_ahead_here, i64 %group_ahead_there",
        "%block_ahead = select i1 %is_here, i64 %weight, i64 %next_weight",
    ]
    for what, block, group in (("here", "weight", "group"), ("ahead", "block_ahead", "ahead")):
        lines += [
            f"%offset_{what} = mul i64 %{group}, {group_bytes}",
            f"%at_{what} = add i64 %{block}, %offset_{what}",
            f"%group_{what} = inttoptr i64 %at_{what} to ptr",
        ]
    lines.append(f"%x_offset = mul i64 %group, {LEVELS_BYTES}")
    for r in range(rows):
        lines += [
            f"%x_p{r} = getelementptr i8, ptr %x_of{r}, i64 %x_offset",
            f"%sum_p{r} = getelementptr i8, ptr %x_p{r}, i64 {2 * GROUP + 4}",
            *broadcast(f"sum{r}", f"sum_p{r}"),
            f"%lifted{r} = mul <16 x i32> %sum{r}, %offset_all",
            f"%start{r} = sub <16 x i32> zeroinitializer, %lifted{r}",
            f"%x_sum{r} = sitofp <16 x i32> %sum{r} to <16 x float>",
        ]
    return lines


def _load_bytes(part: int, together: int) -> list[str]:
    """%bytes: 4 of each of 16 outputs a vector; the memory is asked for those ahead."""
    lines = []
    for v in range(together):
        n, offset = f"{part}_{v}", (part * VECTORS + v) * 64
        lines += [
            f"%bytes_p{n} = getelementptr i8, ptr %values_here, i64 {offset}",
            f"%bytes{n} = load <32 x i16>, ptr %bytes_p{n}, align 2",
            *prefetch(f"bytes_ahead{n}", "values_ahead", offset),
        ]
    return lines


def _load_numbers(bits: int, has_minima: bool, together: int) -> list[str]:
    """%scale and %minimum of each vector, in float32; the memory is asked for those ahead."""
    lines = []
    for number, kind in enumerate(("scale", "minimum")[: 1 + has_minima]):
        for v in range(together):
            offset = OUTPUTS * GROUP * bits // 8 + number * _NUMBER_BYTES + 32 * v
            lines += [
                f"%{kind}_p{v} = getelementptr i8, ptr %numbers_here, i64 {offset}",
                f"%{kind}_h{v} = load <16 x half>, ptr %{kind}_p{v}, align 2",
                f"%{kind}{v} = fpext <16 x half> %{kind}_h{v} to <16 x float>",
                *prefetch(f"{kind}_ahead{v}", "numbers_ahead", offset),
            ]
    return lines


def _scale(has_minima: bool, sums: Sums, products: IntegerProducts) -> list[str]:
    """total += scale of x * (scale * sum + minimum * sum of x)"""
    lines = []
    for r in sorted({r for r, _, _ in sums}):
        lines += [
            f"%x_scale_p{r} = getelementptr i8, ptr %x_p{r}, i64 {2 * GROUP}",
            *broadcast(f"x_scale_bits{r}", f"x_scale_p{r}"),
            f"%x_scale{r} = bitcast <16 x i32> %x_scale_bits{r} to <16 x float>",
        ]
    for r, v in sorted({(r, v) for r, _, v in sums}):
        n = f"{r}_{v}"
        lines += [
            *products.whole_sum(
                f"all{n}", [sums[key] for key in sorted(sums) if key[::2] == (r, v)]
            ),
            f"%sum_f{n} = sitofp <16 x i32> %all{n} to <16 x float>",
            f"%scaled{n} = fmul contract <16 x float> %sum_f{n}, %scale{v}",
        ]
        here = f"%scaled{n}"
        if has_minima:
            lines += [
                f"%least{n} = fmul contract <16 x float> %x_sum{r}, %minimum{v}",
                f"%lifted{n} = fadd contract <16 x float> %scaled{n}, %least{n}",
            ]
            here = f"%lifted{n}"
        lines += [
            f"%total_p{n} = getelementptr i8, ptr %total{r}_{v}, i64 %values_offset",
            f"%product{n} = fmul contract <16 x float> {here}, %x_scale{r}",
            f"%before{n} = load <16 x float>, ptr %total_p{n}",
            f"%after{n} = fadd contract <16 x float> %before{n}, %product{n}",
            f"store <16 x float> %after{n}, ptr %total_p{n}",
        ]
    return lines
