"""The CPU attention's compiled kernels: the run of one layer.

A step is cut into *items* (by `attention_plan`): one KV head, a tile of queries of one row with all
query heads of that KV head (queries x group score rows: 3 in a decode of SmolLM2, 192 in a
prefill), and a range of keys. An item walks its keys in tiles of 160, each two small products of
matrices:

    few rows (decode)                 many rows (prefill)
    scores = Q . K, straight          K transposed into scratch once a tile,
    from the pool                     then scores = Q . K
      └─────────── online softmax, row by row: weights P ──────────┘
           outputs = outputs * alpha + P . V, V straight from the pool

While it works on a tile, a thread asks for the next one, into L2, a line at a time between the
arithmetic: scattered blocks of 2 KiB are too short for the hardware's own prefetching. (Measured on
Zen 4, a core, decode at a context of 320: 6 GB/s without, 8 into L1, 15 into L2, and 11 when the
prefetches come in bursts.)

A decode walks its keys in STREAMS pieces at once: the processor follows several lines of addresses
better than one that jumps every 2 KiB.

A long context is cut into several items, whose results are merged afterwards in a fixed order.
Decodes that share the blocks of such a part attend it together, so it is read once for all. Where
to cut and in which order to add depends on the row alone: neither neighbours nor threads change a
single bit of a row's result. Threads take items by ticket, as they get done.
"""

import ctypes
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np
from numba import types
from numba.extending import intrinsic

from twostroke.messages import Int32s
from twostroke.model import barrier as barrier_file
from twostroke.model import compiled as compiled_file
from twostroke.model import vectors as vectors_file
from twostroke.model.barrier import meet
from twostroke.model.compiled import (
    address_of,
    floats,
    inner,
    pointer,
    take_ticket,
    use_kernel_cache,
)
from twostroke.worker import (
    attention_dots,
    attention_emit,
    attention_int8,
    attention_int8_scores,
    attention_plan,
    attention_simd,
)
from twostroke.worker.attention_emit import LANES, MAX_ROWS, simd
from twostroke.worker.attention_plan import ITEM_COLUMNS, MERGE_COLUMNS
from twostroke.worker.attention_simd import KEY_TILE, LOWEST, STATE

SMALL_ITEM_ROWS = 8  # up to here transposing the keys costs more than it saves
# Items of so many rows and keys may have scores from 8 bits; for less, rounding costs too much.
LARGE_ITEM_ROWS, LARGE_ITEM_KEYS = 64, 128
STREAMS = 8  # pieces of a decode's context that are walked at once
WRITE_TOKENS = 16  # tokens that a thread writes at a time

TICKETS = 4  # counters, each in a cache line of its own: threads, writes, items, merges
TABLE_FLOATS = 2 * 2 * KEY_TILE  # two lists of 64-bit addresses: this tile's keys, and the next's


