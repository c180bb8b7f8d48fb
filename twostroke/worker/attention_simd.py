"""The inner loops of the CPU attention, as vector code (see attention_emit for how and why).

All take `like` first, a pointer whose pointee type names the element type of the pool; the rest are
addresses and numbers. `padded` is the length of a plane in scratch, so a scratch row has
`planes * padded` floats. `rows` says how many query rows (at most MAX_ROWS) a call handles; each
number has its own register-blocked code. `table` is the address of a list of addresses, one for
each key's row, so that a block may lie anywhere and have any size; a value lies `values` bytes
after its key.
"""

from llvmlite import ir

from twostroke.worker.attention_emit import LANES, MAX_ROWS, Emitter, Value, simd

KEY_TILE = 64  # keys handled together; a multiple of 16
STATE = 2 * LANES  # floats of a row's softmax state: maximum, alpha, ... | LANES partial sums
LOWEST = -1e30  # below any score, and finite: LOWEST - LOWEST is 0


@simd
def load_query(
    e: Emitter, source: Value, scale: Value, num_units: Value, padded: Value, target: Value
) -> None:
    """Widen a query into scratch, times the float at `scale`; the last vector is zero-padded."""
    factor = e.broadcast(scale)

    def chunk(unit: Value, mask: Value | None) -> None:
        for plane, values in enumerate(e.widen(e.load_units(e.at(source, unit), mask))):
            e.store(e.builder.fmul(values, factor), e.plane(target, plane, padded, unit))

    e.per_chunk(num_units, chunk)


@simd
def store_output(
    e: Emitter, source: Value, state: Value, num_units: Value, padded: Value, target: Value
) -> None:
    """Divide a row of outputs by its sum of weights, and narrow it into `target`."""
    factor = e.splat(e.builder.fdiv(ir.Constant(ir.FloatType(), 1.0), e.row_sum(state)))

    def chunk(unit: Value, mask: Value | None) -> None:
        rows = [e.plane(source, plane, padded, unit) for plane in range(e.planes)]
        planes = [e.builder.fmul(e.load_floats(row), factor) for row in rows]
        e.store_units(e.narrow(planes), e.at(target, unit), mask)

    e.per_chunk(num_units, chunk)


@simd
def copy_row(e: Emitter, source: Value, num_units: Value, target: Value) -> None:
    """Copy one token's keys or values of one head."""

    def chunk(unit: Value, mask: Value | None) -> None:
        e.store_units(e.load_units(e.at(source, unit), mask), e.at(target, unit), mask)

    e.per_chunk(num_units, chunk)


@simd
def score_keys(
    e: Emitter,
    rows: Value,
    queries: Value,
    padded: Value,
    table: Value,
    ahead: Value,
    num_keys: Value,
    num_units: Value,
    scores: Value,
) -> None:
    """scores[m, j] = queries[m] . key j, straight from the pool; num_keys a multiple of 8."""

    def body(count: int) -> None:
        at_once = 8 if count * 8 <= MAX_ROWS * 4 else 4
        with e.loop(e.const(0), num_keys, at_once) as key:
            sums = e.accumulators(count * at_once)
            keys = [e.load_address(table, key, j) for j in range(at_once)]
            next_keys = [e.load_address(ahead, key, j) for j in range(at_once)]

            def chunk(unit: Value, mask: Value | None) -> None:
                for address in next_keys:
                    e.prefetch(e.at(address, unit))
                for plane in range(e.planes):
                    parts = [
                        e.load_floats(e.plane(queries, m * e.planes + plane, padded, unit))
                        for m in range(count)
                    ]
                    for j, address in enumerate(keys):
                        values = e.widen(e.load_units(e.at(address, unit), mask))[plane]
                        for m, part in enumerate(parts):
                            e.add_product(sums[m * at_once + j], values, part)

            e.per_chunk(num_units, chunk)
            for m in range(count):
                row = [e.builder.load(s) for s in sums[m * at_once : (m + 1) * at_once]]
                e.store(e.sum_each(row), e.at(e.at(scores, m * KEY_TILE), key))

    e.per_rows(rows, body)


@simd
def transpose_keys(
    e: Emitter, table: Value, num_keys: Value, num_units: Value, keys: Value
) -> None:
    """keys[unit, j] = unit of key j, for a whole number of vectors of keys."""
    with e.loop(e.const(0), num_keys, LANES) as key:
        rows = [e.load_address(table, key, j) for j in range(LANES)]

        def chunk(unit: Value, mask: Value | None) -> None:
            square = e.transpose([e.load_units(e.at(row, unit), mask) for row in rows])
            for i, column in enumerate(square):
                start = e.builder.mul(e.builder.add(unit, e.const(i)), e.const(KEY_TILE))
                e.store(column, e.at(keys, e.builder.add(start, key)))

        e.per_chunk(num_units, chunk)


