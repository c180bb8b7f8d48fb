"""What the kernels of products have in common, in LLVM's language: how a weight is walked.

A weight lies in blocks of 64 outputs. Threads take blocks by ticket, as they get done. Where rows
of x are many, a ticket is a block for some of them; where they are few, the last block is two
tickets of half the rows each, so that threads end together: 9 blocks over 2 threads are 4.5 each.
Rows are multiplied in tiles of at most MAX_TILE_ROWS, whose sums stay in registers: a function for
each number of rows. A kernel brings these functions, and decides what `first` and `second`, which
they are given, mean. A thread takes its next ticket before it begins a block, so that at the
block's end it can ask the memory for the beginning of the next one; for that of its first one it
asks before all else.
"""

import contextlib
import ctypes
import hashlib
import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from twostroke.arrays import Int64s
from twostroke.config import cache_dir
from twostroke.model.openmp import load_openmp
from twostroke.model.thread_count import ThreadCount

MAX_TILE_ROWS = 6  # x 4 vectors are accumulated in 24 of 32 registers
ROUNDED, WIDE, ADDED = range(3)  # y is bfloat16; float32; float32, and the product is added to it
OUTPUTS = 64
# Rows that one ticket stands for, of a block: few enough that threads end together.
_CHUNK_ROWS = 96
VECTORS = OUTPUTS // 16

ARGUMENTS = (
    *("weight", "block_bytes", "bias", "x", "x_row_bytes", "y", "y_row_bytes", "result"),
    *("rows", "blocks", "ticket", "first", "second"),
)
NUM_ARGUMENTS = len(ARGUMENTS)
ROWS, TICKET = ARGUMENTS.index("rows"), ARGUMENTS.index("ticket")


class Arguments(ctypes.Structure):
    """What a kernel is given: addresses and numbers.

    `result` is ROUNDED, WIDE or ADDED, `ticket` must be 0, `first` and `second` are the kernel's
    own.
    """

    _fields_ = [(name, ctypes.c_int64) for name in ARGUMENTS]


class Compiled(NamedTuple):
    """`void kernel(Arguments *)`, and how to run it on all threads (see `load_openmp`)."""

    engine: object  # owns the code
    address: int
    run: Callable[[int], None]
    run_parallel: Callable[[int, int, int, int], None]


class TileProduct:
    """y = x @ weight.T + bias by a compiled kernel, for x [R, in] bfloat16. One run at a time."""

    __slots__ = ("_arguments", "_keep", "_kernel", "_threads", "out")

    def __init__(
        self, kernel: Compiled, arguments: Arguments, out: int, keep: tuple[Tensor | None, ...]
    ) -> None:
        """`arguments` has all that does not change; `keep` are the tensors that it points to."""
        self._kernel = kernel
        self._arguments = arguments
        self._threads = ThreadCount()
        self._keep = keep  # the kernel knows addresses only
        self.out = out

    def __call__(self, x: Tensor) -> Tensor:
        """The last dimension of x must be contiguous."""
        return self.into(torch.empty((x.shape[0], self.out), dtype=torch.bfloat16), x)

    def into(self, y: Tensor, x: Tensor) -> Tensor:
        """The product is written to y [R, out], contiguous, bfloat16 or float32; returns y."""
        a = self._arguments
        a.x, a.x_row_bytes = x.data_ptr(), x.stride(0) * x.element_size()
        a.y, a.y_row_bytes = y.data_ptr(), self.out * y.element_size()
        a.result = WIDE if y.dtype == torch.float32 else ROUNDED
        a.rows, a.ticket = x.shape[0], 0
        most = torch.get_num_threads()
        if most == 1 or a.rows != 1:  # runs of other rows cannot be compared
            self._run(most)
            return y
        start_s = time.perf_counter()
        self._run(self._threads.choose(most))
        self._threads.add(time.perf_counter() - start_s)
        return y

    def _run(self, num_threads: int) -> None:
        if num_threads == 1:
            self._kernel.run(ctypes.addressof(self._arguments))
            return
        kernel = self._kernel
        kernel.run_parallel(kernel.address, ctypes.addressof(self._arguments), num_threads, 0)

    def _call(self, x: int, x_row_bytes: int, y: int, row: Int64s, result: int) -> tuple[int, int]:
        """Function and argument for a `Program`, with x and y at these addresses, contiguous.

        `row` becomes the argument; before a run its ROWS must be set and its TICKET zeroed.
        """
        a = self._arguments
        y_row_bytes = self.out * (2 if result == ROUNDED else 4)
        a.x, a.x_row_bytes, a.y, a.y_row_bytes, a.result = x, x_row_bytes, y, y_row_bytes, result
        row[:] = np.frombuffer(memoryview(a), np.int64)
        return self._kernel.address, row.ctypes.data


