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

from collections.abc import Callable

from llvmlite import ir

from twostroke.model.vectors import Vectors
from twostroke.worker import attention_dots, attention_simd
from twostroke.worker.attention_emit import LANES, Emitter, Value
from twostroke.worker.attention_int8 import MAX_HEAD_DIM
from twostroke.worker.attention_simd import KEY_TILE, STATE

TURNED = 64  # elements that the matrix mixes
_UNITS = TURNED // 2
_LARGEST = 127.0
_SMALLEST = 1e-30  # whose inverse, times _LARGEST, is still a number
_QUERY_SCALE = 2  # where it is in a row's state


def can_score(head_dim: int) -> bool:
    return head_dim % TURNED == 0 and head_dim <= MAX_HEAD_DIM


def load_queries(
    e: Emitter,
    large: Value,
    table: Value,
    count: Value,
    num_units: Value,
    padded: Value,
    targets: Value,
    states: Value,
    room: Value,
) -> None:
    """In small items as they are."""
    arguments = (table, count, num_units, padded, targets, states, room)
    with e.builder.if_else(_is_large(e, large)) as (large_one, small_one):
        with large_one:
            _round_queries(e, *arguments)
        with small_one:
            attention_dots.load_queries(e, large, *arguments)
            with e.loop(e.const(0), count) as row:
                e.store(e.float(1.0), e.at(e.at(states, row, 4 * STATE), _QUERY_SCALE))


def _is_large(e: Emitter, large: Value) -> Value:
    return e.builder.icmp_signed("!=", large, e.const(0))


def _round_queries(
    e: Emitter,
    table: Value,
    count: Value,
    num_units: Value,
    padded: Value,
    targets: Value,
    states: Value,
    room: Value,
) -> None:
    b, fours = e.builder, e.builder.lshr(num_units, e.const(1))
    rows = room  # a square of units
    numbers = e.at(rows, LANES * LANES)  # of each row: its scale, and what its sums begin with
    turned = e.at(numbers, 2 * LANES)
    factor, scale = _factor_and_scale(e, _turn_rows(e, table, e.const(0), num_units, turned))
    # The product of what is turned is that of a block as it was, TURNED times.
    e.store(b.fmul(scale, e.floats(1 / TURNED)), numbers)
    (total,) = e.accumulators(1, e.integers)

    def per_row(copy: Callable[[Value, Value], None]) -> None:
        with e.loop(e.const(0), count) as row:
            copy(row, e.at(targets, b.mul(row, padded), 8))

    with e.loop(e.const(0), fours, LANES) as four:
        here = e.at(turned, four, 4 * 4 * LANES)
        columns = [_bytes(e, e.at(here, i * 4 * LANES), factor, 0) for i in range(LANES)]
        for column in columns:
            e.add_byte_dots(total, e.units(0x01010101), column)
        for i, row in enumerate(e.transpose(columns)):
            e.store(row, e.at(rows, i * LANES))
        per_row(
            lambda row, target: e.store(
                e.load_units(e.at(rows, row, 4 * LANES)), e.at(target, four)
            )
        )
    e.store(b.mul(b.load(total), e.units(-128)), e.at(numbers, LANES))

    def copy_numbers(row: Value, target: Value) -> None:
        here = e.at(numbers, row)
        start = e.load(e.at(here, LANES), ir.IntType(32))
        e.store(start, e.at(target, fours))
        scale = e.load(here, ir.FloatType())
        e.store(scale, e.at(e.at(states, row, 4 * STATE), _QUERY_SCALE))

    per_row(copy_numbers)


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


def _round_keys(e: Emitter, table: Value, num_keys: Value, num_units: Value, keys: Value) -> None:
    b, fours = e.builder, e.builder.lshr(num_units, e.const(1))
    scales = e.at(keys, b.mul(fours, e.const(KEY_TILE)))
    turned = e.at(scales, KEY_TILE)
    with e.loop(e.const(0), num_keys, LANES) as key:
        factor, scale = _factor_and_scale(e, _turn_rows(e, table, key, num_units, turned))
        e.store(scale, e.at(scales, key))
        with e.loop(e.const(0), fours) as four:
            here = e.at(turned, four, 4 * 4 * LANES)
            target = e.at(keys, b.add(b.mul(four, e.const(KEY_TILE)), key))
            e.store(_bytes(e, here, factor, 128), target)


def _turn_rows(e: Emitter, table: Value, first: Value, num_units: Value, turned: Value) -> Value:
    """Turn LANES rows, queries or keys, into turned[element, row]; returns the largest magnitude of
    each.

    In three passes over memory, since not all that is to be mixed fits into registers.
    """
    b, v = e.builder, Vectors(e.builder)
    rows = [e.load_address(table, first, j) for j in range(LANES)]
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
        first = b.add(b.mul(b.lshr(group, e.const(2)), e.const(_UNITS)), b.and_(group, e.const(3)))
        here = e.at(squares, first, 4 * LANES)
        both = [v.sums_and_differences(e.load_units(e.at(here, i * 4 * LANES))) for i in range(8)]
        target = e.at(turned, first, 2 * 4 * LANES)
        for side in (0, 1):
            values = [pair[side] for pair in both]
            mix(values)
            for i, value in enumerate(values):
                e.store(value, e.at(target, (8 * i + side) * LANES))
        b.store(b.fadd(b.load(unsound), b.fsub(values[0], values[0])), unsound)
    with e.loop(e.const(0), b.lshr(num_units, e.const(1))) as group:
        # Two elements of each eight: group and the three others that are 2 apart.
        first = b.add(b.mul(b.lshr(group, e.const(1)), e.const(8)), b.and_(group, e.const(1)))
        places = [e.at(e.at(turned, first, 4 * LANES), 2 * i * LANES) for i in range(4)]
        values = [e.load_floats(place) for place in places]
        mix(values)
        for value, place in zip(values, places, strict=True):
            e.store(value, place)
            b.store(e.larger_magnitude(value, b.load(largest)), largest)
    # Each sum has all elements in it: what is not finite makes NaN of any difference with itself.
    return b.fadd(b.load(largest), b.load(unsound))


def _bytes(e: Emitter, turned: Value, factor: Value, more: int) -> Value:
    """Four elements of LANES rows, times factor, to nearest even and plus `more`, as bytes."""
    b = e.builder
    # Adding 1.5 * 2**23 leaves an integer in the low bits of the mantissa.
    magic = e.floats(12582912.0 + more)
    floats = (e.load_floats(e.at(turned, i * LANES)) for i in range(4))
    rows = [b.bitcast(e.fma(it, factor, magic), e.integers) for it in floats]

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
