"""The inner loops of the CPU attention where the pool holds keys and values in 8 bits.

A token's keys, or values, of a head are `head_dim` int8, then a float32: their scale. What follows
from one key or value is scaled by its own scale, so nothing is lost beyond the rounding to 8 bits:

    many rows    a tile is widened to bfloat16, times scale, while it is packed; then as in
                 `attention_dots`
    few rows     queries and weights are rounded to 16 bits, relative to the largest of a row (of
                 a tile), and `vpdpwssd` adds two products of int16 to an int32: exact, and
                 cheaper than widening a key to floats. 16 bits are finer than bfloat16.

What is not finite makes a scale not finite, and through it the result. The bodies take the place of
those of the same names in `attention_simd`, and take the same values.
"""

from llvmlite import ir

from twostroke.worker import attention_dots, attention_simd
from twostroke.worker.attention_emit import LANES, MAX_ROWS, Emitter, Value
from twostroke.worker.attention_simd import KEY_TILE, STATE

MAX_HEAD_DIM = 512  # so many products of int16 and int8 fit into an int32
_INT8, _INT16 = 127.0, 32767.0
_SMALLEST = 1e-30  # a row of zeros has a scale of its own
_QUERY_SCALE, _WEIGHT_SCALE = 2, 3  # where they are in a row's state


def write_row(e: Emitter, source: Value, num_units: Value, target: Value) -> None:
    """Round one token's keys or values of one head to 8 bits."""
    factor, scale = _scales(e, source, num_units, _INT8)
    e.store(scale, e.at(target, num_units, 2), align=1)
    low = e.units(0xFF)

    def chunk(unit: Value, mask: Value | None) -> None:
        even, odd = (
            _rounded(e, it, factor) for it in e.widen(e.load_units(e.at(source, unit), mask))
        )
        b = e.builder
        pairs = b.or_(b.and_(even, low), b.shl(odd, e.units(8)))
        e.store_words(b.trunc(pairs, e.words), e.at(target, unit, 2), mask)

    e.per_chunk(num_units, chunk)


def load_few_queries(
    e: Emitter,
    table: Value,
    count: Value,
    num_units: Value,
    padded: Value,
    targets: Value,
    states: Value,
) -> None:
    """Round queries to 16 bits; pairs of elements stay units."""
    low, b = e.units(0xFFFF), e.builder
    with e.loop(e.const(0), count) as row:
        source, target = e.load_address(table, row), e.at(targets, b.mul(row, padded), 8)
        factor, scale = _scales(e, source, num_units, _INT16)
        e.store(scale, e.at(e.at(states, row, 4 * STATE), _QUERY_SCALE))

        def chunk(unit: Value, mask: Value | None) -> None:
            even, odd = (
                _rounded(e, it, factor) for it in e.widen(e.load_units(e.at(source, unit), mask))
            )
            e.store(b.or_(b.and_(even, low), b.shl(odd, e.units(16))), e.at(target, unit))

        e.per_chunk(num_units, chunk)


def list_scales(
    e: Emitter, table: Value, values: Value, num_keys: Value, num_units: Value, scales: Value
) -> None:
    """Scales of a tile's keys, and KEY_TILE floats further those of its values."""
    with e.loop(e.const(0), num_keys) as key:
        row = e.at(e.load_address(table, key), num_units, 2)
        for side, address in enumerate((row, e.builder.add(row, values))):
            scale = e.load(address, ir.FloatType(), align=1)
            e.store(scale, e.at(e.at(scales, side * KEY_TILE), key))


