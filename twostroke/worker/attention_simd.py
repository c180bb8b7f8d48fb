"""The inner loops of the CPU attention, as vector code (see attention_emit for how and why).

All take `like` first, a pointer whose pointee type names the element type of the pool; the rest are
addresses and numbers. `padded` is the length of a plane in scratch, so a scratch row has
`planes * padded` floats. `rows` says how many query rows (at most MAX_ROWS) a call handles; each
number has its own register-blocked code. `table` is the address of a list of addresses, one for
each key's row, so that a block may lie anywhere and have any size; a value lies `values` bytes
after its key.
"""

import functools
from collections.abc import Callable, Sequence
from typing import TypeAlias

from llvmlite import ir

from twostroke.worker.attention_emit import LANES, MAX_ROWS, Emitter, Value

SPLIT_KEYS = 128  # keys of a part of a long context
JOINED_KEYS = 32  # a last part of no more joins the one before it
KEY_TILE = SPLIT_KEYS + JOINED_KEYS  # keys handled together at most
STATE = 2 * LANES  # floats of a row's softmax state: maximum, alpha, ... | LANES partial sums
LOWEST = -1e30  # below any score, and finite: LOWEST - LOWEST is 0


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
    """Widen `count` queries, whose addresses `table` lists, into scratch; the last vector of each
    is zero-padded. The list goes on up to LANES, with the last.

    Something about each may be kept in its state, from the third float on. `large` is not 0 in
    large items, which may be worth other arithmetic; at `room` there is room for scores and keys.
    """
    del large, states, room
    _load_queries(e, table, count, num_units, padded, targets)


def load_few_queries(
    e: Emitter,
    table: Value,
    count: Value,
    num_units: Value,
    padded: Value,
    targets: Value,
    states: Value,
) -> None:
    """`load_queries` for `score_keys`."""
    del states
    _load_queries(e, table, count, num_units, padded, targets)


def _load_queries(
    e: Emitter, table: Value, count: Value, num_units: Value, padded: Value, targets: Value
) -> None:
    with e.loop(e.const(0), count) as row:
        source = e.load_address(table, row)
        target = e.at(targets, e.builder.mul(row, padded), 4 * e.planes)

        def chunk(unit: Value, mask: Value | None) -> None:
            for plane, values in enumerate(e.widen(e.load_units(e.at(source, unit), mask))):
                e.store(values, e.plane(target, plane, padded, unit))

        e.per_chunk(num_units, chunk)


def list_scales(
    e: Emitter, table: Value, values: Value, num_keys: Value, num_units: Value, scales: Value
) -> None:
    """Elements of this type have no scales."""
    del e, table, values, num_keys, num_units, scales


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


def write_row(e: Emitter, source: Value, num_units: Value, target: Value) -> None:
    """Copy one token's keys or values of one head."""

    def chunk(unit: Value, mask: Value | None) -> None:
        e.store_units(e.load_units(e.at(source, unit), mask), e.at(target, unit), mask)

    e.per_chunk(num_units, chunk)


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
    """scores[m, j] = queries[m] . key j, straight from the pool; num_keys a multiple of 8."""
    del states, scales

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
    """keys[unit, j] = unit of key j, for a whole number of vectors of keys; values stay."""
    del large, values, padded, packed
    transpose_keys(e, table, num_keys, num_units, keys, _load_units(e))


Load: TypeAlias = Callable[[Value, Value, Value | None], Value]  # (row, unit, mask) -> units


def _load_units(e: Emitter) -> Load:
    return lambda row, unit, mask: e.load_units(e.at(row, unit), mask)


def transpose_keys(
    e: Emitter, table: Value, num_keys: Value, num_units: Value, keys: Value, load: Load
) -> None:
    with e.loop(e.const(0), num_keys, LANES) as key:
        rows = [e.load_address(table, key, j) for j in range(LANES)]

        def chunk(unit: Value, mask: Value | None) -> None:
            square = e.transpose([load(row, unit, mask) for row in rows])
            for i, column in enumerate(square):
                start = e.builder.mul(e.builder.add(unit, e.const(i)), e.const(KEY_TILE))
                e.store(column, e.at(keys, e.builder.add(start, key)))

        e.per_chunk(num_units, chunk)


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
    """scores[m, j] = queries[m] . key j, from transposed keys."""
    del large

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
    """`softmax_row` of rows `first`, `first` + 1, ... of an item after `score_tile`.

    `group` rows are one query, of which the item's first sees `visible` keys of the tile, the next
    one more, and so on, up to `limit`.
    """
    arguments = (rows, first, group, scores, visible, limit, num_keys, scale, states)
    softmax_rows(e, arguments, e.exp2, lambda weights, row, key: e.store(weights, e.at(row, key)))