class Arguments(ctypes.Structure):
    """What a kernel is given: addresses and numbers, all int64."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            # fixed: the pool, its strides in bytes, and sizes
            *("pool", "block_bytes", "layer_bytes", "side_bytes", "head_bytes", "row_bytes"),
            *("block_size", "num_kv_heads", "group", "num_units", "padded", "width"),
            # fixed: address of the float32 scale * log2(e); a Barrier (0: one thread);
            # scratch, one piece a thread, and how much of it all items use alike
            *("scale", "barrier", "scratch", "scratch_bytes", "shared_bytes"),
            # of a step: int32 arrays, see attention_plan; float32 partials
            *("query_start", "num_computed", "block_tables", "table_blocks"),
            *("num_tokens", "token_blocks", "token_slots"),
            *("num_items", "items", "num_merges", "merges", "members", "bases", "partials"),
            # of a call; tickets must be zero
            *("layer", "tickets", "q", "q_token_bytes", "q_head_bytes"),
            *("k", "k_token_bytes", "k_head_bytes", "v", "v_token_bytes", "v_head_bytes"),
            *("out", "out_token_bytes", "out_head_bytes"),
        )
    ]


def scratch_floats(width: int, num_rows: int) -> int:
    """Scratch of a thread for items of `num_rows` score rows of `width` floats.

    Key addresses | scores of some rows | scales of keys, values | keys, values of a tile | and,
    for each score row: query | output | state.
    """
    return shared_floats(width) + num_rows * (2 * width + STATE)


def shared_floats(width: int) -> int:
    """The part of scratch whose size does not depend on the item."""
    return TABLE_FLOATS + (MAX_ROWS + 2 + width) * KEY_TILE


def _simd(name: str) -> Any:
    """The vector code of that name, by element type."""
    others = (attention_dots, attention_int8, attention_int8_scores)
    return simd(getattr(attention_simd, name), *(getattr(it, name, None) for it in others))


write_row, load_queries, load_few_queries = map(
    _simd, ("write_row", "load_queries", "load_few_queries")
)
list_scales, score_keys, softmax_few = map(_simd, ("list_scales", "score_keys", "softmax_few"))
pack_tile, score_tile, softmax_tile = map(_simd, ("pack_tile", "score_tile", "softmax_tile"))
add_values, add_tile, store_output = map(_simd, ("add_values", "add_tile", "store_output"))

_Function = TypeVar("_Function", bound=Callable[..., Any])
_CACHE = use_kernel_cache(
    *(__file__, attention_plan.__file__, attention_emit.__file__, attention_simd.__file__),
    *(attention_dots.__file__, attention_int8.__file__, attention_int8_scores.__file__),
    *(vectors_file.__file__, compiled_file.__file__, barrier_file.__file__),
)


def _called_once(function: _Function) -> _Function:
    """As `inner`, for large functions with one caller: numba optimises each function again in all
    that call it, unless it is inlined first (5.4 s instead of 7.8 s for all)."""
    compiled: _Function = numba.njit(inline="always")(function)
    return compiled


# ---------------------------------------------------------------- one layer
# `like` names the element type (see attention_emit.simd), `a` is the Arguments record.

_intrinsic: Callable[[Callable[..., Any]], Any] = intrinsic
_ARGUMENTS = numba.from_dtype(np.dtype(Arguments))


@_intrinsic
def _as_arguments(_context: Any, like: types.Type) -> Any:
    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.bitcast(values[0], context.get_value_type(signature.return_type))

    return types.CPointer(_ARGUMENTS)(like), generate


@inner
def _int32s(address: int, rows: int, columns: int) -> Any:
    return numba.carray(pointer(address), (rows, columns), np.int32)


@inner
def _key_address(a: Any, block: int, head: int, slot: int) -> int:
    start: int = a.pool + block * a.block_bytes + a.layer * a.layer_bytes
    return start + head * int(a.head_bytes) + slot * int(a.row_bytes)


@inner
def _write_token(like: Any, a: Any, token: int) -> None:
    """Put a token's keys and values into the pool."""
    block = _int32s(a.token_blocks, 1, a.num_tokens)[0, token]
    slot = _int32s(a.token_slots, 1, a.num_tokens)[0, token]
    for head in range(a.num_kv_heads):
        target = _key_address(a, block, head, slot)
        key = a.k + token * a.k_token_bytes + head * a.k_head_bytes
        write_row(like, key, a.num_units, target)
        value = a.v + token * a.v_token_bytes + head * a.v_head_bytes
        write_row(like, value, a.num_units, target + a.side_bytes)