def score_keys(
    e: Emitter,
    rows: Value,
    queries: Value,
    padded: Value,
    table: Value,
    ahead: Value,
    num_keys: Value,
    num_units: Value,
    states: Value,
    scales: Value,
    scores: Value,
) -> None:
    def body(count: int) -> None:
        at_once = 8 if count * 8 <= MAX_ROWS * 4 else 4
        b, few = e.builder, ir.VectorType(ir.FloatType(), at_once)
        with e.loop(e.const(0), num_keys, at_once) as key:
            sums = e.accumulators(count * at_once, e.integers)
            keys = [e.load_address(table, key, j) for j in range(at_once)]
            for j in range(at_once):
                e.prefetch_bytes(e.load_address(ahead, key, j), num_units)

            def chunk(unit: Value, mask: Value | None) -> None:
                parts = [e.load_units(e.query(queries, m, padded, unit)) for m in range(count)]
                for j, address in enumerate(keys):
                    units = _widened(e, address, unit, mask)
                    for m, part in enumerate(parts):
                        e.add_int_dots(sums[m * at_once + j], part, units)

            e.per_chunk(num_units, chunk)
            key_scales = e.load(e.at(scales, key), few)
            for m in range(count):
                row = [b.load(s) for s in sums[m * at_once : (m + 1) * at_once]]
                query_scale = e.load(e.at(states, m * STATE + _QUERY_SCALE), ir.FloatType())
                factors = b.fmul(key_scales, e.splat(query_scale, at_once))
                total = b.fmul(b.sitofp(e.sum_each(row), few), factors)
                e.store(total, e.at(e.at(scores, m * KEY_TILE), key))

    e.per_rows(rows, body)


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
    """Widened to bfloat16."""
    del large
    halves = ir.VectorType(ir.IntType(8), LANES)
    wide = ir.VectorType(ir.FloatType(), LANES)

    def load(row: Value, unit: Value, mask: Value | None) -> Value:
        b = e.builder
        scale = e.splat(e.load(e.at(row, num_units, 2), ir.FloatType(), align=1))
        pairs = b.bitcast(e.load_words(e.at(row, unit, 2), mask), e.bytes)
        parts = (e.shuffle(pairs, pairs, range(i, i + LANES)) for i in (0, LANES))
        floats = (b.sitofp(b.bitcast(part, halves), wide) for part in parts)
        return e.bf16_units(*(e.to_bf16s(b.fmul(it, scale)) for it in floats))

    attention_dots.pack(e, (table, values, num_keys, num_units, padded, keys, packed), load)


def softmax_few(
    e: Emitter,
    scores: Value,
    visible: Value,
    num_keys: Value,
    scale: Value,
    state: Value,
    scales: Value,
) -> None:
    """Weights times the values' scales, rounded to 16 bits, take the first half of their place."""
    b = e.builder
    value_scales = e.at(scales, KEY_TILE)
    (largest,) = e.accumulators(1, e.integers)

    def keep(weights: Value, offset: Value | int) -> None:
        scaled = b.fmul(weights, e.load_floats(e.at(value_scales, offset)))
        e.store(scaled, e.at(scores, offset))
        b.store(_larger(e, b.load(largest), scaled), largest)

    attention_simd.softmax(e, (scores, visible, num_keys, scale, state), e.exp2_rough, keep)
    factor, weight_scale = _factor(e, b.load(largest), _INT16)
    e.store(weight_scale, e.at(state, _WEIGHT_SCALE))
    with e.loop(e.const(0), num_keys, LANES) as key:
        units = _rounded(e, e.load_floats(e.at(scores, key)), factor)
        e.store(b.trunc(units, e.words), e.at(scores, key, 2))


