"""Products of few rows with a bfloat16 weight packed by oneDNN: a decode step's linear layers.

With few rows a product takes as long as the weight takes to arrive from memory. oneDNN's kernel
reads it at half the speed that the machine has, and spends 10 us a call besides; this one, on the
same packed weight, does neither: see benchmarks/linear.py. A weight [out, in] lies packed as

    [out / 64][in / 2][64][2]      for each block of 64 outputs, pairs of inputs in order

so a block is read from start to end, once for up to MAX_TILE_ROWS rows:

    acc[row][64] += x[row][pair] . weight[pair][64]      one instruction (vdpbf16ps) for 16 outputs

The sums are in oneDNN's order, inputs in chunks, so a row's result is the same to the last bit
whether this kernel or, beside many other rows, oneDNN computed it. Needs AVX512-BF16; the layout is
not documented, so nothing is used before it has been tried.
"""

import ctypes
import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from twostroke.arrays import Int64s
from twostroke.model.openmp import load_openmp

MAX_ROWS = 64  # above, oneDNN is as fast
MAX_TILE_ROWS = 6  # x 4 vectors are accumulated in 24 of 32 registers
_OUTPUTS = 64
_VECTORS = _OUTPUTS // 16
_PREFETCH_BYTES = 4096
_CHUNKS = (1024, 512)  # inputs that oneDNN has been seen to sum up before adding them to the rest


_ARGUMENTS = (
    *("weight", "bias", "x", "x_row_bytes", "y", "y_row_bytes", "wide"),
    *("rows", "pairs", "chunk", "blocks", "ticket"),
)


NUM_ARGUMENTS = len(_ARGUMENTS)
ROWS, TICKET = _ARGUMENTS.index("rows"), _ARGUMENTS.index("ticket")


class _Arguments(ctypes.Structure):
    """What the kernel is given: addresses and numbers. `wide` is 1 where y is float32, and
    `ticket` must be 0."""

    _fields_ = [(name, ctypes.c_int64) for name in _ARGUMENTS]


class FewRows:
    """y = x @ weight.T + bias for x [R, in] bfloat16, R <= MAX_ROWS. Not for concurrent use."""

    __slots__ = ("_arguments", "_keep", "_kernel", "out")

    def __init__(self, packed: Tensor, bias: Tensor | None, chunk: int) -> None:
        """`packed` is oneDNN's form of a weight [out, in]; see `few_rows` for the conditions."""
        self._kernel = _compiled()
        self._keep = (packed, bias)  # the kernel knows addresses only
        self.out, width = packed.shape
        self._arguments = _Arguments(
            weight=torch.ops.mkldnn.data_ptr(packed),
            bias=0 if bias is None else bias.data_ptr(),
            pairs=width // 2,
            chunk=chunk // 2,
            blocks=self.out // _OUTPUTS,
        )

    def call(self, x: int, y: int, row: Int64s) -> tuple[int, int]:
        """Function and argument for a `Program`, with x and y at these addresses, contiguous.

        `row` becomes the argument; before a run its ROWS must be set and its TICKET zeroed.
        """
        a = self._arguments
        a.x, a.x_row_bytes, a.y, a.y_row_bytes, a.wide = x, a.pairs * 4, y, self.out * 2, 0
        row[:] = np.frombuffer(memoryview(a), np.int64)
        return self._kernel.address, row.ctypes.data

    def __call__(self, x: Tensor) -> Tensor:
        """The last dimension of x must be contiguous."""
        return self.into(torch.empty((x.shape[0], self.out), dtype=torch.bfloat16), x)

    def into(self, y: Tensor, x: Tensor) -> Tensor:
        """The product is written to y [R, out], contiguous, bfloat16 or float32; returns y."""
        a = self._arguments
        a.x, a.x_row_bytes = x.data_ptr(), x.stride(0) * 2
        a.y, a.y_row_bytes = y.data_ptr(), self.out * y.element_size()
        a.wide = int(y.dtype == torch.float32)
        a.rows, a.ticket = x.shape[0], 0
        threads = torch.get_num_threads()
        if threads == 1:
            self._kernel.run(ctypes.addressof(a))
        else:
            self._kernel.run_parallel(self._kernel.address, ctypes.addressof(a), threads, 0)
        return y


