"""The inner loops of the CPU attention where prompts' queries and keys are multiplied in 8 bits.

The pool holds bfloat16, and what few rows do is done as in `attention_dots`. With many rows, a
query and a key are rounded to 8 bits, each with a scale of its own, and `vpdpbusd` adds four
products of bytes to an int32, exactly, where `dpbf16ps` adds two of bfloat16 in the same time:

    score[m, j] = scale of query m * scale of key j * sum of n[m, i] * k[j, i]     |n|, |k| <= 127

What that costs is decided by a row's largest element, so both are turned first, in blocks of 64, by
the Hadamard matrix, which spreads a large one over its block and leaves their product as it was
(QuaRot, arXiv 2404.00456; that 8 bits do for this product, and for it alone: SageAttention, arXiv
2410.02367). A key is turned when its tile is packed, 16 keys side by side:

    keys       [four elements, key]  4 bytes, k + 128 (the instruction wants one side without sign)
               [key]                 float32: scales
               [element, 16]         float32: room for those keys, turned
    query      head_dim bytes n, then an int32: what its sums begin with, -128 * sum of n

Each row depends on itself alone. What is not finite makes its scale NaN, and through it the score.
"""

from llvmlite import ir

from twostroke.model.vectors import Vectors
from twostroke.worker import attention_dots, attention_simd
from twostroke.worker.attention_emit import LANES, Emitter, Value
from twostroke.worker.attention_int8 import MAX_HEAD_DIM
from twostroke.worker.attention_simd import KEY_TILE

TURNED = 64  # elements that the matrix mixes
_UNITS = TURNED // 2
_LARGEST = 127.0
_SMALLEST = 1e-30  # whose inverse, times _LARGEST, is still a number
_QUERY_SCALE = 2  # where it is in a row's state


def can_score(head_dim: int) -> bool:
    return head_dim % TURNED == 0 and head_dim <= MAX_HEAD_DIM


def load_query(
    e: Emitter,
    large: Value,
    source: Value,
    num_units: Value,
    padded: Value,
    target: Value,
    state: Value,
) -> None:
    """In small items as it is."""
    arguments = (source, num_units, padded, target, state)
    with e.builder.if_else(_is_large(e, large)) as (large_one, small_one):
        with large_one:
            _round_query(e, *arguments)
        with small_one:
            attention_dots.load_query(e, large, *arguments)
            e.store(e.float(1.0), e.at(state, _QUERY_SCALE))


def _is_large(e: Emitter, large: Value) -> Value:
    return e.builder.icmp_signed("!=", large, e.const(0))


def _round_query(
    e: Emitter, source: Value, num_units: Value, padded: Value, target: Value, state: Value
) -> None:
    del padded
    b, v = e.builder, Vectors(e.builder)
    (largest,) = e.accumulators(1, e.integers)
    (total,) = e.accumulators(1, e.integers)
    with e.loop(e.const(0), num_units, _UNITS) as unit:
        start = e.at(source, unit)
        rows = v.hadamard([e.load_units(e.at(start, i)) for i in (0, LANES)])
        for i, row in enumerate(rows):
            e.store(row, e.at(e.at(target, unit, 8), i * LANES))
            b.store(v.largest(v.magnitudes(row), b.load(largest)), largest)
    top = e.splat(b.bitcast(v.largest_lane(b.load(largest)), ir.FloatType()))
    factor, scale = _factor_and_scale(e, top)
    # The bytes take the place of the floats of blocks before, or of their own.
    with e.loop(e.const(0), num_units, _UNITS) as unit:
        here = e.at(target, unit, 8)
        rows = [b.fmul(e.load_floats(e.at(here, i * LANES)), factor) for i in range(4)]
        rounded = v.in_bytes([v.nearest(row) for row in rows])
        e.store(rounded, e.at(target, unit, 2))
        b.store(v.dot_bytes(b.load(total), e.units(0x01010101), rounded), total)
    start = b.mul(v.sum_of_lanes(b.load(total)), ir.Constant(ir.IntType(32), -128))
    e.store(start, e.at(target, num_units, 2))
    first = ir.Constant(ir.IntType(32), 0)
    # The product of what is turned is that of a block as it was, TURNED times.
    scale = b.fmul(b.extract_element(scale, first), e.float(1 / TURNED))
    e.store(scale, e.at(state, _QUERY_SCALE))


