"""What to run in a step of the CPU attention: its items, their parts and who shares them.

See `attention_kernels` for what an item is. Where a row is cut follows from the row alone.
"""

import numpy as np

from twostroke.messages import Int32s
from twostroke.model import compiled as compiled_file
from twostroke.model.compiled import inner, kernel, use_kernel_cache
from twostroke.worker import attention_simd
from twostroke.worker.attention_simd import JOINED_KEYS, SPLIT_KEYS

MAX_ITEM_ROWS = 192  # score rows of an item, which share one pass over its keys

# Row, head, first query, queries, first key, end key, first partial row or -1, and -1; or, where
# decodes share keys: the first row, head, part, number of rows, first key, end key, 0, and
# where the rows are listed in `members`.
ITEM_COLUMNS = 8
MERGE_COLUMNS = 6  # row, head, first query, queries, first partial row, parts

_CACHE = use_kernel_cache(__file__, attention_simd.__file__, compiled_file.__file__)


@kernel(cache=_CACHE, nogil=False)
def plan_step(
    query_start: Int32s,
    num_computed: Int32s,
    block_tables: Int32s,
    block_size: int,
    num_kv_heads: int,
    group: int,
    items: Int32s,
    merges: Int32s,
    members: Int32s,
    bases: Int32s,
) -> tuple[int, int, int, int]:
    """Cut a step into `items` and `merges`; returns their numbers, that of members of shared items,
    and that of partial score rows.

    Called first with empty arrays to learn the numbers, then with room for them. `bases` [rows *
    num_kv_heads] gets the first partial row of each decode that is split.
    """
    split_rows = np.empty(len(num_computed), np.int32)  # decodes of several parts
    num_items = num_merges = num_partials = num_split = 0
    for row in range(len(num_computed)):
        num_queries = query_start[row + 1] - query_start[row]
        tile = max(1, min(num_queries, MAX_ITEM_ROWS // group))
        split = SPLIT_KEYS * -(-num_queries // tile)  # many tiles are parallel enough
        decodes = num_queries == 1 and _num_parts(num_computed[row] + 1, split) > 1
        if decodes:
            split_rows[num_split] = row
            num_split += 1
        for head in range(num_kv_heads):
            if decodes and len(bases):
                bases[row * num_kv_heads + head] = num_partials
            # The last tiles see the most: first, so that threads end together.
            for query in range((num_queries - 1) // tile * tile, -1, -tile):
                queries = min(tile, num_queries - query)
                end = num_computed[row] + query + queries
                parts = _num_parts(end, split)
                if parts > 1:
                    if num_merges < len(merges):
                        merge = merges[num_merges]
                        merge[0], merge[1], merge[2] = row, head, query
                        merge[3], merge[4], merge[5] = queries, num_partials, parts
                    num_merges += 1
                for part in range(parts):
                    first, last = part * split, end if part == parts - 1 else (part + 1) * split
                    partial = num_partials + part * queries * group if parts > 1 else -1
                    if not decodes:
                        _add_item(
                            *(items, num_items, row, head),
                            *(query, queries, first, last, partial, -1),
                        )
                        num_items += 1
                if parts > 1:
                    num_partials += parts * queries * group
    order = split_rows[:num_split]
    order = order[np.argsort(block_tables[order, 0], kind="mergesort")]
    num_items, num_members = _plan_split_decodes(
        *(order, num_computed, block_tables, block_size, num_kv_heads, group),
        *(items, num_items, members, bases),
    )
    return num_items, num_merges, num_members, num_partials


@inner
def _plan_split_decodes(
    order: Int32s,
    num_computed: Int32s,
    block_tables: Int32s,
    block_size: int,
    num_kv_heads: int,
    group: int,
    items: Int32s,
    num_items: int,
    members: Int32s,
    bases: Int32s,
) -> tuple[int, int]:
    """Items of the decodes `order`, part by part; rows next to each other share what they can."""
    num_members, part = 0, 0
    joined = np.ones(len(order), np.bool_)  # shares all blocks so far with the row before it
    num_left = len(order)
    while num_left:
        num_left, i = 0, 0
        first = part * SPLIT_KEYS
        while i < len(order):
            row, count = int(order[i]), 1
            num_parts = _num_parts(int(num_computed[row]) + 1, SPLIT_KEYS)
            if part >= num_parts:
                i += 1
                continue
            num_left += 1
            while i + count < len(order) and joined[i + count]:
                one, two = order[i + count - 1], order[i + count]
                if not _shares_part(block_tables, num_computed, one, two, part, block_size):
                    joined[i + count] = False
                elif count < max(1, MAX_ITEM_ROWS // group):
                    count += 1
                    continue
                break
            last = int(num_computed[row]) + 1 if part == num_parts - 1 else first + SPLIT_KEYS
            for head in range(num_kv_heads):
                base = int(bases[row * num_kv_heads + head]) if len(bases) else 0
                shared = count > 1
                query, partial = (part, 0) if shared else (0, base + part * group)
                listed = num_members if shared else -1
                _add_item(
                    *(items, num_items, row, head),
                    *(query, count, first, last, partial, listed),
                )
                num_items += 1
            if count > 1:
                if len(members):
                    members[num_members : num_members + count] = order[i : i + count]
                num_members += count
            i += count
        part += 1
    return num_items, num_members


@inner
def _num_parts(num_keys: int, split: int) -> int:
    """Parts of `split` keys, but for the last: it has from JOINED_KEYS + 1 to split + JOINED_KEYS
    keys, or all."""
    return max(1, -(-(num_keys - JOINED_KEYS) // split))


@inner
def _add_item(
    items: Int32s,
    number: int,
    row: int,
    head: int,
    query: int,
    queries: int,
    first: int,
    last: int,
    partial: int,
    members: int,
) -> None:
    """Fill in an item, when there is room."""
    if number < len(items):
        item = items[number]
        item[0], item[1], item[2], item[3] = row, head, query, queries
        item[4], item[5], item[6], item[7] = first, last, partial, members


@inner
def _shares_part(
    block_tables: Int32s, num_computed: Int32s, one: int, two: int, part: int, block_size: int
) -> bool:
    """Whether two rows have the same blocks throughout a part, all of it computed before.

    The block that its end lies in counts too. The last part of a row is not shared.
    """
    end = (part + 1) * SPLIT_KEYS
    if end + JOINED_KEYS > min(num_computed[one], num_computed[two]):
        return False
    for block in range(part * SPLIT_KEYS // block_size, -(-end // block_size)):
        if block_tables[one, block] != block_tables[two, block]:
            return False
    return True


@kernel(cache=_CACHE, nogil=False)
def locate_tokens(
    query_start: Int32s,
    num_computed: Int32s,
    block_tables: Int32s,
    block_size: int,
    blocks: Int32s,
    slots: Int32s,
) -> None:
    """Block and slot that each token of the step is written to."""
    for row in range(len(num_computed)):
        for token in range(query_start[row], query_start[row + 1]):
            position = num_computed[row] + token - query_start[row]
            blocks[token] = block_tables[row, position // block_size]
            slots[token] = position % block_size