def softmax_rows(
    e: Emitter,
    values: tuple[Value, Value, Value, Value, Value, Value, Value, Value, Value],
    exp2: Callable[[Value], Value],
    store: Callable[[Value, Value, Value], None],
    factor_of: Callable[[Value, Value], Value] = lambda scale, _state: scale,
) -> None:
    """`softmax_tile` of `values`; `store(weights, scores, key)` may write to lower scores' place.

    `factor_of(scale, state)` is what a row's scores are multiplied with.

    Rows go side by side, since each alone is a chain: its maximum, folded over the lanes, before
    its first weight. What all rows see is done without masks.
    """
    rows, first, group, scores, visible, limit, num_keys, scale, states = values
    b, lowest = e.builder, e.floats(LOWEST)

    def body(count: int) -> None:
        seen = [
            e.least(b.add(visible, b.sdiv(b.add(first, e.const(m)), group)), limit)
            for m in range(count)
        ]
        everyone = b.and_(e.greatest(seen[0], e.const(0)), e.const(-LANES))
        here = [e.at(scores, m * KEY_TILE) for m in range(count)]
        kept = [e.at(states, m * STATE) for m in range(count)]
        factors = [factor_of(e.broadcast(scale), state) for state in kept]
        tops, totals = e.accumulators(count), e.accumulators(count)
        for top in tops:
            b.store(lowest, top)

        def per_vector(handle: Callable[[int, Value, Value | None], None]) -> None:
            with e.loop(e.const(0), everyone, LANES) as key:
                for m in range(count):
                    handle(m, key, None)
            with e.loop(everyone, num_keys, LANES) as key:
                for m in range(count):
                    handle(m, key, e.lanes_below(b.sub(seen[m], key)))

        def find_top(m: int, key: Value, mask: Value | None) -> None:
            vector = e.load_floats(e.at(here[m], key))
            if mask is not None:
                vector = b.select(mask, vector, lowest)
            b.store(e.maximum(vector, b.load(tops[m])), tops[m])

        per_vector(find_top)
        below = []
        for m in range(count):
            new, alpha = _raise_maximum(e, b.load(tops[m]), factors[m], kept[m])
            b.store(b.fmul(e.load_floats(e.at(kept[m], LANES)), alpha), totals[m])
            below.append(b.fneg(new))

        def weigh(m: int, key: Value, mask: Value | None) -> None:
            weights = exp2(e.fma(e.load_floats(e.at(here[m], key)), factors[m], below[m]))
            if mask is not None:
                weights = b.select(mask, weights, e.floats(0.0))
            store(weights, here[m], key)
            b.store(b.fadd(b.load(totals[m]), weights), totals[m])

        per_vector(weigh)
        for m in range(count):
            e.store(b.load(totals[m]), e.at(kept[m], LANES))

    e.per_rows(rows, body)


def softmax_row(
    e: Emitter, scores: Value, visible: Value, num_keys: Value, scale: Value, state: Value
) -> None:
    """Replace scores by weights, relative to the row's running maximum.

    Scores times the float at `scale` are powers of two. Only the first `visible` keys of the tile
    count; the others, up to `num_keys`, a whole number of vectors, get a weight of exactly 0.
    """
    arguments = (scores, visible, num_keys, scale, state)
    softmax(e, arguments, e.exp2, lambda weights, key: e.store(weights, e.at(scores, key)))


def softmax_few(
    e: Emitter,
    scores: Value,
    visible: Value,
    num_keys: Value,
    scale: Value,
    state: Value,
    scales: Value,
) -> None:
    """`softmax_row` after `score_keys`."""
    del scales
    softmax_row(e, scores, visible, num_keys, scale, state)


