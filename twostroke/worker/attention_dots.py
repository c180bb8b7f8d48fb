"""The inner loops of the CPU attention in bfloat16, where the CPU multiplies pairs of it at once.

The bodies take the place of those of the same names in `attention_simd`, and take the same values.
A unit is a pair of elements, and stays one: `dpbf16ps` adds two products of bfloat16 to a float32,
which is twice the arithmetic of float32, and nothing need be widened. What is multiplied is laid
out so that pairs of the summed index are units:

    scores   = Q . K     sum over elements    queries as they are; keys [unit, key]
    outputs += P . V     sum over keys        weights rounded to bfloat16; values [pair of keys, element]

Queries, keys, values and weights are rounded to bfloat16, all sums are float32.
"""  # noqa: E501

from collections.abc import Callable, Sequence

from twostroke.worker import attention_simd
from twostroke.worker.attention_emit import LANES, MAX_ROWS, Emitter, Value
from twostroke.worker.attention_simd import KEY_TILE, STATE, Load, transpose_keys


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
    del large, room
    load_few_queries(e, table, count, num_units, padded, targets, states)


def load_few_queries(
    e: Emitter,
    table: Value,
    count: Value,
    num_units: Value,
    padded: Value,
    targets: Value,
    states: Value,
) -> None:
    del states
    with e.loop(e.const(0), count) as row:
        source, target = e.load_address(table, row), e.at(targets, e.builder.mul(row, padded), 8)

        def chunk(unit: Value, mask: Value | None) -> None:
            e.store(e.load_units(e.at(source, unit), mask), e.at(target, unit))

        e.per_chunk(num_units, chunk)


def store_output(
    e: Emitter, source: Value, state: Value, num_units: Value, padded: Value, target: Value
) -> None:
    del padded
    b = e.builder
    factor = e.splat(b.fdiv(e.float(1.0), e.row_sum(state)))

    def chunk(unit: Value, mask: Value | None) -> None:
        start = e.at(source, unit, 8)
        halves = [
            e.to_bf16s(b.fmul(e.load_floats(e.at(start, i * LANES)), factor)) for i in range(2)
        ]
        e.store_units(e.bf16_units(*halves), e.at(target, unit), mask)

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
    del states, scales

    def body(count: int) -> None:
        at_once = 8 if count * 8 <= MAX_ROWS * 4 else 4
        with e.loop(e.const(0), num_keys, at_once) as key:
            sums = e.accumulators(count * at_once)
            keys = [e.load_address(table, key, j) for j in range(at_once)]
            next_keys = [e.load_address(ahead, key, j) for j in range(at_once)]

            for address in next_keys:
                e.prefetch_row(address, num_units)

            def chunk(unit: Value, mask: Value | None) -> None:
                parts = [e.load_units(e.query(queries, m, padded, unit)) for m in range(count)]
                for j, address in enumerate(keys):
                    units = e.load_units(e.at(address, unit), mask)
                    for m, part in enumerate(parts):
                        e.add_dots(sums[m * at_once + j], part, units)

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
    """Also packed[pair of keys, element] = pair of values; both padded with zeros."""
    del large
    arguments = (table, values, num_keys, num_units, padded, keys, packed)
    pack(e, arguments, load_pairs(e))


def load_pairs(e: Emitter) -> Load:
    return lambda row, unit, mask: e.load_units(e.at(row, unit), mask)


def pack(e: Emitter, arguments: Sequence[Value], load: Load) -> None:
    """`pack_tile` of the arguments, with rows loaded as units of bfloat16."""
    table, _, num_keys, num_units, _, keys, _ = arguments
    transpose_keys(e, table, num_keys, num_units, keys, load)
    pack_values(e, arguments, load)


def pack_values(e: Emitter, arguments: Sequence[Value], load: Load) -> None:
    table, values, num_keys, num_units, padded, _, packed = arguments
    with e.loop(e.const(0), num_keys, 2) as key:
        rows = [e.builder.add(e.load_address(table, key, j), values) for j in range(2)]
        target = e.at(packed, e.builder.mul(key, padded))

        def chunk(unit: Value, mask: Value | None) -> None:
            start = e.at(target, unit, 8)
            pairs = e.interleave(*(load(row, unit, mask) for row in rows))
            for i, units in enumerate(pairs):
                e.store(units, e.at(start, i * LANES))

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
    del large

    def panel(count: int, width: int, key: Value) -> None:
        sums = e.accumulators(count * width)
        with e.loop(e.const(0), num_units) as unit:
            start = e.at(e.at(keys, e.builder.mul(unit, e.const(KEY_TILE))), key)
            columns = [e.load_units(e.at(start, w * LANES)) for w in range(width)]
            for m in range(count):
                pair = e.broadcast_unit(e.query(queries, m, padded, unit))
                for w in range(width):
                    e.add_dots(sums[m * width + w], pair, columns[w])
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
    """Weights are bfloat16, and take the first half of the scores' place."""
    arguments = (rows, first, group, scores, visible, limit, num_keys, scale, states)
    attention_simd.softmax_rows(e, arguments, e.exp2_rough, store_weights(e))


