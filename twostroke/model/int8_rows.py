"""Products in 8 bits on both sides, for any number of rows: `--quantization int8`.

A weight is rounded to integers once, with a scale for each output; x at each product, with a scale
for each row (W8A8, dynamic per token, as vLLM's CompressedTensorsW8A8Int8 has it):

    y[r, o] = scale_x[r] * scale[o] * sum of n[r, i] * q[o, i]        |n|, |q| <= 127

The sum is an exact integer, so a row's result does not depend on the rows beside it. One
instruction (vpdpbusd) multiplies and adds up 64 products, where bfloat16 has 32.

What 8 bits for a whole row cost is decided by its largest value, and the inputs of a decoder's
layers have channels that are far larger than the rest. So inputs are turned first, in blocks of 64,
by the Hadamard matrix H (entries +-1, divided by 8), which spreads a large value over its block;
weights are turned alike, and since H is its own inverse the product stays what it was (QuaRot,
arXiv 2404.00456).

64 outputs lie together as a block:

    [in / 4][64 outputs][4 bytes: q + 128] | scale [64] float32

(the instruction wants one side without sign: sums begin at -128 * sum of n), and a row of x:

    n [in] int8 | scale float32 | sum of n int32 | unused, to a multiple of 64 bytes

both with `in` rounded up to a multiple of 64, by zeros.
"""

import functools
import math

import torch
from torch import Tensor

from twostroke.arrays import Int64s
from twostroke.model.elementwise import kernels
from twostroke.model.memory import HUGE_PAGES
from twostroke.model.tile_ir import (
    MAX_TILE_ROWS,
    OUTPUTS,
    PREFETCH,
    VECTORS,
    VPDPBUSD,
    Arguments,
    Compiled,
    TileProduct,
    broadcast,
    cells_of,
    compile_kernel,
    head_of,
    prefetch_for_step,
    row_pointer,
    tail_of,
)

TURNED = 64  # inputs that H mixes


class Int8Rows(TileProduct):
    """y = x @ weight.T + bias, for any number of rows of x."""

    __slots__ = ("nbytes", "num_weights", "width")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """`weight` [out, in] is bfloat16, as is `bias` [out]; see `can_multiply`."""
        out, self.width = weight.shape
        self.num_weights = weight.numel()
        packed = _pack(*quantise(weight.contiguous()))
        self.nbytes = packed.nbytes
        arguments = Arguments(
            weight=packed.data_ptr(),
            block_bytes=packed.nbytes // (out // OUTPUTS),
            bias=0 if bias is None else bias.data_ptr(),
            first=padded(self.width) // 4,
            blocks=out // OUTPUTS,
        )
        super().__init__(_compiled(), arguments, out, (packed, bias))

    def call(self, x: int, y: int, row: Int64s, result: int) -> tuple[int, int]:
        """For a `Program`; see `TileProduct._call`. `x` is in 8 bits already."""
        return self._call(x, row_bytes(self.width), y, row, result)

    def into(self, y: Tensor, x: Tensor) -> Tensor:
        return super().into(y, bytes_of(x))