def softmax(
    e: Emitter,
    values: tuple[Value, Value, Value, Value, Value],
    exp2: Callable[[Value], Value],
    store: Callable[[Value, Value | int], None],
) -> None:
    """`softmax_row` of `values`; `store(weights, key)` may write to where lower scores were."""
    scores, visible, num_keys, scale, state = values
    b, sums = e.builder, e.at(state, LANES)
    factor = e.broadcast(scale)
    total, top = e.accumulators(2)

    def weigh(vector: Value, new: Value) -> Value:
        return exp2(e.fma(vector, factor, b.fneg(new)))

    def add(weights: Value, offset: Value | int) -> None:
        store(weights, offset)
        b.store(b.fadd(b.load(total), weights), total)

    def raise_maximum(top: Value) -> Value:
        new, alpha = _raise_maximum(e, top, factor, state)
        b.store(b.fmul(e.load_floats(sums), alpha), total)
        return new

    def whole_tile(size: int) -> None:
        offsets = range(0, size, LANES)
        tile = [e.load_floats(e.at(scores, offset)) for offset in offsets]
        new = raise_maximum(functools.reduce(e.maximum, tile))
        for vector, offset in zip(tile, offsets, strict=True):
            add(weigh(vector, new), offset)

    def part_of_tile() -> None:
        lowest = e.floats(LOWEST)
        b.store(lowest, top)
        with e.loop(e.const(0), num_keys, LANES) as key:
            mask = e.lanes_below(b.sub(visible, key))
            vector = b.select(mask, e.load_floats(e.at(scores, key)), lowest)
            b.store(e.maximum(vector, b.load(top)), top)
        new = raise_maximum(b.load(top))
        with e.loop(e.const(0), num_keys, LANES) as key:
            mask = e.lanes_below(b.sub(visible, key))
            weights = weigh(e.load_floats(e.at(scores, key)), new)
            add(b.select(mask, weights, e.floats(0.0)), key)

    def of_size(sizes: Sequence[int]) -> None:
        if not sizes:
            part_of_tile()
            return
        with b.if_else(b.icmp_signed("==", num_keys, e.const(sizes[0]))) as (yes, no):
            with yes:
                whole_tile(sizes[0])
            with no:
                of_size(sizes[1:])

    with b.if_else(b.icmp_signed(">=", visible, num_keys)) as (all_seen, some_hidden):
        with all_seen:
            of_size((KEY_TILE, SPLIT_KEYS))
        with some_hidden:
            part_of_tile()
    e.store(b.load(total), sums)


def _raise_maximum(e: Emitter, top: Value, factor: Value, state: Value) -> tuple[Value, Value]:
    """The new running maximum, given the highest scores; and what older sums are scaled by."""
    old = e.broadcast(state)
    new = e.maximum(e.builder.fmul(e.splat(e.fold(e.maximum, [top])), factor), old)
    alpha = e.exp2(e.builder.fsub(old, new))
    first = ir.Constant(ir.IntType(32), 0)
    e.store(e.builder.extract_element(new, first), state)
    e.store(e.builder.extract_element(alpha, first), e.at(state, 1))
    return new, alpha


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
    """`add_values` after `pack_tile`, which here leaves the values in the pool.

    Half as many keys are asked for as there are, those that `ahead` begins with, and their values.
    """
    del packed
    b = e.builder

    def asked(key: Value) -> Value:
        side = b.mul(b.and_(key, e.const(1)), values)
        return b.add(e.load_address(ahead, b.lshr(key, e.const(1))), side)

    arguments = (rows, weights, table, values, num_keys, num_units, padded, states, outputs)
    _add_values(e, arguments, asked)


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
    arguments = (rows, weights, table, values, num_keys, num_units, padded, states, outputs)
    _add_values(e, arguments, lambda key: e.builder.add(e.load_address(ahead, key), values))


def _add_values(e: Emitter, arguments: Sequence[Value], asked: Callable[[Value], Value]) -> None:
    """`add_values` of the arguments; `asked(key)` is the row to ask for meanwhile."""
    rows, weights, table, values, num_keys, num_units, padded, states, outputs = arguments

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
            next_row = e.at(asked(key), unit)
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