def few_rows(packed: Tensor, bias: Tensor | None) -> FewRows | None:
    """The fast product with this packed weight, or None where it does not work."""
    out, width = packed.shape
    if packed.dtype != torch.bfloat16 or out % _OUTPUTS or width % 32:
        return None
    chunk = _chunk_inputs(width) if _works() else None
    if chunk is None or torch.ops.mkldnn._nbytes(packed) != out * width * 2:
        return None
    return FewRows(packed, bias, chunk)


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
    weight = torch.randn(4 * _OUTPUTS, width, generator=generator).bfloat16()
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


class _Compiled(NamedTuple):
    """`void few_rows(_Arguments *)`, and how to run it on all threads (see `load_openmp`)."""

    engine: object  # owns the code
    address: int
    run: Callable[[int], None]
    run_parallel: Callable[[int, int, int, int], None]


@functools.cache
def _compiled() -> _Compiled:
    """Raises one of the errors that `_works` names where there is no kernel. Takes 0.05 s."""
    from llvmlite import binding

    features = binding.get_host_cpu_features()
    if not features.get("avx512bf16", False):
        raise RuntimeError("the processor has no AVX512-BF16")
    openmp = load_openmp()
    if openmp is None:
        raise RuntimeError("torch has no OpenMP with GNU's entry points")
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    target = binding.Target.from_default_triple().create_target_machine(
        cpu=binding.get_host_cpu_name(), features=features.flatten(), opt=2, jit=True
    )
    module = binding.parse_assembly(_module())
    module.verify()
    engine = binding.create_mcjit_compiler(module, target)
    engine.finalize_object()
    address: int = engine.get_function_address("few_rows")
    run = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)
    return _Compiled(engine, address, run, openmp.GOMP_parallel)


def _module() -> str:
    """The kernel in LLVM's language: a tile for each number of rows, and the loop over blocks."""
    tiles = range(1, MAX_TILE_ROWS + 1)
    return "\n".join([_DECLARATIONS, *map(_tile, tiles), _main()])


_DECLARATIONS = """
declare void @llvm.prefetch.p0(ptr, i32, i32, i32)
declare <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(<16 x float>, <32 x bfloat>, <32 x bfloat>)
"""

_TILE_ARGUMENTS = (
    *("weight", "bias", "x", "x_row_bytes"),
    *("y", "y_row_bytes", "wide", "pairs", "chunk"),
)