def padded(width: int) -> int:
    return -(-width // TURNED) * TURNED


def row_bytes(width: int) -> int:
    """Of a row of x in 8 bits. (In one piece, for `int8_kernels` compiles it.)"""
    return -(-width // TURNED) * TURNED + 64


def bytes_of(x: Tensor) -> Tensor:
    """x [R, in], contiguous bfloat16, as the kernel takes it: uint8 [R, row_bytes(in)]."""
    kernel = kernels()
    assert kernel is not None
    turned = torch.empty((len(x), row_bytes(x.shape[1])), dtype=torch.uint8)
    kernel.run(kernel.turned_bytes, len(x), x.data_ptr(), turned.data_ptr(), x.shape[1])
    return turned


def quantise(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [R, in] of bfloat16, turned: int8 [R, padded(in)], and the scales, float32 [R].

    A weight's rows, one for each output, are rounded as those of x are.
    """
    turned, end = bytes_of(rows), padded(rows.shape[1])
    scales = turned[:, end : end + 4].contiguous().view(torch.float32)
    return turned[:, :end].contiguous().view(torch.int8), scales[:, 0]


@functools.cache
def hadamard() -> Tensor:
    """H, float32 [TURNED, TURNED], its own inverse."""
    pair = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
    matrix = functools.reduce(torch.kron, [pair] * int(math.log2(TURNED)))
    return matrix / math.sqrt(TURNED)


def can_multiply(out: int) -> bool:
    """Whether there is a kernel for a weight [out, any] on this processor."""
    return out % OUTPUTS == 0 and works()


@functools.cache
def works() -> bool:
    """Whether this processor has what the kernel needs."""
    if kernels() is None:
        return False
    try:
        _compiled()
    except (ImportError, AttributeError, OSError, RuntimeError):
        return False
    return True


def _pack(values: Tensor, scales: Tensor) -> Tensor:
    """The layout that the module's text describes: uint8 [out / 64, bytes of a block]."""
    out, width = values.shape
    blocks = out // OUTPUTS
    packed = HUGE_PAGES.empty(blocks * OUTPUTS * (width + 4)).view(blocks, -1)
    # Four inputs are one number to torch.
    fours = (values.view(torch.uint8) ^ 128).view(torch.int32).view(blocks, OUTPUTS, -1)
    numbers = packed.view(torch.int32)
    numbers[:, :-OUTPUTS].view(blocks, -1, OUTPUTS).copy_(fours.transpose(1, 2))
    numbers[:, -OUTPUTS:] = scales.view(torch.int32).view(blocks, OUTPUTS)
    return packed


# ---------------------------------------------------------------- the kernel


@functools.cache
def _compiled() -> Compiled:
    """Raises one of the errors that `works` names where there is no kernel."""
    return compile_kernel(_tile, MAX_TILE_ROWS, "avx512vnni", PREFETCH, VPDPBUSD)


def _tile(rows: int) -> str:
    """`rows` rows of x times one block, `first` times four inputs."""
    cells = cells_of(rows)
    lines = [
        *head_of(rows),
        *(line for r in range(rows) for line in row_pointer(f"x_of{r}", "x", "x_row_bytes", r)),
        "%weight_p = inttoptr i64 %weight to ptr",
        "%width = shl i64 %first, 2",
        "%scales_offset = shl i64 %first, 8",
        "%scales_p = getelementptr i8, ptr %weight_p, i64 %scales_offset",
        "%sum_offset = add i64 %width, 4",
    ]
    for r in range(rows):
        lines += [
            f"%sum_p{r} = getelementptr i8, ptr %x_of{r}, i64 %sum_offset",
            *broadcast(f"sum{r}", f"sum_p{r}"),
            f"%lifted{r} = shl <16 x i32> %sum{r}, splat (i32 7)",
            f"%start{r} = sub <16 x i32> zeroinitializer, %lifted{r}",
        ]
    lines += [
        "br label %sum",
        "sum:",
        "%four = phi i64 [ 0, %entry ], [ %four1, %sum ]",
        *(
            f"%acc{r}_{v} = phi <16 x i32> [ %start{r}, %entry ], [ %new{r}_{v}, %sum ]"
            for r, v in cells
        ),
        "%weight_offset = shl i64 %four, 8",
        "%four_p = getelementptr i8, ptr %weight_p, i64 %weight_offset",
    ]
    for v in range(VECTORS):
        lines += [
            f"%values_p{v} = getelementptr i8, ptr %four_p, i64 {64 * v}",
            f"%values{v} = load <16 x i32>, ptr %values_p{v}, align 4",
        ]
    lines += prefetch_for_step("four")
    for r in range(rows):
        lines += [
            f"%n_p{r} = getelementptr i32, ptr %x_of{r}, i64 %four",
            *broadcast(f"n{r}", f"n_p{r}"),
            *(
                f"%new{r}_{v} = call <16 x i32> @llvm.x86.avx512.vpdpbusd.512("
                f"<16 x i32> %acc{r}_{v}, <16 x i32> %values{v}, <16 x i32> %n{r})"
                for v in range(VECTORS)
            ),
        ]
    lines += [
        "%four1 = add i64 %four, 1",
        "%more = icmp ult i64 %four1, %first",
        "br i1 %more, label %sum, label %scale",
        "scale:",
        *_scale(rows),
        "br label %summed",
        *tail_of(rows),
    ]
    return "\n".join(lines)


def _scale(rows: int) -> list[str]:
    """total = sum * scale of the output * scale of the row"""
    lines = []
    for v in range(VECTORS):
        lines += [
            f"%scale_p{v} = getelementptr i8, ptr %scales_p, i64 {64 * v}",
            f"%scale{v} = load <16 x float>, ptr %scale_p{v}, align 4",
        ]
    for r in range(rows):
        lines += [
            f"%x_scale_p{r} = getelementptr i8, ptr %x_of{r}, i64 %width",
            *broadcast(f"x_scale_bits{r}", f"x_scale_p{r}"),
            f"%x_scale{r} = bitcast <16 x i32> %x_scale_bits{r} to <16 x float>",
        ]
        for v in range(VECTORS):
            n = f"{r}_{v}"
            lines += [
                f"%sum_f{n} = sitofp <16 x i32> %new{n} to <16 x float>",
                f"%scaled{n} = fmul <16 x float> %sum_f{n}, %scale{v}",
                f"%result{n} = fmul <16 x float> %scaled{n}, %x_scale{r}",
                f"store <16 x float> %result{n}, ptr %total{n}",
            ]
    return lines
