"""How weights of few bits are multiplied with rows of x as integers, by what the processor has.

A tile (see `few_rows_quantised`) reads 4 bytes of each of 16 outputs at a time: 8 inputs of 4 bits,
or 4 of 8 bits. All ways give the same exact sums of a group of 32 inputs, so the same results:

    InBytes   vpdpbusd (AVX512-VNNI): 64 products of bytes, added by fours; x is two bytes, each of
              which has its own sum
    InPairs   vpmaddwd (AVX2): 16 products of 16 bits, added by twos, after a mask and a shift have
              made 16 bits of a weight's 4 or 8; x is 16 bits

A row of x has 64 bytes for each group, as one of the ways wants them, its scale (float32) and the
sum of its integers (int32): see `elementwise_kernels.levels_rows`.
"""

from collections.abc import Sequence
from typing import Protocol

from twostroke.model.quantised import GROUP
from twostroke.model.tile_ir import PREFETCH, VPDPBUSD, broadcast

# A row of the tile, which of its sums, and which vector of 16 outputs: the value's name.
Sums = dict[tuple[int, int, int], str]


class IntegerProducts(Protocol):
    """Lists the instructions for weights of so many bits."""

    @property
    def instruction(self) -> str:
        """What users call it."""
        ...

    @property
    def feature(self) -> str:
        """What the processor must have, as LLVM names it."""
        ...

    @property
    def declarations(self) -> tuple[str, ...]: ...

    @property
    def together(self) -> Sequence[int]:
        """For each number of rows, how many vectors of outputs are summed up together: as many as
        registers hold. Loads of x and masked weights serve more products so."""
        ...

    @property
    def order(self) -> tuple[int, ...]:
        """Which of 8 inputs, or of 4, the 4 bytes of an output hold, from the lowest bits on."""
        ...

    @property
    def num_sums(self) -> int:
        """How many sums a row has; the last one begins with what a group begins with."""
        ...

    def multiply(self, part: int, sums: Sums, together: int) -> list[str]:
        """Add the products of %bytes<part>_<vector>, 4 of each output, and rename the sums."""
        ...

    def whole_sum(self, name: str, sums: Sequence[str]) -> list[str]:
        """%name = what the sums of a row and vector are together, <16 x i32>."""
        ...


class InBytes:
    """By AVX512-VNNI."""

    instruction = "AVX512-VNNI"
    feature = "avx512vnni"
    declarations = PREFETCH, VPDPBUSD
    together = 4, 4, 2, 2, 1, 1, 1, 1
    num_sums = 2  # of the high bytes of x, and of the low ones

    def __init__(self, bits: int) -> None:
        self._bits = bits
        self.order = (0, 4, 1, 5, 2, 6, 3, 7) if bits == 4 else (0, 1, 2, 3)

    def multiply(self, part: int, sums: Sums, together: int) -> list[str]:
        vectors = range(together)
        if self._bits == 8:
            return self._multiply_quad(part, [f"%bytes{part}_{v}" for v in vectors], sums)
        lower = [
            f"%lower{part}_{v} = and <32 x i16> %bytes{part}_{v}, splat (i16 3855)" for v in vectors
        ]
        lines = [
            *lower,
            *self._multiply_quad(2 * part, [f"%lower{part}_{v}" for v in vectors], sums),
        ]
        for v in vectors:
            lines += [
                f"%shifted{part}_{v} = lshr <32 x i16> %bytes{part}_{v}, splat (i16 4)",
                f"%upper{part}_{v} = and <32 x i16> %shifted{part}_{v}, splat (i16 3855)",
            ]
        upper = [f"%upper{part}_{v}" for v in vectors]
        return [*lines, *self._multiply_quad(2 * part + 1, upper, sums)]

    def _multiply_quad(self, quad: int, weights: list[str], sums: Sums) -> list[str]:
        """The products of 4 inputs; of each vector `weights` are bytes, as <32 x i16>."""
        lines = [
            f"%values{quad}_{v} = bitcast <32 x i16> {weight} to <16 x i32>"
            for v, weight in enumerate(weights)
        ]
        for r, level in sorted({(r, level) for r, level, _ in sums}):
            n = f"{quad}_{r}_{level}"
            lines += [
                f"%n_p{n} = getelementptr i8, ptr %x_p{r}, i64 {GROUP * level + 4 * quad}",
                *broadcast(f"n{n}", f"n_p{n}"),
            ]
            for v in range(len(weights)):
                lines.append(
                    f"%sum{n}_{v} = call <16 x i32> @llvm.x86.avx512.vpdpbusd.512(<16 x i32> "
                    f"{sums[r, level, v]}, <16 x i32> %values{quad}_{v}, <16 x i32> %n{n})"
                )
                sums[r, level, v] = f"%sum{n}_{v}"
        return lines

    def whole_sum(self, name: str, sums: Sequence[str]) -> list[str]:
        high, low = sums
        return [
            f"%{name}_high = shl <16 x i32> {high}, splat (i32 8)",
            f"%{name} = add <16 x i32> %{name}_high, {low}",
        ]