def _tile(rows: int) -> str:
    """`rows` rows of x times one block. `total` is in memory, `acc` in registers."""
    cells = [(r, v) for r in range(rows) for v in range(_VECTORS)]
    lines = [f"define internal void @tile{rows}({_typed(_TILE_ARGUMENTS)}) {{", "entry:"]
    for r, v in cells:
        lines += [
            f"%total{r}_{v} = alloca <16 x float>, align 64",
            f"store <16 x float> zeroinitializer, ptr %total{r}_{v}",
        ]
    lines += [
        "br label %sum_chunk",
        "sum_chunk:",
        "%first = phi i64 [ 0, %entry ], [ %end, %add_chunk ]",
        "%next = add i64 %first, %chunk",
        "%unfinished = icmp ult i64 %next, %pairs",
        "%end = select i1 %unfinished, i64 %next, i64 %pairs",
        "br label %sum",
        "sum:",
        "%pair = phi i64 [ %first, %sum_chunk ], [ %pair1, %sum ]",
        *(
            f"%acc{r}_{v} = phi <16 x float> [ zeroinitializer, %sum_chunk ], [ %new{r}_{v}, %sum ]"
            for r, v in cells
        ),
        *_load_weights(),
    ]
    for r in range(rows):
        lines += _multiply(r)
    lines += [
        "%pair1 = add i64 %pair, 1",
        "%more = icmp ult i64 %pair1, %end",
        "br i1 %more, label %sum, label %add_chunk",
        "add_chunk:",
        *(line for r, v in cells for line in _add(f"total{r}_{v}", f"new{r}_{v}", "chunk")),
        "br i1 %unfinished, label %sum_chunk, label %summed",
        "summed:",
        "%biased = icmp ne i64 %bias, 0",
        "br i1 %biased, label %add_bias, label %store",
        "add_bias:",
        "%bias_p = inttoptr i64 %bias to ptr",
    ]
    for v in range(_VECTORS):
        lines += [
            f"%bias_p{v} = getelementptr i8, ptr %bias_p, i64 {32 * v}",
            f"%bias_b{v} = load <16 x bfloat>, ptr %bias_p{v}, align 2",
            f"%bias_f{v} = fpext <16 x bfloat> %bias_b{v} to <16 x float>",
            *(line for r in range(rows) for line in _add(f"total{r}_{v}", f"bias_f{v}", "bias")),
        ]
    lines += [
        "br label %store",
        "store:",
        "%is_wide = icmp ne i64 %wide, 0",
        "br i1 %is_wide, label %store_wide, label %store_rounded",
        "store_wide:",
        *(line for r in range(rows) for line in _store(r, wide=True)),
        "ret void",
        "store_rounded:",
        *(line for r in range(rows) for line in _store(r, wide=False)),
        "ret void",
    ]
    return "\n".join([*lines, "}"])


def _typed(names: tuple[str, ...]) -> str:
    return ", ".join(f"i64 %{name}" for name in names)


def _load_weights() -> list[str]:
    """The pair's 64 x 2 weights, and a word to the memory to bring those further on."""
    lines = [
        "%weight_offset = shl i64 %pair, 8",
        "%weight_at = add i64 %weight, %weight_offset",
        "%weight_p = inttoptr i64 %weight_at to ptr",
    ]
    for v in range(_VECTORS):
        lines += [
            f"%weight_p{v} = getelementptr i8, ptr %weight_p, i64 {64 * v}",
            f"%weight{v} = load <32 x bfloat>, ptr %weight_p{v}, align 2",
            f"%ahead{v} = getelementptr i8, ptr %weight_p, i64 {64 * v + _PREFETCH_BYTES}",
            f"call void @llvm.prefetch.p0(ptr %ahead{v}, i32 0, i32 3, i32 1)",
        ]
    return lines


def _multiply(row: int) -> list[str]:
    """Add this pair's products to the row's accumulators."""
    lines = [
        f"%x_row{row} = mul i64 %x_row_bytes, {row}",
        f"%x_at{row} = add i64 %x, %x_row{row}",
        f"%x_p{row} = inttoptr i64 %x_at{row} to ptr",
        f"%x_pair_p{row} = getelementptr i32, ptr %x_p{row}, i64 %pair",
        f"%x_pair{row} = load i32, ptr %x_pair_p{row}, align 2",
        f"%x_one{row} = insertelement <16 x i32> poison, i32 %x_pair{row}, i32 0",
        f"%x_all{row} = shufflevector <16 x i32> %x_one{row}, <16 x i32> poison, "
        "<16 x i32> zeroinitializer",
        f"%x{row} = bitcast <16 x i32> %x_all{row} to <32 x bfloat>",
    ]
    lines += [
        f"%new{row}_{v} = call <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512("
        f"<16 x float> %acc{row}_{v}, <32 x bfloat> %x{row}, <32 x bfloat> %weight{v})"
        for v in range(_VECTORS)
    ]
    return lines


