"""Vector code of the CPU attention, emitted as LLVM IR through numba intrinsics.

LLVM's own vectoriser reaches a fifth of what the machine can do on these loops: it neither blocks
for registers nor folds the horizontal sums of a dot product. So the few inner loops are written
here with explicit vectors; LLVM turns them into AVX-512, AVX2, NEON or scalar code, so they are
right on any CPU. Everything is passed by address (an int64): no array objects in the inner loops.

The unit. All loads from the pool are of 32-bit units: one float32, or a pair of 16-bit elements.
A vector of units is widened into *planes* of float32 by a shift and a mask: plane 0 holds the even
elements, plane 1 the odd ones (float32: one plane). Scratch rows keep planes apart:

    pool row   e0 o0 e1 o1 e2 o2 ...          units u0 u1 u2 ...
    scratch    e0 e1 e2 ... | o0 o1 o2 ...    each plane padded with zeros to `padded` floats

A dot product does not care about the order, and the output is put together again at the end.

"""

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from twostroke.model.compiled import BFloatType, has

_AVX512 = has("avx512f")
# Products of pairs of 16-bit numbers (see attention_dots).
HAS_DOTS = has("avx512bw", "avx512vnni", "avx512bf16")
# Accumulators must stay in registers: 24 of 32 with AVX-512, 12 of 16 with AVX2 (NEON: 24 of 32).
LANES = 16 if _AVX512 else 8
MAX_ROWS = 6 if _AVX512 else 3


_I32, _I64, _F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
_BF16S = ir.VectorType(BFloatType(), 2 * LANES)
_FLOATS = ir.VectorType(_F32, LANES)
_UNITS = ir.VectorType(_I32, LANES)
Value: TypeAlias = Any  # of llvmlite, which has no types

# 2**x on [-0.5, 0.5], lowest power first: least relative error in float32 at degree 5
# with 2**0 exactly 1: 9.1e-08.
_EXP2 = (1.0, 0.693146978, 0.240222421, 0.0555073377, 0.00967151277, 0.00132647151)
# The same on [0, 1] at degree 3, for results that are rounded to bfloat16 (2e-3): 8.6e-05.
_EXP2_ROUGH = (1.0, 0.695116790, 0.227644975, 0.0770670552)


def planes_of(dtype: types.Type) -> int:
    return 1 if dtype == types.float32 else 2