def compile_kernel(
    tile: Callable[[int], str], max_rows: int, feature: str, *declarations: str
) -> Compiled:
    """`tile(rows)` is the text of `void tile<rows>(TILE_ARGUMENTS)`, for up to `max_rows` rows.

    `feature`, as LLVM names it, is what the processor must have. Takes 0.05 s and more. Raises
    ImportError, AttributeError, OSError or RuntimeError where it cannot work.
    """
    from llvmlite import binding

    from twostroke.model.compiled import CPU_FEATURES, CPU_NAME, has  # here, because numba is there

    if not has(feature):
        raise RuntimeError(f"the processor has no {feature}")
    openmp = load_openmp()
    if openmp is None:
        raise RuntimeError("torch has no OpenMP with GNU's entry points")
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    target = binding.Target.from_default_triple().create_target_machine(
        cpu=CPU_NAME, features=CPU_FEATURES, opt=2, jit=True
    )
    tiles = map(tile, range(1, max_rows + 1))
    text = "\n".join([*declarations, *tiles, _main(max_rows)])
    module = binding.parse_assembly(text)
    module.verify()
    # What `head_of` puts into memory goes to registers: 2 % of a product of 576 inputs.
    passes = binding.create_new_module_pass_manager()
    passes.add_sroa_pass()
    options = binding.create_pipeline_tuning_options()
    passes.run(module, binding.create_pass_builder(target, options))
    engine = binding.create_mcjit_compiler(module, target)
    _use_object_cache(engine, f"{module}{target.triple}{CPU_NAME}{CPU_FEATURES}")
    engine.finalize_object()
    address: int = engine.get_function_address("kernel")
    run = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)
    return Compiled(engine, address, run, openmp.GOMP_parallel)


def _use_object_cache(engine: Any, key: str) -> None:
    """Machine code is kept in the user's cache directory, under the digest of all it follows from.

    Its own digest stands before it, so that what was damaged is compiled again.
    """
    file = cache_dir() / "kernels" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.o"

    def keep(_module: object, code: bytes) -> None:
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            unfinished = file.with_suffix(f".{os.getpid()}")
            unfinished.write_bytes(hashlib.sha256(code).digest() + code)
            unfinished.replace(file)

    def kept(_module: object) -> bytes | None:
        try:
            data = file.read_bytes()
        except OSError:
            return None
        return data[32:] if hashlib.sha256(data[32:]).digest() == data[:32] else None

    engine.set_object_cache(keep, kept)