def _add(total: str, value: str, what: str) -> list[str]:
    """*total += value"""
    return [
        f"%{total}_{what}0 = load <16 x float>, ptr %{total}",
        f"%{total}_{what}1 = fadd <16 x float> %{total}_{what}0, %{value}",
        f"store <16 x float> %{total}_{what}1, ptr %{total}",
    ]


def _store(row: int, *, wide: bool) -> list[str]:
    """Write a row's 64 results to y, as float32 or rounded to bfloat16."""
    n = f"{'w' if wide else 'r'}{row}"
    lines = [
        f"%y_row{n} = mul i64 %y_row_bytes, {row}",
        f"%y_at{n} = add i64 %y, %y_row{n}",
        f"%y_p{n} = inttoptr i64 %y_at{n} to ptr",
    ]
    for v in range(_VECTORS):
        lines += [
            f"%result{n}_{v} = load <16 x float>, ptr %total{row}_{v}",
            f"%y_p{n}_{v} = getelementptr i8, ptr %y_p{n}, i64 {(64 if wide else 32) * v}",
        ]
        if wide:
            lines.append(f"store <16 x float> %result{n}_{v}, ptr %y_p{n}_{v}, align 4")
        else:
            lines += [
                f"%rounded{n}_{v} = fptrunc <16 x float> %result{n}_{v} to <16 x bfloat>",
                f"store <16 x bfloat> %rounded{n}_{v}, ptr %y_p{n}_{v}, align 2",
            ]
    return lines


def _main() -> str:
    """One thread's share: blocks by ticket, as they get done; in a block, tiles of rows."""
    fields = "\n".join(
        f"%{name}_p = getelementptr i64, ptr %arguments, i64 {i}\n"
        + (f"%{name} = load i64, ptr %{name}_p" if name != "ticket" else "")
        for i, name in enumerate(_ARGUMENTS)
    )
    tiles = range(1, MAX_TILE_ROWS + 1)
    cases = " ".join(f"i64 {n}, label %rows{n}" for n in tiles)
    arguments = (
        "i64 %block_weight, i64 %block_bias, i64 %tile_x, i64 %x_row_bytes, "
        "i64 %tile_y, i64 %y_row_bytes, i64 %wide, i64 %pairs, i64 %chunk"
    )
    calls = "\n".join(
        f"rows{n}:\ncall void @tile{n}({arguments})\nbr label %tile_done" for n in tiles
    )
    return f"""
define void @few_rows(ptr %arguments) {{
entry:
{fields}
%block_bytes = shl i64 %pairs, 8
%biased = icmp ne i64 %bias, 0
br label %take
take:
%block = atomicrmw add ptr %ticket_p, i64 1 monotonic
%is_block = icmp slt i64 %block, %blocks
br i1 %is_block, label %start, label %done
start:
%weight_offset = mul i64 %block, %block_bytes
%block_weight = add i64 %weight, %weight_offset
%y_shift = add i64 %wide, 7
%y_offset = shl i64 %block, %y_shift
%block_y = add i64 %y, %y_offset
%bias_offset = shl i64 %block, 7
%bias_at = add i64 %bias, %bias_offset
%block_bias = select i1 %biased, i64 %bias_at, i64 0
br label %tile
tile:
%row = phi i64 [ 0, %start ], [ %row1, %tile_done ]
%x_offset = mul i64 %row, %x_row_bytes
%tile_x = add i64 %x, %x_offset
%tile_y_offset = mul i64 %row, %y_row_bytes
%tile_y = add i64 %block_y, %tile_y_offset
%left = sub i64 %rows, %row
%many = icmp sgt i64 %left, {MAX_TILE_ROWS}
%count = select i1 %many, i64 {MAX_TILE_ROWS}, i64 %left
switch i64 %count, label %tile_done [ {cases} ]
{calls}
tile_done:
%row1 = add i64 %row, %count
%more = icmp slt i64 %row1, %rows
br i1 %more, label %tile, label %take
done:
ret void
}}
"""