class Emitter:
    """Emits vector operations at the builder's position, for one element type."""

    integers = _UNITS
    words = ir.VectorType(ir.IntType(16), LANES)  # pairs of bytes
    bytes = ir.VectorType(ir.IntType(8), 2 * LANES)

    def __init__(self, builder: ir.IRBuilder, dtype: types.Type) -> None:
        self.builder = builder
        self.dtype = dtype
        self.planes = planes_of(dtype)

    # -- constants and scalars

    def const(self, value: int) -> Value:
        return ir.Constant(_I64, value)

    def splat(self, value: Value, lanes: int = LANES) -> Value:
        vector = ir.VectorType(value.type, lanes)
        one = self.builder.insert_element(
            ir.Constant(vector, ir.Undefined), value, ir.Constant(_I32, 0)
        )
        zeros = ir.Constant(ir.VectorType(_I32, lanes), [0] * lanes)
        return self.builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), zeros)

    def floats(self, value: float) -> Value:
        return ir.Constant(_FLOATS, [value] * LANES)

    def float(self, value: float) -> Value:
        return ir.Constant(_F32, value)

    def units(self, value: int) -> Value:
        return ir.Constant(_UNITS, [value] * LANES)

    def at(self, address: Value, offset: Value | int, scale: int = 4) -> Value:
        """address + offset * scale."""
        if isinstance(offset, int):
            return self.builder.add(address, self.const(offset * scale)) if offset else address
        return self.builder.add(address, self.builder.mul(offset, self.const(scale)))

    def call(self, name: str, result: ir.Type, *arguments: Value) -> Value:
        kind = ir.FunctionType(result, [a.type for a in arguments])
        function = cgutils.get_or_insert_function(self.builder.module, kind, name)
        return self.builder.call(function, arguments)

    # -- memory (alignment is that of an element, never assumed better)

    def load(self, address: Value, kind: ir.Type, align: int = 4) -> Value:
        return self.builder.load(self.builder.inttoptr(address, kind.as_pointer()), align=align)

    def store(self, value: Value, address: Value, align: int = 4) -> None:
        pointer = self.builder.inttoptr(address, value.type.as_pointer())
        self.builder.store(value, pointer, align=align)

    def load_floats(self, address: Value) -> Value:
        return self.load(address, _FLOATS)

    def load_address(self, table: Value, index: Value, offset: int = 0) -> Value:
        """table[index + offset]."""
        return self.load(self.at(self.at(table, index, 8), offset, 8), _I64, align=8)

    def plane(self, start: Value, number: int, padded: Value, unit: Value) -> Value:
        """Address of float `unit` of plane `number`, counted over all rows from `start`."""
        row = self.builder.mul(padded, self.const(number))
        return self.at(start, self.builder.add(row, unit))

    def query(self, queries: Value, number: int, padded: Value, unit: Value) -> Value:
        """Address of a unit of query `number` in scratch, where it is not widened."""
        return self.plane(queries, 2 * number, padded, unit)

    def prefetch(self, address: Value) -> None:
        pointer = self.builder.inttoptr(address, _UNITS.as_pointer())
        arguments = (ir.Constant(_I32, i) for i in (0, 2, 1))  # read, into L2, data
        self.call("llvm.prefetch.p0", ir.VoidType(), pointer, *arguments)

    def prefetch_row(self, address: Value, num_units: Value) -> None:
        """Line by line: what a core asks for in order, its own prefetching helps along."""
        self.per_chunk(num_units, lambda unit, _mask: self.prefetch(self.at(address, unit)))

    def prefetch_bytes(self, address: Value, num_units: Value) -> None:
        """The same for pairs of bytes, and the scale behind them."""
        scale = self.at(self.const(1), num_units, 2)
        with self.loop(self.const(0), scale, 64) as offset:
            self.prefetch(self.builder.add(address, offset))

    def broadcast(self, address: Value) -> Value:
        return self.splat(self.load(address, _F32))

    def lanes_below(self, count: Value) -> Value:
        """Mask of the lanes whose number is below `count` (int64, of 32 bits)."""
        iota = ir.Constant(_UNITS, list(range(LANES)))
        return self.builder.icmp_signed("<", iota, self.splat(self.builder.trunc(count, _I32)))

    def load_units(self, address: Value, mask: Value | None = None) -> Value:
        return self._load_masked(address, _UNITS, 4, mask)

    def store_units(self, value: Value, address: Value, mask: Value | None = None) -> None:
        self._store_masked(value, address, 4, mask)

    def load_words(self, address: Value, mask: Value | None = None) -> Value:
        """16 pairs of bytes, at any address."""
        return self._load_masked(address, self.words, 1, mask)

    def store_words(self, value: Value, address: Value, mask: Value | None = None) -> None:
        self._store_masked(value, address, 1, mask)

    def _load_masked(self, address: Value, kind: ir.Type, align: int, mask: Value | None) -> Value:
        if mask is None:
            return self.load(address, kind, align)
        pointer = self.builder.inttoptr(address, kind.as_pointer())
        name = f"llvm.masked.load.v{LANES}{kind.element}.p0"
        return self.call(
            name, kind, pointer, ir.Constant(_I32, align), mask, ir.Constant(kind, None)
        )

    def _store_masked(self, value: Value, address: Value, align: int, mask: Value | None) -> None:
        if mask is None:
            self.store(value, address, align)
            return
        pointer = self.builder.inttoptr(address, value.type.as_pointer())
        name = f"llvm.masked.store.v{LANES}{value.type.element}.p0"
        self.call(name, ir.VoidType(), value, pointer, ir.Constant(_I32, align), mask)

    # -- element types

    def widen(self, units: Value) -> list[Value]:
        """A vector of units -> its planes."""
        b = self.builder
        if self.dtype == types.float32:
            return [b.bitcast(units, _FLOATS)]
        if self.dtype != types.int16:  # bfloat16 is the upper half of a float32
            even = b.shl(units, self.units(16))
            odd = b.and_(units, self.units(0xFFFF0000))
            return [b.bitcast(even, _FLOATS), b.bitcast(odd, _FLOATS)]
        halves = ir.VectorType(ir.HalfType(), LANES)
        words = ir.VectorType(ir.IntType(16), LANES)
        parts = (units, b.lshr(units, self.units(16)))
        return [b.fpext(b.bitcast(b.trunc(part, words), halves), _FLOATS) for part in parts]

    def narrow(self, planes: Sequence[Value]) -> Value:
        """The inverse of `widen`, rounding to nearest even."""
        b = self.builder
        if self.dtype == types.float32:
            return b.bitcast(planes[0], _UNITS)
        if self.dtype == types.uint16:
            even, odd = (self._round_to_bf16(plane) for plane in planes)
            return b.or_(b.lshr(even, self.units(16)), odd)
        halves = ir.VectorType(ir.HalfType(), LANES)
        words = ir.VectorType(ir.IntType(16), LANES)
        even, odd = (b.zext(b.bitcast(b.fptrunc(p, halves), words), _UNITS) for p in planes)
        return b.or_(even, b.shl(odd, self.units(16)))

    def _round_to_bf16(self, plane: Value) -> Value:
        """The bfloat16 nearest to each float, in the upper half of its lane."""
        b = self.builder
        bits = b.bitcast(plane, _UNITS)
        tie = b.and_(b.lshr(bits, self.units(16)), self.units(1))
        rounded = b.add(bits, b.add(tie, self.units(0x7FFF)))
        # Rounding could carry a NaN's payload into its sign: keep NaNs as they are, quiet.
        quiet = b.or_(bits, self.units(0x400000))
        whole = b.select(b.fcmp_unordered("uno", plane, plane), quiet, rounded)
        return b.and_(whole, self.units(0xFFFF0000))

    # -- arithmetic

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        # fmuladd: fused where the CPU has it; llvm.fma would call libm where it has not.
        return self.call(f"llvm.fmuladd.v{LANES}f32", _FLOATS, a, b, c)

    def exp2(self, x: Value) -> Value:
        """2**x for x <= 0; below 2**-126 it stays there. NaN stays NaN."""
        b = self.builder
        low = self.floats(-126.0)
        x = b.select(b.fcmp_ordered("<", x, low), low, x)
        # Adding 1.5 * 2**23 rounds to an integer and leaves it in the low bits of the mantissa.
        magic = self.floats(12582912.0)
        shifted = b.fadd(x, magic)
        fraction = b.fsub(x, b.fsub(shifted, magic))
        result = self.floats(_EXP2[-1])
        for coefficient in reversed(_EXP2[:-1]):
            result = self.fma(result, fraction, self.floats(coefficient))
        exponent = b.shl(b.bitcast(shifted, _UNITS), self.units(23))
        return b.bitcast(b.add(b.bitcast(result, _UNITS), exponent), _FLOATS)

    def exp2_rough(self, x: Value) -> Value:
        """2**x for x <= 0, to 8.6e-05; AVX-512 only. NaN stays NaN."""
        zeros, all_lanes = self.floats(0.0), ir.Constant(ir.IntType(16), -1)
        to_floor = ir.Constant(_I32, 0b1001)  # what is left above the next integer below; quietly
        fraction = self.call(
            "llvm.x86.avx512.mask.reduce.ps.512",
            *(_FLOATS, x, to_floor, zeros, all_lanes, ir.Constant(_I32, 4)),
        )
        result = self.floats(_EXP2_ROUGH[-1])
        for coefficient in reversed(_EXP2_ROUGH[:-1]):
            result = self.fma(result, fraction, self.floats(coefficient))
        return self.call(  # result * 2**floor(x)
            "llvm.x86.avx512.mask.scalef.ps.512",
            *(_FLOATS, result, x, zeros, all_lanes, ir.Constant(_I32, 4)),
        )

    def add_dots(self, slot: Value, a: Value, b: Value) -> None:
        """Each lane of a and b is a pair of bfloat16; their dot product is added to its float."""
        pairs = (self.builder.bitcast(units, _BF16S) for units in (a, b))
        total = self.builder.load(slot)
        name = "llvm.x86.avx512bf16.dpbf16ps.512"
        self.builder.store(self.call(name, _FLOATS, total, *pairs), slot)

    def add_int_dots(self, slot: Value, a: Value, b: Value) -> None:
        """The same with pairs of int16, added to an int32."""
        total = self.builder.load(slot)
        name = "llvm.x86.avx512.vpdpwssd.512"
        self.builder.store(self.call(name, _UNITS, total, a, b), slot)

    def add_byte_dots(self, slot: Value, unsigned: Value, signed: Value) -> None:
        """The same with fours of bytes."""
        total = self.builder.load(slot)
        name = "llvm.x86.avx512.vpdpbusd.512"
        self.builder.store(self.call(name, _UNITS, total, unsigned, signed), slot)

    def to_bf16s(self, values: Value) -> Value:
        """16 floats -> 16 bfloat16, rounding to nearest even."""
        return self.builder.fptrunc(values, ir.VectorType(BFloatType(), LANES))

    def bf16_units(self, a: Value, b: Value) -> Value:
        """Twice 16 bfloat16 -> a vector of units."""
        return self.builder.bitcast(self.shuffle(a, b, range(2 * LANES)), _UNITS)

    def interleave(self, a: Value, b: Value) -> tuple[Value, Value]:
        """Two rows of 32 16-bit elements -> pairs of (a, b): units of elements 0-15 and 16-31."""
        words = ir.VectorType(ir.IntType(16), 2 * LANES)
        one, two = (self.builder.bitcast(units, words) for units in (a, b))
        low = [i for lane in range(LANES) for i in (lane, 2 * LANES + lane)]
        both = (self.shuffle(one, two, [i + start for i in low]) for start in (0, LANES))
        first, second = (self.builder.bitcast(units, _UNITS) for units in both)
        return first, second

    def broadcast_unit(self, address: Value) -> Value:
        return self.splat(self.load(address, _I32, align=2))

    def shuffle(self, a: Value, b: Value, lanes: Sequence[int]) -> Value:
        mask = ir.Constant(ir.VectorType(_I32, len(lanes)), list(lanes))
        return self.builder.shuffle_vector(a, b, mask)

    def maximum(self, a: Value, b: Value) -> Value:
        return self.builder.select(self.builder.fcmp_ordered(">", a, b), a, b)

    def larger_magnitude(self, a: Value, b: Value) -> Value:
        """The larger of |a| and |b|, AVX-512 only; of a number and NaN, the number."""
        all_lanes = ir.Constant(ir.IntType(16), -1)
        largest_without_sign = ir.Constant(_I32, 0b1011)
        return self.call(
            "llvm.x86.avx512.mask.range.ps.512",
            *(_FLOATS, a, b, largest_without_sign, self.floats(0.0), all_lanes),
            ir.Constant(_I32, 4),
        )

    def least(self, a: Value, b: Value) -> Value:
        """Of two int64."""
        return self.builder.select(self.builder.icmp_signed("<", a, b), a, b)

    def greatest(self, a: Value, b: Value) -> Value:
        return self.builder.select(self.builder.icmp_signed(">", a, b), a, b)

    def fold(self, operation: Callable[[Value, Value], Value], vectors: Sequence[Value]) -> Value:
        """Reduce all lanes of all vectors to one number, in a fixed order."""
        total = functools.reduce(operation, vectors)
        width = LANES
        while width > 1:
            width //= 2
            total = operation(
                self.shuffle(total, total, range(width)),
                self.shuffle(total, total, range(width, 2 * width)),
            )
        return self.builder.extract_element(total, ir.Constant(_I32, 0))

    def row_sum(self, state: Value) -> Value:
        """The sum of weights in a row's softmax state."""
        return self.fold(self.builder.fadd, [self.load_floats(self.at(state, LANES))])

    def transpose(self, rows: Sequence[Value]) -> list[Value]:
        """A square of LANES vectors of LANES units."""
        quads = range(0, LANES, 4)
        first = [i for q in quads for i in (q, LANES + q, q + 1, LANES + q + 1)]
        rows = self._interleave(rows, first, 2)
        second = [i for q in quads for i in (q, q + 1, LANES + q, LANES + q + 1)]
        columns = [self._interleave(rows[i::2], second, 2) for i in range(2)]
        # Now quad q of a vector holds column 4 q + c of four rows, c = 0, 1 | 2, 3.
        by_column = [columns[c // 2][c % 2 :: 2] for c in range(4)]
        lanes = [i for q in range(0, LANES, 8) for i in range(q, q + 4)]
        even = [*lanes, *(LANES + i for i in lanes)]
        square: list[list[Value]] = []
        for group in by_column:
            parts = self._interleave(group, even, 4)
            if len(parts) == 4:
                low, high = parts[0::2], parts[1::2]
                parts = [*self._interleave(low, even, 4), *self._interleave(high, even, 4)]
                parts = [parts[0], parts[2], parts[1], parts[3]]
            square.append(parts)
        return [square[i % 4][i // 4] for i in range(LANES)]

    def _interleave(self, rows: Sequence[Value], low: Sequence[int], step: int) -> list[Value]:
        """Shuffle neighbours pairwise by the lanes `low`, then by those `step` further."""
        high = [i + step for i in low]
        pairs = zip(rows[::2], rows[1::2], strict=True)
        return [self.shuffle(a, b, lanes) for a, b in pairs for lanes in (low, high)]

    def sum_each(self, vectors: Sequence[Value]) -> Value:
        """4 or 8 vectors -> one vector of their sums, three operations a sum."""
        quads = [self._sum_quad(vectors[i : i + 4]) for i in range(0, len(vectors), 4)]
        if len(quads) == 1:
            total, width = quads[0], LANES
        else:
            half = list(range(LANES // 2))
            low = [*half, *(LANES + i for i in half)]
            high = [i + LANES // 2 for i in low]
            total = self._add_shuffled(quads[0], quads[1], low, high)
            width = LANES // 2  # floats that hold the partial sums of one quad
        count = LANES
        while width > 4:
            starts = range(0, count, width)
            low = [s + i for s in starts for i in range(width // 2)]
            total = self._add_shuffled(total, total, low, [i + width // 2 for i in low])
            width, count = width // 2, count // 2
        return total

    def _sum_quad(self, vectors: Sequence[Value]) -> Value:
        """a, b, c, d -> [a b c d] of partial sums in each group of four lanes."""
        lanes = range(0, LANES, 4)
        low = [i for q in lanes for i in (q, LANES + q, q + 1, LANES + q + 1)]
        ab, cd = (
            self._add_shuffled(vectors[i], vectors[i + 1], low, [j + 2 for j in low])
            for i in (0, 2)
        )
        low = [i for q in lanes for i in (q, q + 1, LANES + q, LANES + q + 1)]
        return self._add_shuffled(ab, cd, low, [j + 2 for j in low])

    def _add_shuffled(self, a: Value, b: Value, low: Sequence[int], high: Sequence[int]) -> Value:
        add = self.builder.fadd if a.type.element == _F32 else self.builder.add
        return add(self.shuffle(a, b, low), self.shuffle(a, b, high))

    # -- control flow

    @contextmanager
    def loop(self, start: Value, stop: Value, step: int = 1) -> Iterator[Value]:
        with cgutils.for_range_slice(self.builder, start, stop, self.const(step)) as (index, _):
            yield index

    def accumulators(self, count: int, kind: ir.Type = _FLOATS) -> list[Value]:
        """Stack slots, zeroed here; LLVM keeps them in registers."""
        slots = [cgutils.alloca_once(self.builder, kind) for _ in range(count)]
        for slot in slots:
            self.builder.store(ir.Constant(kind, None), slot)
        return slots

    def add_product(self, slot: Value, a: Value, b: Value) -> None:
        self.builder.store(self.fma(a, b, self.builder.load(slot)), slot)

    def per_rows(self, rows: Value, body: Callable[[int], None]) -> None:
        """Emit `body(n)` for each n of 1 .. MAX_ROWS, and a jump to the one for `rows`."""
        done = self.builder.append_basic_block("rows.done")
        jump = self.builder.switch(rows, done)
        for count in range(1, MAX_ROWS + 1):
            block = self.builder.append_basic_block(f"rows.{count}")
            jump.add_case(self.const(count), block)
            self.builder.position_at_end(block)
            body(count)
            self.builder.branch(done)
        self.builder.position_at_end(done)

    def per_chunk(self, num_units: Value, body: Callable[[Value, Value | None], None]) -> None:
        """Emit `body(first unit, mask)` over whole vectors of units, then over a masked rest."""
        rest = self.builder.urem(num_units, self.const(LANES))
        whole = self.builder.sub(num_units, rest)
        with self.loop(self.const(0), whole, LANES) as unit:
            body(unit, None)
        with self.builder.if_then(self.builder.icmp_signed(">", rest, self.const(0))):
            body(whole, self.lanes_below(rest))

    def per_panel(
        self,
        length: Value,
        width: int,
        body: Callable[[int, Value], None],
        rest: Callable[[Value, Value], None] | None = None,
    ) -> None:
        """Emit `body(vectors, start)` over panels of `width` vectors, then over ever narrower ones.

        What is left below a vector goes to `rest(start, mask)`.
        """
        start = self.const(0)
        for vectors in [n for n in (4, 2, 1) if n <= width]:
            left = self.builder.sub(length, start)
            over = self.builder.urem(left, self.const(vectors * LANES))
            stop = self.builder.sub(length, over)
            with self.loop(start, stop, vectors * LANES) as index:
                body(vectors, index)
            start = stop
        if rest is not None:
            left = self.builder.sub(length, start)
            with self.builder.if_then(self.builder.icmp_signed(">", left, self.const(0))):
                rest(start, self.lanes_below(left))


Body: TypeAlias = Callable[..., None]  # body(emitter, *int64 values)


def simd(
    portable: Body,
    dots: Body | None = None,
    int8: Body | None = None,
    int8_scores: Body | None = None,
) -> Any:
    """Make `body(emitter, *int64 values)` a numba intrinsic, called as `body(like, *int64s)`.

    The element type is the pointee of the pointer `like`: uint16 is bfloat16, int16 is float16
    (numba has neither on a CPU), float32 and int8 are themselves, and uint8 is bfloat16 with scores
    of prompts from 8 bits. Where the CPU has products of pairs, `dots` is the body for bfloat16,
    and `int8`, or else `dots`, for int8, as `int8_scores` is for uint8. All take the same values.
    """
    parameters = list(inspect.signature(portable).parameters.values())

    def typed(_context: Any, like: types.CPointer, *_numbers: types.Type) -> Any:
        signature = types.void(like, *[types.int64] * (len(parameters) - 1))
        bodies = {types.uint16: dots, types.int8: int8 or dots, types.uint8: int8_scores or dots}
        if not HAS_DOTS:
            bodies.clear()
        body = bodies.get(like.dtype) or portable

        def generate(context: Any, builder: Any, _signature: Any, values: Any) -> Any:
            body(Emitter(builder, like.dtype), *values[1:])
            return context.get_dummy_value()

        return signature, generate

    # numba reads the parameters' names and number from here; the first is its typing context.
    like = inspect.Parameter("like", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    named = [parameters[0], like, *parameters[1:]]
    typed.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [p.replace(annotation=inspect.Parameter.empty) for p in named]
    )
    typed.__name__ = portable.__name__
    typed.__doc__ = portable.__doc__
    return intrinsic(typed)