# Into L2, for L1 has no room. How far ahead: a tile that takes less time than the reading waits
# anyway, and asking far ahead takes from what it waits for; one of MAX_TILE_ROWS rows need not wait
# (6 rows of 576 bfloat16: 184 to 136 us for 3,072 outputs, one thread; but 4 rows 130 to 175 us).
_PREFETCH_BYTES, _PREFETCH_INTO_L2 = 2048, 2
_FULL_TILE_BYTES = 8192
# Tiles whose steps, of as many lines each, add up to a block's lines. Where there are so many, they
# have nearly as many rows each: a tile of one row takes as long as one of three. (Of fewer tiles
# the first had better be full, for it waits for the memory.)
_ASKING = VECTORS
_BEGIN_BYTES = 10240  # of its first block that a thread asks for before it begins
PREFETCH = "declare void @llvm.prefetch.p0(ptr, i32, i32, i32)"
VPDPBUSD = "declare <16 x i32> @llvm.x86.avx512.vpdpbusd.512(<16 x i32>, <16 x i32>, <16 x i32>)"
TILE_ARGUMENTS = (
    *("weight", "next_weight", "bias", "x", "x_row_bytes", "y", "y_row_bytes", "result"),
    *("row", "first", "second", "asked", "asked_shift", "rest"),
)


def head_of(rows: int) -> list[str]:
    """The beginning of a tile, with `%total` of each row and vector in memory, zeroed.

    A row's lie side by side, from its `%totals` on.
    """
    arguments = ", ".join(f"i64 %{name}" for name in TILE_ARGUMENTS)
    lines = [
        f"define internal void @tile{rows}({arguments}) {{",
        "entry:",
        *(f"%totals{r} = alloca [{VECTORS} x <16 x float>], align 64" for r in range(rows)),
    ]
    for r, v in cells_of(rows):
        lines += [
            f"%total{r}_{v} = getelementptr i8, ptr %totals{r}, i64 {64 * v}",
            f"store <16 x float> zeroinitializer, ptr %total{r}_{v}",
        ]
    return lines


def cells_of(rows: int) -> list[tuple[int, int]]:
    return [(r, v) for r in range(rows) for v in range(VECTORS)]


def row_pointer(name: str, address: str, row_bytes: str, row: int) -> list[str]:
    """%name = the address of a row, as a pointer."""
    return [
        f"%{name}_row = mul i64 %{row_bytes}, {row}",
        f"%{name}_at = add i64 %{address}, %{name}_row",
        f"%{name} = inttoptr i64 %{name}_at to ptr",
    ]


def broadcast(name: str, pointer: str) -> list[str]:
    """%name = the 4 bytes there in all 16 places, as <16 x i32>."""
    return [
        f"%{name}_word = load i32, ptr %{pointer}, align 2",
        f"%{name}_one = insertelement <16 x i32> poison, i32 %{name}_word, i32 0",
        f"%{name} = shufflevector <16 x i32> %{name}_one, <16 x i32> poison, "
        "<16 x i32> zeroinitializer",
    ]


def prefetch(name: str, pointer: str, offset: int) -> list[str]:
    """Ask the memory for the line at `pointer` + `offset`."""
    return [
        f"%{name} = getelementptr i8, ptr %{pointer}, i64 {offset}",
        f"call void @llvm.prefetch.p0(ptr %{name}, i32 0, i32 {_PREFETCH_INTO_L2}, i32 1)",
    ]


def prefetch_for_step(step: str) -> list[str]:
    """Ask the memory for as many bytes as a step reads, 256: a line after `asked`, where steps are
    2 ** `asked_shift` bytes apart, and three after `rest`.

    A tile asks for what it comes to itself, further on; where it is not the first of a block, which
    by then is near, for the next block. Between many rows and the next block there is time: each of
    the first _ASKING tiles asks for its part of that, a line a step, for all at once would take
    what reads the block itself needs.
    """
    lines = []
    for base, shift in (("asked", "%asked_shift"), ("rest", "8")):
        lines += [
            f"%{base}_offset = shl i64 %{step}, {shift}",
            f"%{base}_at = add i64 %{base}, %{base}_offset",
            f"%{base}_p = inttoptr i64 %{base}_at to ptr",
        ]
    return [
        *lines,
        *prefetch("ahead0", "asked_p", 0),
        *(line for v in range(1, VECTORS) for line in prefetch(f"ahead{v}", "rest_p", 64 * v)),
    ]


