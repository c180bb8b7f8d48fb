"""KvManager: the only class of this package that the scheduler talks to.

It answers "which cached blocks match?" and "are there blocks for this?", and takes blocks back. It
knows block tables and token counts, not requests. Rules are those of vLLM 0.22.1 with one group of
layers: full attention, or one sliding window.

    block table of a request          [ hit, hit | loaded, loaded | new, new, new ]
    its counts, in tokens               local hit  external         to be computed

With a window W, the leading blocks that no later token can see are replaced by the null block.
"""

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from twostroke.arrays import ZERO, Int32s, Int64s
from twostroke.config import SchedulerConfig
from twostroke.errors import TwostrokeError
from twostroke.kv.blocks import NO_BLOCKS, NULL_BLOCK, BlockPool
from twostroke.kv.prefix import Hasher, KeyMap, Keys, PrefixHasher, PrefixMap, UInt64s

_MAX_MEMOS = 32


class IntegrityError(TwostrokeError):
    """The engine's own books do not balance: a bug, never a user's mistake."""


class BlockTable:
    """The blocks of one request and the keys of its prefix.

    `num_registered` counts leading blocks that are in the prefix map (or need not be); it is None
    until the first of them is. `keys` and `sums` reach as far as the request's full blocks were
    hashed. `blocks` is an array of 64-bit integers: whole tables become columns without a copy.
    """

    __slots__ = ("blocks", "keys", "may_read", "num_registered", "sums")

    def __init__(self, keys: Keys, sums: UInt64s, *, may_read: bool = True) -> None:
        self.blocks = array("q")
        self.keys = keys
        self.sums = sums
        self.num_registered: int | None = None
        self.may_read = may_read

    def column(self) -> Int64s:
        """The blocks, at least one, as a column; to be dropped before the table changes."""
        return np.frombuffer(self.blocks, np.int64)


class _Memo:
    """A look-up of a request that still waits, so that a blocked head is not looked up each step.

    It holds until one of its blocks loses its key or the first key that was missing appears.
    """

    __slots__ = ("blocks", "hits", "limit", "missing_key")

    def __init__(self, limit: int, hits: Int64s, missing_key: Keys) -> None:
        self.limit = limit
        self.hits = hits
        self.blocks = frozenset(hits.tolist())
        self.missing_key = missing_key  # the one key, if any