class InPairs:
    """By AVX2. Vectors of 16 numbers are two registers.

    Of 4 bits too each product is of 16: bytes (vpmaddubsw) would need two of them for x, and so
    take as many instructions.
    """

    instruction = "AVX2"
    feature = "avx2"
    declarations = PREFETCH, "declare <8 x i32> @llvm.x86.avx2.pmadd.wd(<16 x i16>, <16 x i16>)"
    num_sums = 1

    def __init__(self, bits: int) -> None:
        self._bits = bits
        self.order = (0, 2, 4, 6, 1, 3, 5, 7) if bits == 4 else (0, 2, 1, 3)
        # One row of 8 bits, which waits for memory, is faster when whole lines are read in order
        # (28 GB/s to one thread, not 15).
        self.together = (4 if bits == 8 else 1, 1, 1, 1, 1, 1)

    def multiply(self, part: int, sums: Sums, together: int) -> list[str]:
        lines, pairs = [], 16 // self._bits
        for place in range(pairs):  # of numbers within 16 bits
            weights = []
            for v in range(together):
                name = f"words{part}_{place}_{v}"
                lines += self._take_place(name, f"%bytes{part}_{v}", place)
                weights.append(f"%{name}")
            lines += self._multiply_pair(pairs * part + place, weights, sums)
        return lines

    def _take_place(self, name: str, source: str, place: int) -> list[str]:
        """%name = the numbers at that place of 16 bits."""
        lines, shift = [], self._bits * place
        if place:
            lines.append(f"%{name}_shifted = lshr <32 x i16> {source}, splat (i16 {shift})")
            source = f"%{name}_shifted"
        mask = (1 << self._bits) - 1
        return [*lines, f"%{name} = and <32 x i16> {source}, splat (i16 {mask})"]

    def _multiply_pair(self, pair: int, weights: list[str], sums: Sums) -> list[str]:
        """The products of 2 inputs; of each vector `weights` are <32 x i16>."""
        lines = [
            f"%part{pair}_{v}_{half} = shufflevector <32 x i16> {weight}, "
            f"<32 x i16> poison, <16 x i32> {_lanes(16 * half, 16)}"
            for v, weight in enumerate(weights)
            for half in (0, 1)
        ]
        for r in sorted({r for r, _, _ in sums}):
            n = f"{pair}_{r}"
            lines += [
                f"%n_p{n} = getelementptr i8, ptr %x_p{r}, i64 {4 * pair}",
                f"%n_both{n} = load i32, ptr %n_p{n}, align 2",
                f"%n_one{n} = insertelement <8 x i32> poison, i32 %n_both{n}, i32 0",
                f"%n_all{n} = shufflevector <8 x i32> %n_one{n}, <8 x i32> poison, "
                "<8 x i32> zeroinitializer",
                f"%n{n} = bitcast <8 x i32> %n_all{n} to <16 x i16>",
            ]
            for v in range(len(weights)):
                for half in (0, 1):
                    lines.append(
                        f"%product{n}_{v}_{half} = call <8 x i32> @llvm.x86.avx2.pmadd.wd("
                        f"<16 x i16> %part{pair}_{v}_{half}, <16 x i16> %n{n})"
                    )
                lines += [
                    f"%products{n}_{v} = shufflevector <8 x i32> %product{n}_{v}_0, "
                    f"<8 x i32> %product{n}_{v}_1, <16 x i32> {_lanes(0, 16)}",
                    f"%sum{n}_{v} = add <16 x i32> {sums[r, 0, v]}, %products{n}_{v}",
                ]
                sums[r, 0, v] = f"%sum{n}_{v}"
        return lines

    def whole_sum(self, name: str, sums: Sequence[str]) -> list[str]:
        return [f"%{name} = bitcast <16 x i32> {sums[0]} to <16 x i32>"]


def _lanes(first: int, count: int) -> str:
    return f"<{', '.join(f'i32 {lane}' for lane in range(first, first + count))}>"


def products_of(bits: int) -> IntegerProducts:
    """The way that the processor that code is made for has, or would need."""
    from twostroke.model.compiled import HAS_VNNI  # here, because numba is there

    return InBytes(bits) if HAS_VNNI else InPairs(bits)
