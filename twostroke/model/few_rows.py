"""Products of few rows with a bfloat16 weight packed by oneDNN: a decode step's linear layers.

With few rows a product takes as long as the weight takes to arrive from memory. oneDNN's kernel
reads it at half the speed that the machine has, and spends 10 us a call besides; this one, on the
same packed weight, does neither: see benchmarks/linear.py. A weight [out, in] lies packed as

    [out / 64][in / 2][64][2]      for each block of 64 outputs, pairs of inputs in order

so a block is read from start to end, once for up to MAX_TILE_ROWS rows:

    acc[row][64] += x[row][pair] . weight[pair][64]      one instruction (vdpbf16ps) for 16 outputs

The sums are in oneDNN's order, inputs in chunks, so a row's result is the same to the last bit
whether this kernel or, beside many other rows, oneDNN computed it. With many rows it is as fast as
oneDNN's, so a step that is one program (`worker.many_rows`) multiplies any number of them, unless
oneDNN has AMX (`most_rows`). Needs AVX512-BF16; the layout is not documented, so nothing is used
before it has been tried.
"""

import functools

import torch
from torch import Tensor

from twostroke.arrays import Int64s
from twostroke.model.tile_ir import (
    MAX_TILE_ROWS,
    OUTPUTS,
    PREFETCH,
    VECTORS,
    Arguments,
    Compiled,
    TileProduct,
    add_to,
    broadcast,
    cells_of,
    compile_kernel,
    head_of,
    prefetch_for_step,
    row_pointer,
    tail_of,
)

MAX_ROWS = 64  # above, threads had better share rows than the weight; and oneDNN is as fast
# With AMX oneDNN multiplies several times as fast as this kernel can: 1.2 TFLOP/s a core of
# Sapphire Rapids in place of some 0.2. Up to about here the kernel does so no slower than 28 GB/s
# bring the weight to two cores: a row takes one operation a byte. Reckoned, not measured.
_MAX_ROWS_BESIDE_AMX = 16
_CHUNKS = (1024, 512)  # inputs that oneDNN has been seen to sum up before adding them to the rest


class FewRows(TileProduct):
    """Any number of rows, with a weight that oneDNN has packed."""

    __slots__ = ()

    def __init__(self, packed: Tensor, bias: Tensor | None, chunk: int) -> None:
        """`packed` is oneDNN's form of a weight [out, in]; see `few_rows` for the conditions."""
        out, width = packed.shape
        arguments = Arguments(
            weight=torch.ops.mkldnn.data_ptr(packed),
            block_bytes=OUTPUTS * width * 2,
            bias=0 if bias is None else bias.data_ptr(),
            first=width // 2,
            second=chunk // 2,
            blocks=out // OUTPUTS,
        )
        super().__init__(_compiled(), arguments, out, (packed, bias))

    def call(self, x: int, y: int, row: Int64s, result: int) -> tuple[int, int]:
        """For a `Program`; see `TileProduct._call`."""
        return self._call(x, self._arguments.first * 4, y, row, result)


def few_rows(packed: Tensor, bias: Tensor | None) -> FewRows | None:
    """The fast product with this packed weight, or None where it does not work."""
    out, width = packed.shape
    if packed.dtype != torch.bfloat16 or out % OUTPUTS or width % 32:
        return None
    chunk = _chunk_inputs(width) if _works() else None
    if chunk is None or torch.ops.mkldnn._nbytes(packed) != out * width * 2:
        return None
    return FewRows(packed, bias, chunk)


@functools.cache
def most_rows() -> int | None:
    """Rows up to which the kernel is to be taken for oneDNN's; None where it is for any number."""
    from twostroke.model.compiled import has  # here, because numba is there where a kernel is

    return _MAX_ROWS_BESIDE_AMX if has("amx-bf16") else None


def _onednn(x: Tensor, packed: Tensor) -> Tensor:
    y: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, packed, None, "none", [], "")
    return y


@functools.cache
def _works() -> bool:
    """Whether the kernel can be compiled for this processor and run on torch's threads."""
    try:
        _compiled()
    except (ImportError, AttributeError, OSError, RuntimeError):
        return False
    return True