def store_weights(e: Emitter) -> Callable[[Value, Value, Value], None]:
    """For `softmax_rows`: as bfloat16."""
    return lambda weights, row, key: e.store(e.to_bf16s(weights), e.at(row, key, 2))


def softmax_row(
    e: Emitter, scores: Value, visible: Value, num_keys: Value, scale: Value, state: Value
) -> None:
    """Weights are bfloat16, and take the first half of the scores' place."""
    arguments = (scores, visible, num_keys, scale, state)

    def store(weights: Value, key: Value | int) -> None:
        e.store(e.to_bf16s(weights), e.at(scores, key, 2))

    attention_simd.softmax(e, arguments, e.exp2_rough, store)


def softmax_few(
    e: Emitter,
    scores: Value,
    visible: Value,
    num_keys: Value,
    scale: Value,
    state: Value,
    scales: Value,
) -> None:
    del scales
    softmax_row(e, scores, visible, num_keys, scale, state)


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
        targets = _targets(e, outputs, count, 2 * width, padded, e.builder.mul(unit, e.const(2)))
        sums = _scaled_outputs(e, targets, states)
        with e.loop(e.const(0), num_keys, 2) as key:
            now, later = (
                [e.at(e.builder.add(e.load_address(it, key, j), values), unit) for j in range(2)]
                for it in (table, ahead)
            )
            columns: list[Value] = []
            for address in later:
                for w in range(width):
                    e.prefetch(e.at(address, w * LANES))
            for w in range(width):
                pair = (e.load_units(e.at(address, w * LANES), mask) for address in now)
                columns += e.interleave(*pair)
            _add_pair(e, sums, weights, key, columns)
        _store_sums(e, sums, targets)

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
    """`add_values`, from packed values; asks for keys as `attention_simd.add_tile` does."""
    del table, num_units
    arguments = (rows, weights, ahead, values, packed, num_keys, padded, states, outputs)
    add_packed(e, arguments, 2)


def add_packed(e: Emitter, arguments: Sequence[Value], element_bytes: int) -> None:
    """`add_tile` of the arguments; `element_bytes` are an element's in the pool."""
    rows, weights, ahead, values, packed, num_keys, padded, states, outputs = arguments
    b = e.builder

    def panel(count: int, width: int, element: Value) -> None:
        targets = _targets(e, outputs, count, width, padded, element)
        sums = _scaled_outputs(e, targets, states)
        with e.loop(e.const(0), num_keys, 2) as key:
            next_key = e.at(e.load_address(ahead, b.lshr(key, e.const(1))), element, element_bytes)
            for address in (next_key, b.add(next_key, values)):
                for byte in range(0, width * LANES * element_bytes, 64):
                    e.prefetch(b.add(address, e.const(byte)))
            row = e.at(e.at(packed, b.mul(key, padded)), element)
            columns = [e.load_units(e.at(row, w * LANES)) for w in range(width)]
            _add_pair(e, sums, weights, key, columns)
        _store_sums(e, sums, targets)

    elements = b.mul(padded, e.const(2))
    e.per_rows(rows, lambda count: e.per_panel(elements, 4, lambda w, i: panel(count, w, i)))


_Sums = list[list[Value]]  # [row][vector]


def _targets(
    e: Emitter, outputs: Value, count: int, width: int, padded: Value, element: Value
) -> _Sums:
    """Addresses of `width` vectors of outputs from `element`, for each row."""
    rows = (e.at(e.plane(outputs, 2 * m, padded, element), 0) for m in range(count))
    return [[e.at(row, w * LANES) for w in range(width)] for row in rows]


def _scaled_outputs(e: Emitter, targets: _Sums, states: Value) -> _Sums:
    """Accumulators that begin with what there is, times alpha."""
    sums = []
    for m, row in enumerate(targets):
        alpha = e.broadcast(e.at(states, m * STATE + 1))
        slots = e.accumulators(len(row))
        for slot, target in zip(slots, row, strict=True):
            e.builder.store(e.builder.fmul(e.load_floats(target), alpha), slot)
        sums.append(slots)
    return sums


def _add_pair(
    e: Emitter, sums: _Sums, weights: Value, key: Value, columns: Sequence[Value]
) -> None:
    for m, row in enumerate(sums):
        pair = e.broadcast_unit(e.at(e.at(weights, m * KEY_TILE), key, 2))
        for slot, units in zip(row, columns, strict=True):
            e.add_dots(slot, pair, units)


def _store_sums(e: Emitter, sums: _Sums, targets: _Sums) -> None:
    for slots, row in zip(sums, targets, strict=True):
        for slot, target in zip(slots, row, strict=True):
            e.store(e.builder.load(slot), target)