class KvManager:
    """Blocks, prefix cache and their rules.

    With `in_runs` the blocks that a table takes at once are put in order of their ids: as blocks
    come back last first, most then stand in adjacent runs, which a transfer reads as one piece.
    """

    def __init__(
        self, config: SchedulerConfig, *, secret: bytes | None = None, in_runs: bool = False
    ) -> None:
        self.block_size = config.block_size
        self.pool = BlockPool(config.num_blocks)
        self.caching = config.enable_prefix_caching
        self.hasher: Hasher = PrefixHasher(config.block_size, secret=secret)
        self.num_lookups = 0
        self.num_owners = 0  # tables that hold blocks
        self._in_runs = in_runs
        self._map: KeyMap = PrefixMap(config.num_blocks)
        self._max_model_len = config.max_model_len
        self._window = config.sliding_window
        self._drop_last_hit = config.num_spec_tokens > 0 and config.spec_method == "eagle"
        self._memos: dict[BlockTable, _Memo] = {}
        self._last_lookup: tuple[BlockTable, int, Int64s] | None = None
        window_tokens = (self._window or 0) - 1 + config.max_num_batched_tokens
        self._window_gate_blocks = self.blocks_for(min(window_tokens, config.max_model_len)) + 1

    def use_keys(self, hasher: Hasher, key_map: KeyMap) -> None:
        """Know prefixes by other keys than a process with secrets does. Before the first table."""
        self.hasher, self._map = hasher, key_map

    # ------------------------------------------------------------ sizes

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    @property
    def num_free(self) -> int:
        return self.pool.num_free

    @property
    def usage(self) -> float:
        """Share of the usable blocks that some request holds."""
        return self.usage_with(0)

    def usage_with(self, num_more: int) -> float:
        """The same when so many more are taken."""
        usable = self.pool.num_usable
        return 1 - (self.pool.num_free - num_more) / usable if usable else 0.0

    @property
    def windowed(self) -> bool:
        return self._window is not None

    def blocks_at_once(self, num_tokens: int) -> int:
        """Blocks that one request of `num_tokens` tokens must be able to hold at the same time."""
        blocks = self.blocks_for(num_tokens)
        return blocks if self._window is None else min(blocks, self._window_gate_blocks)

    def first_visible(self, num_computed: int) -> int:
        """Tokens at the front that the next token cannot see (0 with full attention)."""
        return 0 if self._window is None else max(0, num_computed - self._window + 1)

    # ------------------------------------------------------------ prefix cache

    def new_table(self, tokens: Int32s, domain: str, *, may_read: bool) -> BlockTable:
        """An empty table of a request with these tokens; hashes their full blocks."""
        table = BlockTable(self.hasher.no_keys(), self.hasher.start(domain), may_read=may_read)
        self.hash_tokens(table, tokens)
        return table

    def hash_tokens(self, table: BlockTable, tokens: Int32s) -> None:
        """Extend the table's keys over all full blocks of `tokens`, the request's tokens so far."""
        if self.caching:
            first = len(table.keys)
            rest = tokens[first * self.block_size :] if first else tokens
            keys, table.sums = self.hasher.extend_one(table.sums, first, rest)
            table.keys += keys

    def lookup(self, table: BlockTable, num_tokens: int) -> Int64s:
        """Cached blocks that match the prefix, leaving at least one of `num_tokens` to compute.

        Nothing is pinned. With a window the list may begin with null blocks.
        """
        if not self.caching or not table.may_read:
            return NO_BLOCKS
        limit = min((num_tokens - 1) // self.block_size, len(table.keys))
        if self._window is not None:
            self.num_lookups += 1
            hits = self._window_hits(table.keys[:limit], self._window)
        else:
            hits = self._prefix_hits(table, limit)
        return hits[:-1] if self._drop_last_hit else hits

    def _prefix_hits(self, table: BlockTable, limit: int) -> Int64s:
        memo = self._memos.get(table)
        if memo is not None and memo.limit == limit and not len(self._map.find(memo.missing_key)):
            return memo.hits
        self.num_lookups += 1
        hits = self._map.find(table.keys[:limit])
        self._last_lookup = (table, limit, hits)
        return hits

    def remember_lookup(self, table: BlockTable) -> None:
        """The request of the last look-up has to wait: it need not be looked up again."""
        if self._last_lookup is None or self._last_lookup[0] is not table:
            return
        _, limit, hits = self._last_lookup
        if len(self._memos) >= _MAX_MEMOS:
            self._memos.clear()
        missing_key = table.keys[len(hits) : min(len(hits) + 1, limit)]
        self._memos[table] = _Memo(limit, hits, missing_key)
        self._last_lookup = None

    def _window_hits(self, keys: Keys, window: int) -> Int64s:
        """The right-most run of cached blocks that covers a window, nulls to its left.

        Without such a run: the run that begins at block 0, of whatever length.
        """
        want = self.blocks_for(window - 1) + self._drop_last_hit
        hits = self._map.find_each(keys)
        run = 0
        for index, block in zip(range(len(keys) - 1, -1, -1), hits[::-1].tolist(), strict=True):
            run = run + 1 if block != NULL_BLOCK else 0
            if run and run >= want:
                hits[:index] = NULL_BLOCK
                return hits[: index + run]
        return hits[:run]

    def register(self, table: BlockTable, num_tokens: int) -> None:
        """Enter the full blocks among the first `num_tokens` tokens into the prefix map.

        The keys must reach that far. Does nothing when caching is off.
        """
        self.register_all([table], [num_tokens])

    def register_all(self, tables: Sequence[BlockTable], num_tokens: Sequence[int]) -> None:
        """The same for several tables, in order."""
        if not self.caching:
            return
        keys, blocks = self.hasher.no_keys(), array("q")
        for table, num in zip(tables, num_tokens, strict=True):
            start = table.num_registered or 0
            end = min(num // self.block_size, len(table.blocks))
            if end > start:
                keys += table.keys[start:end]
                blocks += table.blocks[start:end]
                table.num_registered = end
        if blocks:
            self._map.add(keys, np.frombuffer(blocks, np.int64))

    def register_in_turns(
        self, tables: Sequence[BlockTable], counts: list[int], order: Callable[[], Int64s]
    ) -> None:
        """Enter the next counts[i] full blocks of each table, one at a time: `order` counts them
        through. It is asked for where two have one key: the first is served first.
        """
        keys = self.hasher.no_keys()
        blocks = array("q")
        for table, count in zip(tables, counts, strict=True):
            start = table.num_registered or 0
            keys += table.keys[start : start + count]
            blocks += table.blocks[start : start + count]
            table.num_registered = start + count
        if len(tables) > 1 and len(set(keys)) < len(keys):
            places = order().tolist()
            keys, blocks = [keys[i] for i in places], array("q", [blocks[i] for i in places])
        self._map.add(keys, np.frombuffer(blocks, np.int64))

    def forget(self, blocks: Iterable[int]) -> None:
        """Take blocks out of the prefix map (their content is invalid); owners keep them."""
        self._evict(np.array(list(blocks), np.int64))

    def _evict(self, blocks: Int64s) -> None:
        """Take the keys of blocks that have one, and forget look-ups that found them."""
        if self._map.remove_all(blocks):
            self._last_lookup = None
            if self._memos:
                lost = blocks.tolist()
                for table in [t for t, m in self._memos.items() if not m.blocks.isdisjoint(lost)]:
                    del self._memos[table]

    def reset(self) -> bool:
        """Empty the prefix cache; refused (False) while any block is in use."""
        if self.pool.num_free != self.pool.num_usable:
            return False
        self._map.clear()
        self._memos.clear()
        self._last_lookup = None
        return True

    # ------------------------------------------------------------ allocation

    def grow(self, table: BlockTable, num_computed: int, num_slots: int) -> Int64s | None:
        """Make a running request's table hold `num_slots` tokens; None when blocks are short.

        Returns the new block ids. Blocks that fell out of the window are released first, even
        if the call then fails.
        """
        if self._window is not None:
            self._release_unseen(table, num_computed)
        count = self.blocks_for(num_slots) - len(table.blocks)
        if count <= 0:
            return NO_BLOCKS
        if count > self.pool.num_free:
            return None
        return self._take(table, count)

    def take_for(
        self, tables: Sequence[BlockTable], counts: list[int], order: Int64s | None = None
    ) -> list[Int64s]:
        """Append `counts[i]` new blocks to each table; there must be enough.

        They are taken in order, or one at a time in another: `order` counts them through.
        """
        taken = self._fresh(sum(counts))
        if order is not None:
            in_order, taken = taken, np.empty_like(taken)
            taken[order] = in_order
        shares, start = [], 0
        for table, count in zip(tables, counts, strict=True):
            share = taken[start : start + count]
            table.blocks.frombytes(share.tobytes())
            shares.append(share)
            start += count
        return shares

    def allocate(
        self,
        table: BlockTable,
        *,
        num_tokens: int,
        num_computed: int,
        hits: Int64s,
        num_external: int,
        num_new: int,
        lookahead: int,
        reserve_full: bool,
        delay_registration: bool,
    ) -> bool:
        """Blocks for a request that is to be admitted (or to load); False when they are short.

        `num_computed` tokens are in the table already, `hits` blocks match locally, `num_external`
        tokens come from elsewhere, `num_new` are computed in this step, and `lookahead` slots are
        for drafts. With `reserve_full` the whole sequence must fit, not only this step.
        """
        local = num_computed + len(hits) * self.block_size
        present = local + num_external
        capped = min(present, self._max_model_len)
        if reserve_full:
            whole = self.blocks_at_once(min(num_tokens, self._max_model_len))
            if not self._suffices(table, whole, hits, capped):
                return False
        if self._window is not None:
            self._release_unseen(table, capped)
        slots = min(capped + num_new + lookahead, self._max_model_len)
        if not self._suffices(table, self.blocks_for(slots), hits, present):
            return False
        self._memos.pop(table, None)
        self.num_owners += not table.blocks
        if table.num_registered is None and (len(hits) or num_external > 0):
            self._place_hits(table, hits, present, num_external)
        missing = self.blocks_for(slots) - len(table.blocks)
        if missing > 0:
            self._take(table, missing)
        if not delay_registration:
            self.register(table, min(capped + num_new, num_tokens))
        return True

    def _suffices(self, table: BlockTable, blocks: int, hits: Int64s, present: int) -> bool:
        """Whether there are free blocks for a table of `blocks` blocks."""
        held, free = len(table.blocks), self.pool.num_free
        if table.num_registered is not None:
            return blocks - held <= free
        unseen = self.first_visible(present) // self.block_size
        fresh = max(blocks - max(unseen, len(hits) + held), 0)
        if fresh + len(hits) <= free:  # even if all that match are free and would be pinned
            return True
        seen = hits[max(0, unseen - held) :]
        unused = (self.pool.references[seen] == ZERO) & (seen != NULL_BLOCK)
        return fresh + int(np.count_nonzero(unused)) <= free

    def _place_hits(self, table: BlockTable, hits: Int64s, present: int, num_external: int) -> None:
        unseen_tokens = self.first_visible(present)
        unseen = unseen_tokens // self.block_size
        table.blocks.extend([NULL_BLOCK] * unseen)
        seen = hits[unseen:]
        self.pool.pin(seen[seen != NULL_BLOCK])
        table.blocks.frombytes(seen.tobytes())
        table.num_registered = len(table.blocks)
        if min(num_external, present - unseen_tokens) > 0:
            self._take(table, self.blocks_for(present) - len(table.blocks))

    def _take(self, table: BlockTable, count: int) -> Int64s:
        taken = self._fresh(count)
        if self._in_runs:
            taken.sort()
        table.blocks.frombytes(taken.tobytes())
        return taken

    def _fresh(self, count: int) -> Int64s:
        """Blocks from the front of the free list, stripped of their keys."""
        taken = self.pool.take(count)
        self._evict(taken)
        return taken

    def _release_unseen(self, table: BlockTable, num_computed: int) -> None:
        """Null the blocks left of the window, from the right until one is null already."""
        unseen = min(self.first_visible(num_computed) // self.block_size, len(table.blocks))
        released = []
        for index in range(unseen - 1, -1, -1):
            if table.blocks[index] == NULL_BLOCK:
                break
            released.append(table.blocks[index])
            table.blocks[index] = NULL_BLOCK
        if released:
            self.pool.release(np.array(released, np.int64))

    def window_boundary(self, table: BlockTable) -> int:
        """Number of computed tokens at which the next block of `table` is out of the window."""
        assert self._window is not None
        nulls = 0
        for block in table.blocks:
            if block != NULL_BLOCK:
                break
            nulls += 1
        return (nulls + 1) * self.block_size + self._window - 1

    def release_unseen(self, table: BlockTable, num_computed: int) -> None:
        """Give back what lies outside the window of a request with `num_computed` tokens."""
        if self._window is not None:
            self._release_unseen(table, num_computed)

    def free(self, table: BlockTable) -> None:
        """Release all blocks, last first, so that a prefix outlives what follows it."""
        if table.blocks:
            self.pool.release(table.column()[::-1].copy())  # NumPy is slower at what runs down
            self.num_owners -= 1
            table.blocks = array("q")
        table.num_registered = None
        self._memos.pop(table, None)

    # ------------------------------------------------------------ checks

    def check_integrity(self, tables: Iterable[BlockTable]) -> None:
        """Recount everything from the tables of all requests; IntegrityError on a difference."""
        held: Counter[int] = Counter()
        owners = 0
        for table in tables:
            owners += bool(table.blocks)
            held.update(block for block in table.blocks if block != NULL_BLOCK)
        if owners != self.num_owners:
            raise IntegrityError(f"{owners} tables hold blocks; counted {self.num_owners}")
        pool = self.pool
        for block, references in enumerate(pool.references.tolist()):
            if references != held[block]:
                raise IntegrityError(
                    f"block {block} has {references} references; {held[block]} tables hold it"
                )
        free = pool.free_blocks().tolist()
        if len(free) != pool.num_free or len(set(free)) != len(free):
            raise IntegrityError(f"free list has {len(free)} blocks; counted {pool.num_free}")
        if free_but_held := [block for block in free if held[block]]:
            raise IntegrityError(f"blocks are free and held: {free_but_held[:8]}")
        if len(free) + len(held) != pool.num_usable:
            raise IntegrityError(
                f"{len(free)} free and {len(held)} held blocks; the pool has {pool.num_usable}"
            )
        keyed = self._map.keys_by_block()
        listed = {b: key for key, blocks in self._map.blocks_by_key().items() for b in blocks}
        if keyed != listed:
            raise IntegrityError("the prefix map and the blocks' keys differ")