def add_to(total: str, value: str, what: str) -> list[str]:
    """*total += value"""
    return [
        f"%{total}_{what}0 = load <16 x float>, ptr %{total}",
        f"%{total}_{what}1 = fadd <16 x float> %{total}_{what}0, %{value}",
        f"store <16 x float> %{total}_{what}1, ptr %{total}",
    ]


def tail_of(rows: int) -> list[str]:
    """From the label `summed` on: add the bias, write y, return."""
    lines = [
        "summed:",
        "%biased = icmp ne i64 %bias, 0",
        "br i1 %biased, label %add_bias, label %store",
        "add_bias:",
        "%bias_p = inttoptr i64 %bias to ptr",
    ]
    for v in range(VECTORS):
        lines += [
            f"%bias_p{v} = getelementptr i8, ptr %bias_p, i64 {32 * v}",
            f"%bias_b{v} = load <16 x bfloat>, ptr %bias_p{v}, align 2",
            f"%bias_f{v} = fpext <16 x bfloat> %bias_b{v} to <16 x float>",
            *(line for r in range(rows) for line in add_to(f"total{r}_{v}", f"bias_f{v}", "bias")),
        ]
    lines += [
        "br label %store",
        "store:",
        f"switch i64 %result, label %store_rounded "
        f"[ i64 {WIDE}, label %store_wide i64 {ADDED}, label %store_added ]",
    ]
    for result, name in ((ROUNDED, "rounded"), (WIDE, "wide"), (ADDED, "added")):
        stores = (line for r in range(rows) for line in _store(r, result))
        lines += [f"store_{name}:", *stores, "ret void"]
    return [*lines, "}"]


def _store(row: int, result: int) -> list[str]:
    """Write a row's 64 results to y, or add them to what is there."""
    y = f"y{result}_{row}"
    lines = row_pointer(y, "y", "y_row_bytes", row)
    for v in range(VECTORS):
        n = f"{result}_{row}_{v}"
        size = 2 if result == ROUNDED else 4
        lines += [
            f"%result{n} = load <16 x float>, ptr %total{row}_{v}",
            f"%y_p{n} = getelementptr i8, ptr %{y}, i64 {16 * size * v}",
        ]
        if result == ROUNDED:
            lines += [*_round(n), f"store <16 x i16> %rounded{n}, ptr %y_p{n}, align 2"]
            continue
        if result == ADDED:
            lines += [
                f"%there{n} = load <16 x float>, ptr %y_p{n}, align 4",
                f"%added{n} = fadd <16 x float> %there{n}, %result{n}",
            ]
        value = f"%added{n}" if result == ADDED else f"%result{n}"
        lines.append(f"store <16 x float> {value}, ptr %y_p{n}, align 4")
    return lines


def _block_of(name: str, ticket: str) -> str:
    """The block that a ticket stands for; the one after all is the last one's second half."""
    return f"""%{name}is_beyond = icmp eq i64 %{ticket}, %blocks
%{name}is_second_half = and i1 %{name}is_beyond, %halves_last
%{name}one = zext i1 %{name}is_second_half to i64
%{name}place = sub i64 %{ticket}, %{name}one
%{name}block = urem i64 %{name}place, %blocks"""