@simd
def score_tile(
    e: Emitter,
    rows: Value,
    queries: Value,
    padded: Value,
    keys: Value,
    num_keys: Value,
    num_units: Value,
    scores: Value,
) -> None:
    """scores[m, j] = queries[m] . key j, from transposed keys."""

    def panel(count: int, width: int, key: Value) -> None:
        sums = e.accumulators(count * width)
        with e.loop(e.const(0), num_units) as unit:
            start = e.at(e.at(keys, e.builder.mul(unit, e.const(KEY_TILE))), key)
            columns = [e.widen(e.load_units(e.at(start, w * LANES))) for w in range(width)]
            for m in range(count):
                for plane in range(e.planes):
                    query = e.broadcast(e.plane(queries, m * e.planes + plane, padded, unit))
                    for w in range(width):
                        e.add_product(sums[m * width + w], query, columns[w][plane])
        for m in range(count):
            row = e.at(e.at(scores, m * KEY_TILE), key)
            for w in range(width):
                e.store(e.builder.load(sums[m * width + w]), e.at(row, w * LANES))

    e.per_rows(rows, lambda count: e.per_panel(num_keys, 4, lambda w, k: panel(count, w, k)))


@simd
def softmax_row(e: Emitter, scores: Value, visible: Value, state: Value) -> None:
    """Replace scores (in powers of two) by weights, relative to the row's running maximum.

    Only the first `visible` keys of the tile count; the others get a weight of exactly 0.
    """
    b = e.builder
    offsets = range(0, KEY_TILE, LANES)
    masks = [e.lanes_below(b.sub(visible, e.const(offset))) for offset in offsets]
    lowest = e.floats(LOWEST)
    values = [
        b.select(mask, e.load_floats(e.at(scores, offset)), lowest)
        for mask, offset in zip(masks, offsets, strict=True)
    ]
    old = e.broadcast(state)
    new = e.splat(e.fold(e.maximum, [*values, old]))
    alpha = e.exp2(b.fsub(old, new))
    e.store(b.extract_element(new, ir.Constant(ir.IntType(32), 0)), state)
    e.store(b.extract_element(alpha, ir.Constant(ir.IntType(32), 0)), e.at(state, 1))
    sums = e.at(state, LANES)
    total = b.fmul(e.load_floats(sums), alpha)
    for value, mask, offset in zip(values, masks, offsets, strict=True):
        weights = b.select(mask, e.exp2(b.fsub(value, new)), e.floats(0.0))
        e.store(weights, e.at(scores, offset))
        total = b.fadd(total, weights)
    e.store(total, sums)


@simd
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
    """outputs[m] = outputs[m] * alpha[m] + sum_j weights[m, j] * value j, from the pool."""

    def panel(count: int, width: int, unit: Value, mask: Value | None) -> None:
        targets = [
            e.plane(outputs, m * e.planes + plane, padded, e.builder.add(unit, e.const(w * LANES)))
            for m in range(count)
            for w in range(width)
            for plane in range(e.planes)
        ]
        sums = e.accumulators(len(targets))
        each = width * e.planes
        for m in range(count):
            alpha = e.broadcast(e.at(states, m * STATE + 1))
            for i in range(m * each, (m + 1) * each):
                e.builder.store(e.builder.fmul(e.load_floats(targets[i]), alpha), sums[i])
        with e.loop(e.const(0), num_keys) as key:
            row = e.at(e.builder.add(e.load_address(table, key), values), unit)
            next_row = e.at(e.builder.add(e.load_address(ahead, key), values), unit)
            for w in range(width):
                e.prefetch(e.at(next_row, w * LANES))
            parts = [
                part
                for w in range(width)
                for part in e.widen(e.load_units(e.at(row, w * LANES), mask))
            ]
            for m in range(count):
                weight = e.broadcast(e.at(e.at(weights, m * KEY_TILE), key))
                for i, part in enumerate(parts):
                    e.add_product(sums[m * each + i], weight, part)
        for slot, target in zip(sums, targets, strict=True):
            e.store(e.builder.load(slot), target)

    def body(count: int) -> None:
        e.per_panel(
            num_units,
            4 // e.planes,
            lambda width, unit: panel(count, width, unit, None),
            lambda unit, mask: panel(count, 1, unit, mask),
        )

    e.per_rows(rows, body)