def _factor_and_scale(e: Emitter, top: Value) -> tuple[Value, Value]:
    """For rows whose largest magnitudes are `top`: what makes these _LARGEST, and its inverse."""
    b, smallest = e.builder, e.floats(_SMALLEST)
    at_least = b.select(b.fcmp_ordered("<", top, smallest), smallest, top)
    # Infinity less infinity is NaN.
    scale = e.fma(at_least, e.floats(1 / _LARGEST), b.fsub(at_least, at_least))
    return b.fdiv(e.floats(_LARGEST), at_least), scale


def pack_tile(
    e: Emitter,
    large: Value,
    table: Value,
    values: Value,
    num_keys: Value,
    num_units: Value,
    padded: Value,
    keys: Value,
    packed: Value,
) -> None:
    arguments = (table, values, num_keys, num_units, padded, keys, packed)
    with e.builder.if_else(_is_large(e, large)) as (large_one, small_one):
        with large_one:
            _round_keys(e, table, num_keys, num_units, keys)
            attention_dots.pack_values(e, arguments, attention_dots.load_pairs(e))
        with small_one:
            attention_dots.pack_tile(e, large, *arguments)


def _round_keys(
    e: Emitter, table: Value, num_keys: Value, num_units: Value, keys: Value
) -> None:
    b, fours = e.builder, e.builder.lshr(num_units, e.const(1))
    scales = e.at(keys, b.mul(fours, e.const(KEY_TILE)))
    turned = e.at(scales, KEY_TILE)
    # Low bits of the sum with a float32: an integer, to nearest even, plus 128.
    magic = e.floats(12582912.0 + 128.0)
    with e.loop(e.const(0), num_keys, LANES) as key:
        factor, scale = _factor_and_scale(e, _turn_keys(e, table, key, num_units, turned))
        e.store(scale, e.at(scales, key))
        with e.loop(e.const(0), fours) as four:
            here = e.at(turned, four, 4 * 4 * LANES)
            rows = (e.load_floats(e.at(here, i * LANES)) for i in range(4))
            bytes_of = [b.bitcast(e.fma(row, factor, magic), e.integers) for row in rows]
            target = e.at(keys, b.add(b.mul(four, e.const(KEY_TILE)), key))
            e.store(_low_bytes(e, bytes_of), target)


def _turn_keys(e: Emitter, table: Value, key: Value, num_units: Value, turned: Value) -> Value:
    """Turn LANES keys into turned[element, key]; returns the largest magnitude of each.

    In three passes over memory, since not all that is to be mixed fits into registers.
    """
    b, v = e.builder, Vectors(e.builder)
    rows = [e.load_address(table, key, j) for j in range(LANES)]
    squares = e.at(turned, num_units, 2 * 4 * LANES)
    with e.loop(e.const(0), num_units, LANES) as unit:
        square = e.transpose([e.load_units(e.at(row, unit)) for row in rows])
        for i, pairs in enumerate(square):
            e.store(pairs, e.at(e.at(squares, unit, 4 * LANES), i * LANES))
    largest, unsound = e.accumulators(2)

    def mix(values: list[Value]) -> None:
        apart = 1
        while apart < len(values):
            for i in range(len(values)):
                if not i & apart:
                    one, two = values[i], values[i | apart]
                    values[i], values[i | apart] = b.fadd(one, two), b.fsub(one, two)
            apart *= 2

    # Of a block's 32 pairs each fourth, and what is in them.
    with e.loop(e.const(0), b.lshr(num_units, e.const(3))) as group:
        first = b.add(
            b.mul(b.lshr(group, e.const(2)), e.const(_UNITS)), b.and_(group, e.const(3))
        )
        here = e.at(squares, first, 4 * LANES)
        both = [
            v.sums_and_differences(e.load_units(e.at(here, i * 4 * LANES))) for i in range(8)
        ]
        target = e.at(turned, first, 2 * 4 * LANES)
        for side in (0, 1):
            values = [pair[side] for pair in both]
            mix(values)
            for i, value in enumerate(values):
                e.store(value, e.at(target, (8 * i + side) * LANES))
        b.store(b.fadd(b.load(unsound), b.fsub(values[0], values[0])), unsound)
    with e.loop(e.const(0), b.lshr(num_units, e.const(1))) as group:
        # Two elements of each eight: group and the three others that are 2 apart.
        first = b.add(
            b.mul(b.lshr(group, e.const(1)), e.const(8)), b.and_(group, e.const(1))
        )
        places = [e.at(e.at(turned, first, 4 * LANES), 2 * i * LANES) for i in range(4)]
        values = [e.load_floats(place) for place in places]
        mix(values)
        for value, place in zip(values, places, strict=True):
            e.store(value, place)
            b.store(e.larger_magnitude(value, b.load(largest)), largest)
    # Each sum has all elements in it: what is not finite makes NaN of any difference with itself.
    return b.fadd(b.load(largest), b.load(unsound))