@functools.cache
def _chunk_inputs(width: int) -> int | None:
    """After how many inputs oneDNN adds up, found by trying; None when the layout is another.

    The last weight of each row cancels the sum of the others, so that their lowest bits show.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, width, generator=generator).bfloat16()
    weight = torch.randn(4 * OUTPUTS, width, generator=generator).bfloat16()
    x[:, -1], weight[:, -1] = 1, 0
    sums = x.double() @ weight.double().T
    weight[:, -1] = -sums[0].bfloat16()
    with torch.inference_mode():
        packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        expected = _onednn(x.expand(2, -1).contiguous(), packed)[:1]
        for chunk in (*_CHUNKS, width):
            if torch.equal(FewRows(packed, None, chunk)(x), expected):
                return chunk
        close = (FewRows(packed, None, width)(x) - expected).abs().max() < 1e-2
        return width if close else None


# ---------------------------------------------------------------- the kernel


@functools.cache
def _compiled() -> Compiled:
    """Raises one of the errors that `_works` names where there is no kernel."""
    return compile_kernel(_tile, MAX_TILE_ROWS, "avx512bf16", PREFETCH, _DECLARATION)


_DECLARATION = """
declare <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(<16 x float>, <32 x bfloat>, <32 x bfloat>)
"""


def _tile(rows: int) -> str:
    """`rows` rows of x times one block, `first` pairs of inputs in chunks of `second`."""
    cells = cells_of(rows)
    lines = [
        *head_of(rows),
        *(line for r in range(rows) for line in row_pointer(f"x_of{r}", "x", "x_row_bytes", r)),
        "br label %sum_chunk",
        "sum_chunk:",
        "%begin = phi i64 [ 0, %entry ], [ %end, %add_chunk ]",
        "%next = add i64 %begin, %second",
        "%unfinished = icmp ult i64 %next, %first",
        "%end = select i1 %unfinished, i64 %next, i64 %first",
        "br label %sum",
        "sum:",
        "%pair = phi i64 [ %begin, %sum_chunk ], [ %pair1, %sum ]",
        *(
            f"%acc{r}_{v} = phi <16 x float> [ zeroinitializer, %sum_chunk ], [ %new{r}_{v}, %sum ]"
            for r, v in cells
        ),
        *_load_weights(rows),
    ]
    for r in range(rows):
        lines += [
            f"%pair_p{r} = getelementptr i32, ptr %x_of{r}, i64 %pair",
            *broadcast(f"both{r}", f"pair_p{r}"),
            f"%x{r} = bitcast <16 x i32> %both{r} to <32 x bfloat>",
        ]
        lines += [
            f"%new{r}_{v} = call <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512("
            f"<16 x float> %acc{r}_{v}, <32 x bfloat> %x{r}, <32 x bfloat> %weight{v})"
            for v in range(VECTORS)
        ]
    lines += [
        "%pair1 = add i64 %pair, 1",
        "%more = icmp ult i64 %pair1, %end",
        "br i1 %more, label %sum, label %add_chunk",
        "add_chunk:",
        *(line for r, v in cells for line in add_to(f"total{r}_{v}", f"new{r}_{v}", "chunk")),
        "br i1 %unfinished, label %sum_chunk, label %summed",
        *tail_of(rows),
    ]
    return "\n".join(lines)


def _load_weights(rows: int) -> list[str]:
    """The pair's 64 x 2 weights, and a word to the memory to bring those further on."""
    lines = [
        "%weight_offset = shl i64 %pair, 8",
        "%weight_at = add i64 %weight, %weight_offset",
        "%weight_p = inttoptr i64 %weight_at to ptr",
    ]
    for v in range(VECTORS):
        lines += [
            f"%weight_p{v} = getelementptr i8, ptr %weight_p, i64 {64 * v}",
            f"%weight{v} = load <32 x bfloat>, ptr %weight_p{v}, align 2",
        ]
    return lines + prefetch_for_step("pair")