def add_values(
    e: Emitter,
    rows: Value,
    weights: Value,
    table: Value,
    ahead: Value,
    values: Value,
    num_keys: Value,
    num_units: Value,
    padded: Value,
    states: Value,
    outputs: Value,
) -> None:
    def panel(count: int, width: int, unit: Value, mask: Value | None) -> None:
        b = e.builder
        sums = [e.accumulators(2 * width, e.integers) for _ in range(count)]
        with e.loop(e.const(0), num_keys, 2) as key:
            now, later = (
                [b.add(e.load_address(it, key, j), values) for j in range(2)]
                for it in (table, ahead)
            )
            for address in later:
                for byte in range(0, 4 * LANES + 1, 64):
                    e.prefetch(b.add(e.at(address, unit, 2), e.const(byte)))
            columns: list[Value] = []
            for w in range(width):
                first = b.add(unit, e.const(w * LANES))
                columns += e.interleave(*(_widened(e, row, first, mask) for row in now))
            for m, slots in enumerate(sums):
                pair = e.broadcast_unit(e.at(e.at(weights, m * KEY_TILE), key, 2))
                for slot, units in zip(slots, columns, strict=True):
                    e.add_int_dots(slot, pair, units)
        start = b.mul(unit, e.const(2))
        for m, slots in enumerate(sums):
            alpha = e.broadcast(e.at(states, m * STATE + 1))
            scale = e.broadcast(e.at(states, m * STATE + _WEIGHT_SCALE))
            row = e.plane(outputs, 2 * m, padded, start)
            for w, slot in enumerate(slots):
                target = e.at(row, w * LANES)
                added = b.fmul(b.sitofp(b.load(slot), scale.type), scale)
                e.store(e.fma(e.load_floats(target), alpha, added), target)

    def body(count: int) -> None:
        e.per_panel(
            num_units,
            2,
            lambda width, unit: panel(count, width, unit, None),
            lambda unit, mask: panel(count, 1, unit, mask),
        )

    e.per_rows(rows, body)


def add_tile(
    e: Emitter,
    rows: Value,
    weights: Value,
    table: Value,
    ahead: Value,
    values: Value,
    packed: Value,
    num_keys: Value,
    num_units: Value,
    padded: Value,
    states: Value,
    outputs: Value,
) -> None:
    del table, num_units
    arguments = (rows, weights, ahead, values, packed, num_keys, padded, states, outputs)
    attention_dots.add_packed(e, arguments, 1)


def _widened(e: Emitter, row: Value, unit: Value, mask: Value | None) -> Value:
    """16 pairs of int8 as pairs of int16."""
    b = e.builder
    pairs = b.bitcast(e.load_words(e.at(row, unit, 2), mask), e.bytes)
    wide = b.sext(pairs, ir.VectorType(ir.IntType(16), 2 * LANES))
    return b.bitcast(wide, e.integers)


def _scales(e: Emitter, source: Value, num_units: Value, most: float) -> tuple[Value, Value]:
    """For a row of bfloat16: the factor, in all lanes, that makes the largest `most`; and its
    inverse."""
    (largest,) = e.accumulators(1, e.integers)

    def chunk(unit: Value, mask: Value | None) -> None:
        for values in e.widen(e.load_units(e.at(source, unit), mask)):
            e.builder.store(_larger(e, e.builder.load(largest), values), largest)

    e.per_chunk(num_units, chunk)
    return _factor(e, e.builder.load(largest), most)


def _larger(e: Emitter, largest: Value, values: Value) -> Value:
    """Bits of the larger magnitude; as integers, they are ordered, and NaN is the largest."""
    b = e.builder
    bits = b.and_(b.bitcast(values, e.integers), e.units(0x7FFFFFFF))
    return b.select(b.icmp_signed(">", bits, largest), bits, largest)


def _factor(e: Emitter, largest: Value, most: float) -> tuple[Value, Value]:
    b = e.builder

    def larger(one: Value, two: Value) -> Value:
        return b.select(b.icmp_signed(">", one, two), one, two)

    top = b.bitcast(e.fold(larger, [largest]), ir.FloatType())
    top = b.select(b.fcmp_ordered("<", top, e.float(_SMALLEST)), e.float(_SMALLEST), top)
    factor = e.splat(b.fdiv(e.float(most), top))
    return factor, b.fmul(top, e.float(1 / most))


def _rounded(e: Emitter, values: Value, factor: Value) -> Value:
    """values * factor as integers in the low 16 bits, to nearest even; of at most 2**15."""
    # Adding 1.5 * 2**23 leaves an integer in the low bits of the mantissa.
    magic = e.floats(12582912.0)
    return e.builder.bitcast(e.fma(values, factor, magic), e.integers)