def _low_bytes(e: Emitter, rows: list[Value]) -> Value:
    """The lowest byte of each of four vectors, as those of one."""
    b = e.builder

    def mixed(low: Value, high: Value, bits: int) -> Value:
        """The lowest `bits` of low, and above them high."""
        below = b.and_(low, e.units((1 << bits) - 1))
        return b.or_(below, b.shl(high, e.units(bits)))

    return mixed(mixed(rows[0], rows[1], 8), mixed(rows[2], rows[3], 8), 16)


def score_tile(
    e: Emitter,
    large: Value,
    rows: Value,
    queries: Value,
    padded: Value,
    keys: Value,
    num_keys: Value,
    num_units: Value,
    scores: Value,
) -> None:
    arguments = (rows, queries, padded, keys, num_keys, num_units, scores)
    with e.builder.if_else(_is_large(e, large)) as (large_one, small_one):
        with large_one:
            _score_bytes(e, *arguments)
        with small_one:
            attention_dots.score_tile(e, large, *arguments)


def _score_bytes(
    e: Emitter,
    rows: Value,
    queries: Value,
    padded: Value,
    keys: Value,
    num_keys: Value,
    num_units: Value,
    scores: Value,
) -> None:
    """Without the scales of the queries, which `softmax_tile` knows."""
    b, fours = e.builder, e.builder.lshr(num_units, e.const(1))
    scales = e.at(keys, b.mul(fours, e.const(KEY_TILE)))

    def panel(count: int, width: int, key: Value) -> None:
        sums = e.accumulators(count * width, e.integers)
        for m in range(count):
            start = e.broadcast_unit(e.query(queries, m, padded, fours))
            for w in range(width):
                b.store(start, sums[m * width + w])
        with e.loop(e.const(0), fours) as four:
            start = e.at(e.at(keys, b.mul(four, e.const(KEY_TILE))), key)
            columns = [e.load_units(e.at(start, w * LANES)) for w in range(width)]
            for m in range(count):
                query = e.broadcast_unit(e.query(queries, m, padded, four))
                for w in range(width):
                    e.add_byte_dots(sums[m * width + w], columns[w], query)
        factors = [e.load_floats(e.at(e.at(scales, key), w * LANES)) for w in range(width)]
        for m in range(count):
            row = e.at(e.at(scores, m * KEY_TILE), key)
            for w, factor in enumerate(factors):
                total = b.sitofp(b.load(sums[m * width + w]), factor.type)
                e.store(b.fmul(total, factor), e.at(row, w * LANES))

    e.per_rows(rows, lambda count: e.per_panel(num_keys, 4, lambda w, k: panel(count, w, k)))


def softmax_tile(
    e: Emitter,
    rows: Value,
    first: Value,
    group: Value,
    scores: Value,
    visible: Value,
    limit: Value,
    num_keys: Value,
    scale: Value,
    states: Value,
) -> None:
    """Weights are bfloat16, and take the first half of the scores' place."""
    arguments = (rows, first, group, scores, visible, limit, num_keys, scale, states)

    def factor_of(scale: Value, state: Value) -> Value:
        return e.builder.fmul(scale, e.broadcast(e.at(state, _QUERY_SCALE)))

    store = attention_dots.store_weights(e)
    attention_simd.softmax_rows(e, arguments, e.exp2_rough, store, factor_of)
