"""Vectors of 16 float32, in LLVM's language: for loops that numba's own vectoriser leaves slow.

It widens integers to 64 bits, goes through memory between what could stay in registers, and makes a
division of what need not be exact. Addresses are int64; nothing need be aligned.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

from llvmlite import ir
from numba.core import cgutils

from twostroke.model.compiled import HAS_BF16, BFloatType, has

LANES = 16
Value: TypeAlias = Any  # of llvmlite, which has no types

_I16, _I32, _F32 = ir.IntType(16), ir.IntType(32), ir.FloatType()
_FLOATS, _WORDS = ir.VectorType(_F32, LANES), ir.VectorType(_I32, LANES)
_HALVES = ir.VectorType(_I16, LANES)
_HAS_AVX512 = has("avx512f")
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

    def load_words(self, address: Value) -> Value:
        return self._load(address, 0, _WORDS, 4)

    def load_halves(self, address: Value, number: int = 0) -> Value:
        """The `number`-th vector of bfloat16 from there, as float32."""
        b = self.builder
        wide = b.zext(self._load(address, number, _HALVES, 2), _WORDS)
        return b.bitcast(b.shl(wide, self.words(16)), _FLOATS)

    def store(self, value: Value, address: Value, number: int = 0) -> None:
        size = value.type.element.width // 8 if isinstance(value.type.element, ir.IntType) else 4
        pointer = self._pointer(address, number, value.type)
        self.builder.store(value, pointer, align=size)

    def store_halves(self, value: Value, address: Value, number: int = 0) -> None:
        """As bfloat16, rounded to the nearest."""
        b = self.builder
        if HAS_BF16:
            halves = b.bitcast(b.fptrunc(value, ir.VectorType(BFloatType(), LANES)), _HALVES)
        else:
            bits = b.bitcast(self.rounded(value), _WORDS)
            halves = b.trunc(b.lshr(bits, self.words(16)), _HALVES)
        self.store(halves, address, number)

    def _load(self, address: Value, number: int, kind: Value, align: int) -> Value:
        return self.builder.load(self._pointer(address, number, kind), align=align)

    def _pointer(self, address: Value, number: int, kind: Value) -> Value:
        start = self.builder.inttoptr(address, kind.as_pointer())
        return self.builder.gep(start, [ir.Constant(_I32, number)])

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

    def silu(self, x: Value) -> Value:
        """x / (1 + e**-x), to 2e-04."""
        b = self.builder
        below = b.fadd(self._exp_rough_of_minus(self._within(x, 87.0)), self.floats(1.0))
        if not _HAS_AVX512:
            return b.fdiv(x, below)
        every, zeros = ir.Constant(_I16, -1), self.floats(0.0)
        inverse = self._call("llvm.x86.avx512.rcp14.ps.512", _FLOATS, below, zeros, every)
        return b.fmul(x, inverse)

    def _within(self, x: Value, limit: float) -> Value:
        """x, or the nearest within +-limit."""
        b = self.builder
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

    def _call(self, name: str, result: Value, *arguments: Value) -> Value:
        kind = ir.FunctionType(result, [argument.type for argument in arguments])
        function = cgutils.get_or_insert_function(self.builder.module, kind, name)
        return self.builder.call(function, arguments)

    def hadamard(self, vectors: Sequence[Value]) -> list[Value]:
        """All these values times the Hadamard matrix of entries +-1.

        Rounds of sums and differences of what is 1, 2, 4, ... apart: within a vector a value's
        partner is brought by a shuffle, and one multiplication by +-1 and addition makes both.
        """
        b, rows = self.builder, list(vectors)
        for apart in (1, 2, 4, 8):
            order = ir.Constant(_WORDS, [i ^ apart for i in range(LANES)])
            signs = ir.Constant(_FLOATS, [-1.0 if i & apart else 1.0 for i in range(LANES)])
            for i, row in enumerate(rows):
                partner = b.shuffle_vector(row, ir.Constant(_FLOATS, ir.Undefined), order)
                product = b.fmul(row, signs, flags=("contract",))
                rows[i] = b.fadd(product, partner, flags=("contract",))
        apart = 1
        while apart < len(rows):
            for i in range(len(rows)):
                if not i & apart:
                    one, two = rows[i], rows[i | apart]
                    rows[i], rows[i | apart] = b.fadd(one, two), b.fsub(one, two)
            apart *= 2
        return rows