@inner
def _list_keys(a: Any, item: Int32s, first: int, table: int) -> None:
    """Addresses of the item's key rows from position `first` on, at most KEY_TILE, then the last
    one repeated up to a whole number of vectors.

    Where all queries see all keys their order is free: then neighbours in the list are STREAMS
    pieces of the context apart, and each piece is walked in its order.
    """
    rows = numba.carray(pointer(table), (KEY_TILE,), np.int64)
    blocks = _int32s(a.block_tables + item[0] * a.table_blocks * 4, 1, a.table_blocks)
    count = min(KEY_TILE, item[5] - first)
    streams = STREAMS if item[3] == 1 or item[7] >= 0 else 1
    block = first // a.block_size
    slot = first - block * a.block_size
    address = _key_address(a, blocks[0, block], item[1], slot)
    for stream in range(streams):
        for key in range(stream, count, streams):
            if slot == a.block_size:
                block, slot = block + 1, 0
                address = _key_address(a, blocks[0, block], item[1], 0)
            rows[key] = address
            address, slot = address + a.row_bytes, slot + 1
    for key in range(count, -(-count // 16) * 16):
        rows[key] = rows[count - 1]


@_called_once
def _run_tile(
    like: Any,
    a: Any,
    num_rows: int,
    visible: int,
    num_keys: int,
    small: bool,
    large: int,
    table: int,
    ahead: int,
    scratch: int,
) -> None:
    """Score a tile of `num_keys` keys, of which the first query sees `visible`, and add it up."""
    num_units, padded, row_bytes = a.num_units, a.padded, a.width * 4
    scores = scratch + TABLE_FLOATS * 4
    scales = scores + MAX_ROWS * KEY_TILE * 4
    keys = scales + 2 * KEY_TILE * 4
    values = keys + padded * KEY_TILE * 4
    queries = scratch + a.shared_bytes
    outputs = queries + num_rows * row_bytes
    states = outputs + num_rows * row_bytes
    side, whole = a.side_bytes, -(-num_keys // 16) * 16
    if small:
        list_scales(like, table, side, whole, num_units, scales)
    else:
        pack_tile(like, large, table, side, whole, num_units, padded, keys, values)
    # Equal parts of at most MAX_ROWS rows: 8 rows are 4 + 4, not 6 + 2.
    step = -(-num_rows // -(-num_rows // MAX_ROWS))
    for row in range(0, num_rows, step):
        rows = min(step, num_rows - row)
        seen = min(num_keys, visible + (row + rows - 1) // a.group)
        if seen <= 0:
            continue
        whole = -(-seen // 16) * 16
        query, output = queries + row * row_bytes, outputs + row * row_bytes
        state = states + row * STATE * 4
        if small:
            score_keys(
                *(like, rows, query, padded, table, ahead),
                *(whole, num_units, state, scales, scores),
            )
            for i in range(rows):
                sees = min(num_keys, visible + (row + i) // a.group)
                score, kept = scores + i * KEY_TILE * 4, state + i * STATE * 4
                softmax_few(like, score, sees, whole, a.scale, kept, scales)
            add_values(
                *(like, rows, scores, table, ahead, side),
                *(seen, num_units, padded, state, output),
            )
        else:
            score_tile(like, large, rows, query, padded, keys, whole, num_units, scores)
            softmax_tile(
                *(like, rows, row, a.group, scores),
                *(visible, num_keys, whole, a.scale, state),
            )
            # Each asks for half of the next tile: two do for all of it.
            further = ahead if row == 0 else ahead + num_keys // 2 * 8
            add_tile(
                *(like, rows, scores, table, further, side, values),
                *(seen, num_units, padded, state, output),
            )


@inner
def _member(a: Any, item: Int32s, number: int) -> int:
    """The row of an item's `number`-th query; only in shared items they differ."""
    if item[7] < 0:
        return int(item[0])
    return int(_int32s(a.members, 1, item[7] + number + 1)[0, item[7] + number])


@inner
def _token(a: Any, item: Int32s, number: int) -> int:
    """The token of an item's `number`-th query."""
    start = _int32s(a.query_start + _member(a, item, number) * 4, 1, 1)[0, 0]
    return int(start + item[2] + number) if item[7] < 0 else int(start)


@_called_once
def _run_item(
    like: Any, a: Any, item: Int32s, after: Int32s, scratch: int, table: int, ahead: int
) -> int:
    """Attend one item; its result goes to the output, or to the partials when it is a part.

    `table` lists its first keys. Returns the one of the two that lists those of `after`.
    """
    row, head, num_queries = item[0], item[1], item[3]
    first_key, end_key, shared = item[4], item[5], item[7] >= 0
    group, width = a.group, a.width
    num_rows = num_queries * group
    # All see all keys of a shared item.
    position = end_key - 1
    if not shared:
        position = item[2] + _int32s(a.num_computed + row * 4, 1, 1)[0, 0]
    queries = scratch + a.shared_bytes
    outputs = queries + num_rows * width * 4
    states = outputs + num_rows * width * 4
    # A decode's sums are taken in the same order whether it shares its keys or not.
    small = shared or num_rows <= SMALL_ITEM_ROWS
    large = int(num_rows >= LARGE_ITEM_ROWS and end_key - first_key >= LARGE_ITEM_KEYS)
    state = floats(states, num_rows * STATE)
    for i in range(num_rows * STATE):
        state[i] = LOWEST if i % STATE == 0 else 0.0
    # Until the next tile is listed there, the list of their addresses.
    sources = numba.carray(pointer(ahead), (LANES,), np.int64)
    for first in range(0, num_rows, LANES):
        count = min(LANES, num_rows - first)
        for i in range(LANES):
            j = min(first + i, num_rows - 1)
            token, query_head = _token(a, item, j // group), head * group + j % group
            sources[i] = a.q + token * a.q_token_bytes + query_head * a.q_head_bytes
        query, kept = queries + first * width * 4, states + first * STATE * 4
        if small:
            load_few_queries(like, ahead, count, a.num_units, a.padded, query, kept)
        else:
            room = scratch + TABLE_FLOATS * 4
            load_queries(like, large, ahead, count, a.num_units, a.padded, query, kept, room)
    zeros = floats(outputs, num_rows * width)
    for i in range(num_rows * width):
        zeros[i] = 0.0
    for tile in range(first_key, end_key, KEY_TILE):
        if tile + KEY_TILE < end_key:
            _list_keys(a, item, tile + KEY_TILE, ahead)
        else:
            _list_keys(a, after, after[4], ahead)
        num_keys, visible = min(KEY_TILE, end_key - tile), position + 1 - tile
        _run_tile(like, a, num_rows, visible, num_keys, small, large, table, ahead, scratch)
        table, ahead = ahead, table

    _keep_item(like, a, item, outputs, states)
    return table


@_called_once
def _keep_item(like: Any, a: Any, item: Int32s, outputs: int, states: int) -> None:
    """Write an item's rows to the output, or to the partials when it is a part."""
    head, partial, shared = item[1], item[6], item[7] >= 0
    group, width = a.group, a.width
    for i in range(item[3] * group):
        output = outputs + i * width * 4
        if partial < 0:
            token, query_head = _token(a, item, i // group), head * group + i % group
            _store(like, a, token, query_head, output, states + i * STATE * 4)
        else:
            where = partial + i
            if shared:
                member = _member(a, item, i // group) * a.num_kv_heads + head
                base = _int32s(a.bases, 1, member + 1)[0, member]
                where = base + item[2] * group + i % group
            target, source = _partial(a, where), floats(output, width)
            for j in range(width):
                target[j] = source[j]
            source = floats(states + i * STATE * 4, STATE)
            for j in range(STATE):
                target[width + j] = source[j]


@inner
def _store(like: Any, a: Any, token: int, head: int, output: int, state: int) -> None:
    target = a.out + token * a.out_token_bytes + head * a.out_head_bytes
    store_output(like, output, state, a.num_units, a.padded, target)


@inner
def _partial(a: Any, row: int) -> Any:
    """A partial row: outputs, then state."""
    size = a.width + STATE
    return floats(a.partials + row * size * 4, size)


@inner
def _merge(like: Any, a: Any, merge: Int32s, scratch: int) -> None:
    """Combine the parts of a query tile whose keys were split."""
    row, head, query, num_queries = merge[0], merge[1], merge[2], merge[3]
    partial, num_parts = merge[4], merge[5]
    group, width = a.group, a.width
    num_rows = num_queries * group
    first_token = query + _int32s(a.query_start + row * 4, 1, 1)[0, 0]
    total = floats(scratch, width + STATE)
    for i in range(num_rows):
        top = np.float32(LOWEST)
        for part in range(num_parts):
            top = max(top, _partial(a, partial + part * num_rows + i)[width])
        for j in range(width + STATE):
            total[j] = 0.0
        for part in range(num_parts):
            source = _partial(a, partial + part * num_rows + i)
            weight = np.exp2(source[width] - top)
            for j in range(width + STATE):
                total[j] += weight * source[j]
        token, query_head = first_token + i // group, head * group + i % group
        _store(like, a, token, query_head, scratch, scratch + width * 4)


@_called_once
def _attend(like: Any) -> None:
    """One thread's share of a layer: write keys and values, attend, merge.

    `like` points to Arguments, though its type says what the pool's elements are. With fewer
    threads than asked for the result is the same.
    """
    a = numba.carray(_as_arguments(like), 1)[0]
    writes, work, merges = a.tickets + 64, a.tickets + 128, a.tickets + 192
    scratch = a.scratch + take_ticket(a.tickets) * a.scratch_bytes

    first = take_ticket(writes) * WRITE_TOKENS
    while first < a.num_tokens:
        for token in range(first, min(first + WRITE_TOKENS, a.num_tokens)):
            _write_token(like, a, token)
        first = take_ticket(writes) * WRITE_TOKENS
    if a.barrier:
        meet(a.barrier)

    items = _int32s(a.items, a.num_items, ITEM_COLUMNS)
    table, ahead = scratch, scratch + KEY_TILE * 8
    i = take_ticket(work)
    if i < a.num_items:
        item = items[i]
        _list_keys(a, item, item[4], table)
    while i < a.num_items:
        after = take_ticket(work)
        following = items[min(after, a.num_items - 1)]
        listed = _run_item(like, a, items[i], following, scratch, table, ahead)
        if listed != table:
            table, ahead = ahead, table
        i = after
    if a.num_merges == 0:
        return
    if a.barrier:
        meet(a.barrier)

    parts = _int32s(a.merges, a.num_merges, MERGE_COLUMNS)
    i = take_ticket(merges)
    while i < a.num_merges:
        _merge(like, a, parts[i], scratch)
        i = take_ticket(merges)


@functools.cache
def compile_attend(element: types.Type) -> int:
    """Address of `void attend(Arguments *)` for a pool of uint16 (bfloat16), int16 (float16),
    float32, int8 (with all else in bfloat16), or uint8 (bfloat16, with scores of chunks from 8
    bits). Takes seconds when it is not in the cache."""

    def attend(like: Any) -> None:
        _attend(like)

    signature = types.void(types.CPointer(element))
    return address_of(attend, signature, cache=_CACHE)
