"""Products of few rows with a weight of 4 or 8 bits, read as it is: a decode step's linear layers.

What a weight of few bits saves is the way from memory, so it is never written out in full: the
kernel turns 4 bits into bfloat16 by a table in a register (one instruction for 32 weights), and
multiplies as `few_rows` does. Integers up to 256 are exact in bfloat16: the dequantised weight in
bfloat16 is rounded, this one is not.

Inputs come in groups of 32 that share a scale, and in some formats a minimum, for each output:

    y[o] = sum over groups g of  scale[o, g] * sum of q[o, i] * x[i]  +  minimum[o, g] * sum of x[i]

An 8-bit weight is two planes of 4 bits, its upper and its lower half, each with a table of its own.
64 outputs lie together as a block, in it each group of 32 inputs:

    plane 0 | plane 1 | scale [64] | minimum [64]       float16; plane 1 and minimum if there are

    plane: [32 / 8 inputs][64 / 16 outputs][16 outputs][2] words of 16 bits; word p of an output
    holds its inputs p, p + 2, p + 4 and p + 6 of these 8, from its lowest bits on
"""

import functools

import torch
from torch import Tensor

from twostroke.arrays import Int64s
from twostroke.model.elementwise import kernels
from twostroke.model.quantised import GROUP, QuantisedWeight
from twostroke.model.tile_ir import (
    OUTPUTS,
    VECTORS,
    Arguments,
    Compiled,
    TileProduct,
    broadcast_pair,
    cells_of,
    compile_kernel,
    head_of,
    tail_of,
)

# Above, turning 4 bits into numbers takes longer than reading 16: see benchmarks/linear.py.
MAX_QUANTISED_ROWS = 4
_EIGHTS = GROUP // 8
_PLANE_BYTES = OUTPUTS * GROUP // 2
_NUMBER_BYTES = OUTPUTS * 2  # a float16 for each output
_PREFETCH_BYTES = 4096

# What 4 bits stand for, as the bits of bfloat16.
_LOW: list[int] = torch.arange(16).bfloat16().view(torch.int16).tolist()
_HIGH: list[int] = (
    torch.tensor([16 * i for i in (*range(8), *range(-8, 0))]).bfloat16().view(torch.int16).tolist()
)