def _round(n: str) -> list[str]:
    """%rounded = %result as bfloat16, as `compiled.to_bf16` rounds; without the processor's own
    conversion LLVM would call a function for it that nobody has."""
    from twostroke.model.compiled import HAS_BF16

    if HAS_BF16:
        return [
            f"%bf16s{n} = fptrunc <16 x float> %result{n} to <16 x bfloat>",
            f"%rounded{n} = bitcast <16 x bfloat> %bf16s{n} to <16 x i16>",
        ]
    return [
        f"%bits{n} = bitcast <16 x float> %result{n} to <16 x i32>",
        f"%halved{n} = lshr <16 x i32> %bits{n}, splat (i32 16)",
        f"%tie{n} = and <16 x i32> %halved{n}, splat (i32 1)",
        f"%half{n} = add <16 x i32> %tie{n}, splat (i32 32767)",
        f"%raised{n} = add <16 x i32> %bits{n}, %half{n}",
        f"%quiet{n} = or <16 x i32> %bits{n}, splat (i32 4194304)",
        f"%is_nan{n} = fcmp uno <16 x float> %result{n}, zeroinitializer",
        f"%whole{n} = select <16 x i1> %is_nan{n}, <16 x i32> %quiet{n}, <16 x i32> %raised{n}",
        f"%upper{n} = lshr <16 x i32> %whole{n}, splat (i32 16)",
        f"%rounded{n} = trunc <16 x i32> %upper{n} to <16 x i16>",
    ]


