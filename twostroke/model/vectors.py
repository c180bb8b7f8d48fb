"""Vectors of 16 float32, in LLVM's language: for loops that numba's own vectoriser leaves slow.

It widens integers to 64 bits, goes through memory between what could stay in registers, and makes a
division of what need not be exact. Addresses are int64; nothing need be aligned.
"""

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

from llvmlite import ir
from numba.core import cgutils

from twostroke.model.compiled import HAS_BF16, BFloatType, has

LANES = 16
PAIRED = 2 * LANES  # bfloat16 in a vector of pairs
Value: TypeAlias = Any  # of llvmlite, which has no types

_I16, _I32, _F32 = ir.IntType(16), ir.IntType(32), ir.FloatType()
_FLOATS, _WORDS = ir.VectorType(_F32, LANES), ir.VectorType(_I32, LANES)
_HALVES, _PAIRS = ir.VectorType(_I16, LANES), ir.VectorType(_I16, 2 * LANES)
_EIGHTS = ir.VectorType(ir.IntType(64), LANES // 2)
_BF16S = ir.VectorType(BFloatType(), 2 * LANES)
_HAS_AVX512 = has("avx512f", "avx512dq")
_LOG2_E = 1.4426950408889634
# 2**x on [-0.5, 0.5], lowest power first, with 2**0 exactly 1: within 1.0e-04, where a bfloat16 has
# 2e-03.
_EXP2_ROUGH = (1.0, 0.693282902, 0.242210969, 0.0550090596)


class Vectors:
    """Emits operations at the builder's position."""

    def __init__(self, builder: ir.IRBuilder) -> None:
        self.builder = builder

    # -- constants, memory

    def floats(self, value: float) -> Value:
        return ir.Constant(_FLOATS, [value] * LANES)

    def words(self, value: int) -> Value:
        return ir.Constant(_WORDS, [value] * LANES)

    def splat(self, value: Value) -> Value:
        """A float32 in all lanes."""
        undefined, first = ir.Constant(_FLOATS, ir.Undefined), ir.Constant(_I32, 0)
        one = self.builder.insert_element(undefined, value, first)
        return self.builder.shuffle_vector(one, undefined, self.words(0))

    def load(self, address: Value, number: int = 0) -> Value:
        """The `number`-th vector of float32 from there."""
        return self._load(address, number, _FLOATS, 4)

    def load_words(self, address: Value, number: int = 0) -> Value:
        return self._load(address, number, _WORDS, 2)

    def load_halves(self, address: Value, number: int = 0) -> Value:
        """The `number`-th vector of bfloat16 from there, as float32."""
        return self._evens(self.builder.zext(self._load(address, number, _HALVES, 2), _WORDS))

    def moved(self, address: Value, count: Value, size: int) -> Value:
        """The address of what comes `count` times `size` bytes later."""
        return self.builder.add(address, self.builder.mul(count, ir.Constant(count.type, size)))

    def store(self, value: Value, address: Value, number: int = 0) -> None:
        self.builder.store(value, self._pointer(address, number, value.type), align=2)

    def prefetch(self, address: Value, line: int = 0) -> None:
        """Ask for a cache line that will be read, where there is one."""
        i8, void = ir.IntType(8), ir.VoidType()
        pointer = self.builder.inttoptr(address, i8.as_pointer())
        here = self.builder.gep(pointer, [ir.Constant(_I32, 64 * line)])
        read, near, data = (ir.Constant(_I32, number) for number in (0, 3, 1))
        self._call("llvm.prefetch.p0i8", void, here, read, near, data)

    def _load(self, address: Value, number: int, kind: Value, align: int) -> Value:
        return self.builder.load(self._pointer(address, number, kind), align=align)

    def _pointer(self, address: Value, number: int, kind: Value) -> Value:
        start = self.builder.inttoptr(address, kind.as_pointer())
        return self.builder.gep(start, [ir.Constant(_I32, number)])

    # -- pairs of bfloat16

    def apart(self, pairs: Value) -> tuple[Value, Value]:
        """The first and the second of each pair, as float32."""
        b = self.builder
        upper = b.and_(pairs, self.words(0xFFFF0000))
        return self._evens(pairs), b.bitcast(upper, _FLOATS)

    def paired(self, firsts: Value, seconds: Value) -> Value:
        """Pairs of one each, rounded to the nearest bfloat16."""
        if HAS_BF16:
            return self._mixed(self._both(firsts, seconds), range(LANES), range(LANES, 2 * LANES))
        b = self.builder
        lower = b.lshr(b.bitcast(self.rounded(firsts), _WORDS), self.words(16))
        return b.or_(lower, b.bitcast(self.rounded(seconds), _WORDS))

    def in_pairs(self, a: Value, b: Value) -> Value:
        """Neighbours in a, and then those in b, as pairs, rounded to the nearest bfloat16."""
        if HAS_BF16:
            return self._both(a, b)
        evens, odds = (ir.Constant(_WORDS, list(range(i, PAIRED, 2))) for i in (0, 1))
        shuffle = self.builder.shuffle_vector
        return self.paired(shuffle(a, b, evens), shuffle(a, b, odds))

    def sums_and_differences(self, pairs: Value) -> tuple[Value, Value]:
        """Of the two in each pair."""
        b = self.builder
        if not HAS_BF16:
            first, second = self.apart(pairs)
            return b.fadd(first, second), b.fsub(first, second)
        one, both = 0x3F80, b.bitcast(pairs, _BF16S)
        kinds = (self.words(one << 16 | one), self.words((one | 0x8000) << 16 | one))
        sums, differences = (
            self._call(
                "llvm.x86.avx512bf16.dpbf16ps.512",
                _FLOATS,
                *(self.floats(0.0), both, b.bitcast(signs, _BF16S)),
            )
            for signs in kinds
        )
        return sums, differences

    def _evens(self, pairs: Value) -> Value:
        return self.builder.bitcast(self.builder.shl(pairs, self.words(16)), _FLOATS)

    def _both(self, a: Value, b: Value) -> Value:
        """All of a, then all of b, as bfloat16 in one vector."""
        both = self._call("llvm.x86.avx512bf16.cvtne2ps2bf16.512", _BF16S, b, a)
        return self.builder.bitcast(both, _WORDS)

    def _mixed(self, pairs: Value, *places: Iterable[int]) -> Value:
        """The halves of a vector in another order: those of several places in turn."""
        halves = self.builder.bitcast(pairs, _PAIRS)
        order = ir.Constant(
            ir.VectorType(_I32, 2 * LANES),
            [place for group in zip(*places, strict=True) for place in group],
        )
        mixed = self.builder.shuffle_vector(halves, ir.Constant(_PAIRS, ir.Undefined), order)
        return self.builder.bitcast(mixed, _WORDS)

    # -- arithmetic

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        return self._call(f"llvm.fmuladd.v{LANES}f32", _FLOATS, a, b, c)

    def rounded(self, x: Value) -> Value:
        """The nearest bfloat16, ties to even. Infinity, and NaN as arithmetic makes it, stay."""
        b = self.builder
        bits = b.bitcast(x, _WORDS)
        tie = b.and_(b.lshr(bits, self.words(16)), self.words(1))
        carried = b.add(b.add(bits, self.words(0x7FFF)), tie)
        return b.bitcast(b.and_(carried, self.words(0xFFFF0000)), _FLOATS)

    def magnitudes(self, x: Value) -> Value:
        """Bits of |x|, whose order as integers is that of the numbers, with NaN above all."""
        return self.builder.and_(self.builder.bitcast(x, _WORDS), self.words(0x7FFFFFFF))

    def largest(self, a: Value, b: Value) -> Value:
        return self.builder.select(self.builder.icmp_signed(">", a, b), a, b)

    def largest_lane(self, x: Value) -> Value:
        """Of int32."""
        return self._call(f"llvm.vector.reduce.smax.v{LANES}i32", _I32, x)

    def sum_of_lanes(self, x: Value) -> Value:
        """Of int32."""
        return self._call(f"llvm.vector.reduce.add.v{LANES}i32", _I32, x)

    def silu_multiply(self, gate: Value, up: Value) -> Value:
        """SiLU(gate) * up; all are pairs of bfloat16."""
        both = zip(self.apart(gate), self.apart(up), strict=True)
        first, second = (self.builder.fmul(self._silu(one), other) for one, other in both)
        return self.paired(first, second)

    def _silu(self, x: Value) -> Value:
        """x / (1 + e**-x), to 2e-04."""
        b = self.builder
        below = b.fadd(self._exp_rough_of_minus(self._within(x, 87.0)), self.floats(1.0))
        if not _HAS_AVX512:
            return b.fdiv(x, below)
        inverse = self._call_512("rcp14", below)
        return b.fmul(x, inverse)

    def _within(self, x: Value, limit: float) -> Value:
        """x, or the nearest within +-limit."""
        b, end = self.builder, self.floats(limit)
        if _HAS_AVX512:
            smaller_with_sign = ir.Constant(_I32, 0b0010)
            every, rounding = ir.Constant(_I16, -1), ir.Constant(_I32, 4)
            return self._call(
                "llvm.x86.avx512.mask.range.ps.512",
                _FLOATS,
                x,
                end,
                smaller_with_sign,
                self.floats(0.0),
                every,
                rounding,
            )
        for relation, end in ((">", -limit), ("<", limit)):
            x = b.select(b.fcmp_ordered(relation, x, self.floats(end)), x, self.floats(end))
        return x

    def _exp_rough_of_minus(self, x: Value) -> Value:
        """e**-x for x within +-87."""
        b = self.builder
        factor = self.floats(-_LOG2_E)
        # Adding 1.5 * 2**23 rounds to an integer and leaves it in the low bits of the mantissa.
        magic = self.floats(12582912.0)
        shifted = self.fma(x, factor, magic)
        fraction = self.fma(x, factor, b.fsub(magic, shifted))
        result = self.floats(_EXP2_ROUGH[-1])
        for coefficient in reversed(_EXP2_ROUGH[:-1]):
            result = self.fma(result, fraction, self.floats(coefficient))
        exponent = b.shl(b.bitcast(shifted, _WORDS), self.words(23))
        return b.bitcast(b.add(b.bitcast(result, _WORDS), exponent), _FLOATS)

    def _call_512(self, name: str, x: Value) -> Value:
        every, zeros = ir.Constant(_I16, -1), self.floats(0.0)
        return self._call(f"llvm.x86.avx512.{name}.ps.512", _FLOATS, x, zeros, every)

    def _call(self, name: str, result: Value, *arguments: Value) -> Value:
        kind = ir.FunctionType(result, [argument.type for argument in arguments])
        function = cgutils.get_or_insert_function(self.builder.module, kind, name)
        return self.builder.call(function, arguments)

    def hadamard(self, pairs: Sequence[Value]) -> list[Value]:
        """All these values, bfloat16, times the Hadamard matrix of entries +-1; for each vector of
        pairs one of what becomes of the first and one of what becomes of the second of each.

        Rounds of sums and differences of what is 1, 2, 4, ... apart: within a vector a value's
        partner is brought by a shuffle, and one multiplication by +-1 and addition makes both.
        """
        b = self.builder
        rows = [row for pair in pairs for row in self.sums_and_differences(pair)]
        for apart in (1, 2, 4, 8):
            order = ir.Constant(_WORDS, [i ^ apart for i in range(LANES)])
            signs = ir.Constant(_FLOATS, [-1.0 if i & apart else 1.0 for i in range(LANES)])
            for i, row in enumerate(rows):
                partner = b.shuffle_vector(row, ir.Constant(_FLOATS, ir.Undefined), order)
                product = b.fmul(row, signs, flags=("contract",))
                rows[i] = b.fadd(product, partner, flags=("contract",))
        apart = 2
        while apart < len(rows):
            for i in range(len(rows)):
                if not i & apart:
                    one, two = rows[i], rows[i | apart]
                    rows[i], rows[i | apart] = b.fadd(one, two), b.fsub(one, two)
            apart *= 2
        return rows

    # -- bytes, with AVX512BW and AVX512-VNNI

    def nearest(self, x: Value) -> Value:
        """The nearest integers, ties to even."""
        every, rounding = ir.Constant(_I16, -1), ir.Constant(_I32, 4)
        name = "llvm.x86.avx512.mask.cvtps2dq.512"
        return self._call(name, _WORDS, x, self.words(0), every, rounding)

    def in_bytes(self, rows: Sequence[Value]) -> Value:
        """Integers in the order of `hadamard`, 4 rows, as 64 bytes in that of its pairs."""
        b = self.builder
        # Lanes of 128 bits: 4 of what was the first vector of pairs, 4 of what was the second.
        evens, odds = (
            self._call("llvm.x86.avx512.packssdw.512", _PAIRS, rows[i], rows[i + 2]) for i in (0, 1)
        )
        lower = b.and_(evens, ir.Constant(_PAIRS, [0xFF] * 2 * LANES))
        both = b.or_(lower, b.shl(odds, ir.Constant(_PAIRS, [8] * 2 * LANES)))
        eights = b.bitcast(both, _EIGHTS)
        order = ir.Constant(ir.VectorType(_I32, LANES // 2), [0, 2, 4, 6, 1, 3, 5, 7])
        sorted_eights = b.shuffle_vector(eights, ir.Constant(_EIGHTS, ir.Undefined), order)
        return b.bitcast(sorted_eights, _WORDS)

    def dot_bytes(self, totals: Value, unsigned: Value, signed: Value) -> Value:
        """totals += the sum of 4 products of bytes for each lane."""
        name = "llvm.x86.avx512.vpdpbusd.512"
        return self._call(name, _WORDS, totals, unsigned, signed)