class QuantisedRows(TileProduct):
    """Any number of rows, with a weight of few bits. x must be contiguous."""

    __slots__ = ("nbytes", "needs_sums", "num_groups")

    def __init__(self, weight: QuantisedWeight, bias: Tensor | None) -> None:
        """See `can_multiply` for the conditions; `bias` is bfloat16 [out]."""
        out, width = weight.values.shape
        self.num_groups = width // GROUP
        self.needs_sums = weight.minima is not None  # needs the sums of x over groups
        packed = _pack(weight)
        self.nbytes = packed.nbytes
        arguments = Arguments(
            weight=packed.data_ptr(),
            block_bytes=packed.nbytes // (out // OUTPUTS),
            bias=0 if bias is None else bias.data_ptr(),
            first=self.num_groups,
            blocks=out // OUTPUTS,
        )
        kernel = _compiled(weight.bits // 4, self.needs_sums)
        super().__init__(kernel, arguments, out, (packed, bias))

    def call(self, x: int, sums: int, y: int, row: Int64s) -> tuple[int, int]:
        """For a `Program`; see `TileProduct._call`. `sums` as in `group_sums`."""
        self._arguments.second = sums
        return self._call(x, self.num_groups * GROUP * 2, y, row)

    def into(self, y: Tensor, x: Tensor) -> Tensor:
        sums = group_sums(x) if self.needs_sums else x
        self._arguments.second = sums.data_ptr()
        return super().into(y, x)


def group_sums(x: Tensor) -> Tensor:
    """Sums of x [R, in] over its groups: float32 [R, in / GROUP]."""
    groups = x.shape[1] // GROUP
    kernel = kernels()
    assert kernel is not None
    sums = torch.empty((len(x), groups), dtype=torch.float32)
    kernel.run(kernel.group_sums, len(x), x.data_ptr(), sums.data_ptr(), groups)
    return sums


def can_multiply(out: int, width: int) -> bool:
    """Whether there is a kernel for a weight [out, width] on this processor."""
    return out % OUTPUTS == 0 and width % GROUP == 0 and works()


@functools.cache
def works() -> bool:
    """Whether this processor has what the kernels need."""
    if kernels() is None:
        return False
    try:
        _compiled(1, True)
    except (ImportError, AttributeError, OSError, RuntimeError):
        return False
    return True


def _pack(weight: QuantisedWeight) -> Tensor:
    """The layout that the module's text describes: uint8 [out / 64, groups, bytes of a group]."""
    from twostroke.model.pack_quantised import pack_numbers, pack_planes  # here: imports numba

    num_rows, num_groups = weight.scales.shape
    planes_bytes = weight.bits // 4 * _PLANE_BYTES
    numbers = [weight.scales] if weight.minima is None else [weight.scales, weight.minima]
    group_bytes = planes_bytes + len(numbers) * _NUMBER_BYTES
    packed = torch.empty((num_rows // OUTPUTS, num_groups, group_bytes), dtype=torch.uint8)
    values = weight.values.view(torch.uint8).contiguous()
    pack_planes(values.numpy(), weight.bits, num_groups, packed.numpy())
    for i, number in enumerate(numbers):
        halves = number.contiguous().view(torch.uint8).view(num_rows, num_groups, 2)
        pack_numbers(halves.numpy(), planes_bytes + i * _NUMBER_BYTES, packed.numpy())
    return packed


# ---------------------------------------------------------------- the kernel


@functools.cache
def _compiled(num_planes: int, has_minima: bool) -> Compiled:
    """Raises one of the errors that `_works` names where there is no kernel."""
    return compile_kernel(lambda rows: _tile(rows, num_planes, has_minima), _DECLARATIONS)


_DECLARATIONS = """
declare <32 x i16> @llvm.x86.avx512.permvar.hi.512(<32 x i16>, <32 x i16>)
"""


def _tile(rows: int, num_planes: int, has_minima: bool) -> str:
    """`rows` rows of x times one block of `first` groups; `second` is the address of x's sums."""
    cells = cells_of(rows)
    tables = [_LOW] if num_planes == 1 else [_HIGH, _LOW]
    group_bytes = num_planes * _PLANE_BYTES + (1 + has_minima) * _NUMBER_BYTES
    lines = [
        *head_of(rows),
        "%sums_row = mul i64 %row, %first",
        "%sums_offset = shl i64 %sums_row, 2",
        "%sums_at = add i64 %second, %sums_offset",
        "br label %sum",
        "sum:",
        "%group = phi i64 [ 0, %entry ], [ %group1, %sum ]",
        f"%group_offset = mul i64 %group, {group_bytes}",
        "%group_at = add i64 %weight, %group_offset",
        "%group_p = inttoptr i64 %group_at to ptr",
        f"%first_pair = mul i64 %group, {GROUP // 2}",
    ]
    acc = dict.fromkeys(cells, "zeroinitializer")
    for eight in range(_EIGHTS):
        lines += _load_nibbles(eight, num_planes)
        for n in range(4):
            pair = f"pair{eight}_{n}"
            lines.append(f"%{pair} = add i64 %first_pair, {4 * eight + n}")
            for r in range(rows):
                lines += broadcast_pair(f"x{r}_{eight}_{n}", r, f"%{pair}")
            for plane, table in enumerate(tables):
                for v in range(VECTORS):
                    name = f"{eight}_{n}_{plane}_{v}"
                    lines += _look_up(name, f"nibbles{eight}_{plane}_{v}", 4 * n, table)
                    for r in range(rows):
                        lines.append(
                            f"%acc{r}_{name} = call <16 x float> "
                            "@llvm.x86.avx512bf16.dpbf16ps.512("
                            f"<16 x float> {acc[r, v]}, <32 x bfloat> %x{r}_{eight}_{n}, "
                            f"<32 x bfloat> %weight{name})"
                        )
                        acc[r, v] = f"%acc{r}_{name}"
    lines += _scale(rows, num_planes, has_minima, acc)
    lines += [
        "%group1 = add i64 %group, 1",
        "%more = icmp ult i64 %group1, %first",
        "br i1 %more, label %sum, label %summed",
        *tail_of(rows),
    ]
    return "\n".join(lines)


def _load_nibbles(eight: int, num_planes: int) -> list[str]:
    """A vector for each plane and 16 outputs; a word to the memory to bring those further on."""
    lines = []
    for plane in range(num_planes):
        for v in range(VECTORS):
            name = f"{eight}_{plane}_{v}"
            offset = plane * _PLANE_BYTES + (eight * VECTORS + v) * 64
            lines += [
                f"%nibbles_p{name} = getelementptr i8, ptr %group_p, i64 {offset}",
                f"%nibbles{name} = load <32 x i16>, ptr %nibbles_p{name}, align 2",
                f"%ahead{name} = getelementptr i8, ptr %group_p, i64 {offset + _PREFETCH_BYTES}",
                f"call void @llvm.prefetch.p0(ptr %ahead{name}, i32 0, i32 3, i32 1)",
            ]
    return lines


def _look_up(name: str, nibbles: str, shift: int, table: list[int]) -> list[str]:
    """%weight<name> = 32 bfloat16, by the 4 bits of each word from bit `shift` on.

    The instruction looks at 5 bits, so the table stands there twice.
    """
    entries = ", ".join(f"i16 {bits}" for bits in table * 2)
    shifts = ", ".join([f"i16 {shift}"] * 32)
    return [
        f"%index{name} = lshr <32 x i16> %{nibbles}, <{shifts}>",
        f"%found{name} = call <32 x i16> @llvm.x86.avx512.permvar.hi.512("
        f"<32 x i16> <{entries}>, <32 x i16> %index{name})",
        f"%weight{name} = bitcast <32 x i16> %found{name} to <32 x bfloat>",
    ]


def _scale(
    rows: int, num_planes: int, has_minima: bool, acc: dict[tuple[int, int], str]
) -> list[str]:
    """total += scale * acc + minimum * sum of x"""
    lines = []
    if has_minima:
        for r in range(rows):
            lines += [
                f"%sums_next{r} = mul i64 %first, {4 * r}",
                f"%sums_of{r} = add i64 %sums_at, %sums_next{r}",
                f"%sums_p{r} = inttoptr i64 %sums_of{r} to ptr",
                f"%sum_p{r} = getelementptr float, ptr %sums_p{r}, i64 %group",
                f"%sum{r} = load float, ptr %sum_p{r}, align 4",
                f"%sum_one{r} = insertelement <16 x float> poison, float %sum{r}, i32 0",
                f"%sum_all{r} = shufflevector <16 x float> %sum_one{r}, <16 x float> poison, "
                "<16 x i32> zeroinitializer",
            ]
    for v in range(VECTORS):
        for number, kind in enumerate(("scale", "minimum")[: 1 + has_minima]):
            offset = num_planes * _PLANE_BYTES + number * _NUMBER_BYTES + 32 * v
            lines += [
                f"%{kind}_p{v} = getelementptr i8, ptr %group_p, i64 {offset}",
                f"%{kind}_h{v} = load <16 x half>, ptr %{kind}_p{v}, align 2",
                f"%{kind}{v} = fpext <16 x half> %{kind}_h{v} to <16 x float>",
            ]
        for r in range(rows):
            n = f"{r}_{v}"
            lines += [
                f"%before{n} = load <16 x float>, ptr %total{n}",
                f"%scaled{n} = fmul contract <16 x float> {acc[r, v]}, %scale{v}",
                f"%after{n} = fadd contract <16 x float> %before{n}, %scaled{n}",
            ]
            result = f"%after{n}"
            if has_minima:
                lines += [
                    f"%shift{n} = fmul contract <16 x float> %sum_all{r}, %minimum{v}",
                    f"%shifted{n} = fadd contract <16 x float> %after{n}, %shift{n}",
                ]
                result = f"%shifted{n}"
            lines.append(f"store <16 x float> {result}, ptr %total{n}")
    return lines