def _main(max_rows: int) -> str:
    """One thread's share: blocks by ticket; in a block, tiles of rows."""
    fields = "\n".join(
        f"%{name}_p = getelementptr i64, ptr %arguments, i64 {i}\n"
        + (f"%{name} = load i64, ptr %{name}_p" if name != "ticket" else "")
        for i, name in enumerate(ARGUMENTS)
    )
    asking_rows = _ASKING * max_rows
    tiles = range(1, max_rows + 1)
    cases = " ".join(f"i64 {n}, label %rows{n}" for n in tiles)
    arguments = (
        "i64 %block_weight, i64 %next_weight, i64 %block_bias, i64 %tile_x, i64 %x_row_bytes, "
        "i64 %tile_y, i64 %y_row_bytes, i64 %result, i64 %row, i64 %first, i64 %second, "
        "i64 %asked, i64 %asked_shift, i64 %rest"
    )
    calls = "\n".join(
        f"rows{n}:\ncall void @tile{n}({arguments})\nbr label %tile_done" for n in tiles
    )
    return f"""
define void @kernel(ptr %arguments) {{
entry:
{fields}
%biased = icmp ne i64 %bias, 0
%more_rows = add i64 %rows, {_CHUNK_ROWS - 1}
%chunks = udiv i64 %more_rows, {_CHUNK_ROWS}
%whole_tickets = mul i64 %chunks, %blocks
%is_one_chunk = icmp eq i64 %chunks, 1
%has_two_rows = icmp uge i64 %rows, 2
%halves_last = and i1 %is_one_chunk, %has_two_rows
%one_more = zext i1 %halves_last to i64
%tickets = add i64 %whole_tickets, %one_more
%more_than_half = add i64 %rows, 1
%half_row = lshr i64 %more_than_half, 1
%first_taken = atomicrmw add ptr %ticket_p, i64 1 monotonic
%begins = icmp ult i64 %first_taken, %blocks
br i1 %begins, label %begin, label %start_taking
begin:
%begin_offset = mul i64 %first_taken, %block_bytes
%begin_at = add i64 %weight, %begin_offset
%begin_p = inttoptr i64 %begin_at to ptr
%is_short = icmp ult i64 %block_bytes, {_BEGIN_BYTES}
%begin_bytes = select i1 %is_short, i64 %block_bytes, i64 {_BEGIN_BYTES}
br label %begin_line
begin_line:
%begin_byte = phi i64 [ 0, %begin ], [ %begin_byte1, %begin_line ]
%line_p = getelementptr i8, ptr %begin_p, i64 %begin_byte
call void @llvm.prefetch.p0(ptr %line_p, i32 0, i32 {_PREFETCH_INTO_L2}, i32 1)
%begin_byte1 = add i64 %begin_byte, 64
%more_lines = icmp ult i64 %begin_byte1, %begin_bytes
br i1 %more_lines, label %begin_line, label %start_taking
start_taking:
br label %take
take:
%taken = phi i64 [ %first_taken, %start_taking ], [ %next_taken, %tile_done ]
%is_taken = icmp ult i64 %taken, %tickets
br i1 %is_taken, label %start, label %done
start:
%next_taken = atomicrmw add ptr %ticket_p, i64 1 monotonic
%is_next = icmp ult i64 %next_taken, %tickets
%next_or_same = select i1 %is_next, i64 %next_taken, i64 %taken
{_block_of("next_", "next_or_same")}
%next_offset = mul i64 %next_block, %block_bytes
%next_weight = add i64 %weight, %next_offset
{_block_of("", "taken")}
%chunk = udiv i64 %place, %blocks
%chunk_row = mul i64 %chunk, {_CHUNK_ROWS}
%first_row = select i1 %is_second_half, i64 %half_row, i64 %chunk_row
%whole_end = add i64 %first_row, {_CHUNK_ROWS}
%is_last = icmp sgt i64 %whole_end, %rows
%chunk_end = select i1 %is_last, i64 %rows, i64 %whole_end
%after = add i64 %taken, 1
%is_last_block = icmp eq i64 %after, %blocks
%is_first_half = and i1 %is_last_block, %halves_last
%end_row = select i1 %is_first_half, i64 %half_row, i64 %chunk_end
%weight_offset = mul i64 %block, %block_bytes
%block_weight = add i64 %weight, %weight_offset
%is_rounded = icmp eq i64 %result, {ROUNDED}
%y_shift = select i1 %is_rounded, i64 7, i64 8
%y_offset = shl i64 %block, %y_shift
%block_y = add i64 %y, %y_offset
%bias_offset = shl i64 %block, 7
%bias_at = add i64 %bias, %bias_offset
%block_bias = select i1 %biased, i64 %bias_at, i64 0
%ticket_rows = sub i64 %end_row, %first_row
%are_many = icmp sge i64 %ticket_rows, {asking_rows}
br label %tile
tile:
%row = phi i64 [ %first_row, %start ], [ %row1, %tile_done ]
%x_offset = mul i64 %row, %x_row_bytes
%tile_x = add i64 %x, %x_offset
%tile_y_offset = mul i64 %row, %y_row_bytes
%tile_y = add i64 %block_y, %tile_y_offset
%rows_before = sub i64 %row, %first_row
%is_early = icmp slt i64 %rows_before, {asking_rows}
%asks = and i1 %are_many, %is_early
%part = mul i64 %rows_before, %block_bytes
%asked_before = udiv i64 %part, {asking_rows}
%next_part = add i64 %next_weight, %asked_before
%left = sub i64 %end_row, %row
%left_and_more = add i64 %left, {max_rows - 1}
%tiles_left = udiv i64 %left_and_more, {max_rows}
%left_and_tiles = add i64 %left, %tiles_left
%left_to_share = sub i64 %left_and_tiles, 1
%even_count = udiv i64 %left_to_share, %tiles_left
%many = icmp sgt i64 %left, {max_rows}
%full_count = select i1 %many, i64 {max_rows}, i64 %left
%count = select i1 %are_many, i64 %even_count, i64 %full_count
%is_full = icmp eq i64 %count, {MAX_TILE_ROWS}
%bytes_ahead = select i1 %is_full, i64 {_FULL_TILE_BYTES}, i64 {_PREFETCH_BYTES}
%near = add i64 %block_weight, %bytes_ahead
%is_first = icmp eq i64 %rows_before, 0
%is_here = or i1 %are_many, %is_first
%rest = select i1 %is_here, i64 %near, i64 %next_weight
%asked = select i1 %asks, i64 %next_part, i64 %rest
%asked_shift = select i1 %asks, i64 6, i64 8
switch i64 %count, label %tile_done [ {cases} ]
{calls}
tile_done:
%row1 = add i64 %row, %count
%more = icmp slt i64 %row1, %end_row
br i1 %more, label %tile, label %take
done:
ret void
}}
"""
