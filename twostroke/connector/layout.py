"""Which pieces of which ranks' memory hold the KV that a load asks for, and where they go.

A rank's pool is `[block, layer, 2, kv_head, slot, head_dim]`, so what lies together depends on what
both engines agree on:

    same block size, same heads       whole blocks, and runs of adjacent blocks are one piece
    same block size, other heads      the shared heads of one layer's keys or values, of a block
    other block size                  one head of one layer's keys or values, the tokens both share

Tokens fall into runs that lie in one block at either end. The pieces of a run differ from those of
another run of the same length only by where their blocks are, so they are worked out once a length,
for the first token of a block, and then shifted to each run.

    block size 4 there, 6 here; tokens 2 to 13
    there   |  . .[2 3| 4 5 6 7| 8 9 10 11| 12 13] .  . |
    here    |  . .[2 3  4 5| 6 7  8 9 10 11| 12 13] .  .  .  . |
    runs           2    2    2    4           2

Where block sizes are equal, the last run is stretched to the end of its block: its slots hold no
token yet and are written before they are read, and a whole block is one piece and not many.
"""

from dataclasses import dataclass

import numpy as np

from twostroke.arrays import Int64s
from twostroke.connector.base import TransferError
from twostroke.kv.sizing import KvLayout
from twostroke.kv_messages import (
    DTYPE_BYTES,
    TRANSFER_ID_BYTES,
    KvLayoutRecord,
    KvLoad,
    row_bytes,
)

# What must be equal, and what it is called.
_EQUAL = {
    "version": "versions of the layout",
    "model": "models or weights",
    "dtype": "types of KV",
    "num_layers": "numbers of layers",
    "num_kv_heads": "numbers of KV heads",
    "head_dim": "sizes of a head",
}


class TicketError(TransferError):
    """A load that contradicts the layouts. Nothing was read for it."""


def record_of(layout: KvLayout, num_blocks: int, model: str) -> KvLayoutRecord:
    """The record of a pool; `model` is a fingerprint of shape and weights."""
    return KvLayoutRecord(
        model=model,
        dtype=layout.dtype,
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        block_size=layout.block_size,
        num_blocks=num_blocks,
        tensor_parallel_size=layout.tensor_parallel_size,
    )


def check(theirs: KvLayoutRecord, ours: KvLayoutRecord) -> str:
    """Why we cannot read KV that is laid out like `theirs`; empty if we can."""
    for name, words in _EQUAL.items():
        here, there = getattr(ours, name), getattr(theirs, name)
        if here != there:
            return f"{words} differ: {there} there, {here} here"
    if theirs.dtype not in DTYPE_BYTES:
        return f"KV of type {theirs.dtype} is not known here"
    for record, where in ((theirs, "there"), (ours, "here")):
        sizes = (record.num_layers, record.num_kv_heads, record.head_dim, record.block_size)
        if min(*sizes, record.num_blocks, record.tensor_parallel_size) < 1:
            return f"the layout {where} has a size below 1: {record}"
        heads, ranks = record.num_kv_heads, record.tensor_parallel_size
        if heads % ranks and ranks % heads:
            return f"{heads} KV heads cannot be dealt out to {ranks} ranks {where}"
    return ""


def pool_bytes(record: KvLayoutRecord) -> int:
    """Size of one rank's pool."""
    return record.num_blocks * _Rank.of(record, 0).block_bytes


def sources(theirs: KvLayoutRecord, ours: KvLayoutRecord, rank: int) -> list[int]:
    """Ranks there that hold KV heads of our rank `rank`; a load may need only some of them."""
    mine = _Rank.of(ours, rank)
    ranks = (_Rank.of(theirs, there) for there in range(theirs.tensor_parallel_size))
    return [there.rank for there in ranks if there.heads_shared_with(mine)]


def pieces(
    theirs: KvLayoutRecord, ours: KvLayoutRecord, rank: int, load: KvLoad
) -> dict[int, Int64s]:
    """What our rank `rank` reads for a load: by rank there, [n, 3] (offset there, here, bytes).

    Each head is read once: of several ranks that hold it, loads and our ranks take turns. Nothing
    to read: empty. Raises TicketError for what does not fit the layouts, which `check` has passed.
    """
    _check_load(theirs, ours, load)
    if load.first_token == load.ticket.num_tokens:
        return {}
    runs = _Runs(theirs.block_size, ours.block_size, load)
    mine = _Rank.of(ours, rank)
    found = {}
    for there in _chosen(theirs, mine, rank + load.load_id):
        shared = there.heads_shared_with(mine)
        parts = [
            runs.shift(_pattern(there, mine, shared, length), length, there, mine)
            for length in runs.lengths
        ]
        found[there.rank] = _merge(np.concatenate(parts))
    return found


def split(rows: Int64s, max_bytes: int) -> Int64s:
    """The same with no piece longer than `max_bytes`."""
    counts = -(-rows[:, 2] // max_bytes)
    if (counts <= 1).all():
        return rows
    parts = np.repeat(rows, counts, axis=0)
    ends = np.cumsum(counts)
    done = (np.arange(ends[-1]) - np.repeat(ends - counts, counts)) * max_bytes
    parts[:, :2] += done[:, None]
    parts[:, 2] = np.minimum(parts[:, 2] - done, max_bytes)
    return parts


@dataclass(frozen=True)
class _Rank:
    """One rank's part of a pool, in bytes. It holds heads [first_head, first_head + num_heads)."""

    rank: int
    first_head: int
    num_heads: int
    num_layers: int
    block_size: int
    row_bytes: int  # of one token's keys, or values, of one head

    @classmethod
    def of(cls, record: KvLayoutRecord, rank: int) -> "_Rank":
        heads, ranks = record.num_kv_heads, record.tensor_parallel_size
        return cls(
            rank,
            first_head=rank * heads // ranks,
            num_heads=max(1, heads // ranks),
            num_layers=record.num_layers,
            block_size=record.block_size,
            row_bytes=row_bytes(record.dtype, record.head_dim),
        )

    @property
    def head_bytes(self) -> int:
        return self.block_size * self.row_bytes

    @property
    def plane_bytes(self) -> int:
        """Keys, or values, of one layer of a block."""
        return self.num_heads * self.head_bytes

    @property
    def block_bytes(self) -> int:
        return self.num_layers * 2 * self.plane_bytes

    def heads_shared_with(self, other: "_Rank") -> range:
        return range(
            max(self.first_head, other.first_head),
            min(self.first_head + self.num_heads, other.first_head + other.num_heads),
        )


def _chosen(theirs: KvLayoutRecord, mine: _Rank, turn: int) -> list[_Rank]:
    """Ranks that together hold our heads once; `turn` decides between those with the same."""
    ranks, heads = theirs.tensor_parallel_size, theirs.num_kv_heads
    copies = max(1, ranks // heads)
    holders = [_Rank.of(theirs, first + turn % copies) for first in range(0, ranks, copies)]
    return [there for there in holders if there.heads_shared_with(mine)]


def _pattern(there: _Rank, here: _Rank, heads: range, length: int) -> Int64s:
    """Pieces of `length` tokens from the beginning of a block at either end, in bytes."""
    planes, head = np.indices((2 * there.num_layers, len(heads)), np.int64).reshape(2, -1)
    columns = [
        planes * rank.plane_bytes + (head + heads.start - rank.first_head) * rank.head_bytes
        for rank in (there, here)
    ]
    return _merge(np.stack([*columns, np.full_like(head, length * there.row_bytes)], axis=1))


class _Runs:
    """The tokens of a load in runs that lie in one block there and in one here."""

    def __init__(self, their_size: int, our_size: int, load: KvLoad) -> None:
        first, end = load.first_token, load.ticket.num_tokens
        if their_size == our_size:
            end = -(-end // our_size) * our_size
        cuts = [
            np.arange(first // size * size + size, end, size) for size in {their_size, our_size}
        ]
        starts = np.unique(np.concatenate(([first], *cuts)))
        self._lengths = np.diff(starts, append=end)
        self.lengths = np.unique(self._lengths).tolist()
        self._theirs = load.ticket.block_ids[starts // their_size], starts % their_size
        self._ours = load.block_ids[starts // our_size], starts % our_size

    def shift(self, pattern: Int64s, length: int, there: _Rank, here: _Rank) -> Int64s:
        """The pattern at each run of that length."""
        chosen = self._lengths == length
        bases = np.zeros((int(chosen.sum()), 1, 3), np.int64)
        for column, rank, (blocks, slots) in ((0, there, self._theirs), (1, here, self._ours)):
            bases[:, 0, column] = blocks[chosen].astype(np.int64) * rank.block_bytes
            bases[:, 0, column] += slots[chosen] * rank.row_bytes
        shifted: Int64s = (bases + pattern).reshape(-1, 3)
        return shifted


def _merge(rows: Int64s) -> Int64s:
    """Neighbours in the list that are neighbours at both ends become one."""
    ends = rows[:-1, :2] + rows[:-1, 2:]
    is_first = np.concatenate(([True], (rows[1:, :2] != ends).any(axis=1)))
    firsts = np.flatnonzero(is_first)
    merged = rows[firsts]
    merged[:, 2] = np.add.reduceat(rows[:, 2], firsts)
    return merged


def _check_load(theirs: KvLayoutRecord, ours: KvLayoutRecord, load: KvLoad) -> None:
    ticket = load.ticket
    if len(ticket.transfer_id) != TRANSFER_ID_BYTES:
        raise TicketError(f"a transfer id has {len(ticket.transfer_id)} bytes")
    if not 0 <= ticket.lease_slot < theirs.num_blocks:
        raise TicketError(f"lease slot {ticket.lease_slot} of {theirs.num_blocks}")
    if not 0 <= load.first_token <= ticket.num_tokens:
        raise TicketError(f"tokens {load.first_token} to {ticket.num_tokens}")
    for record, blocks, where in (
        (theirs, ticket.block_ids, "there"),
        (ours, load.block_ids, "here"),
    ):
        needed = -(-ticket.num_tokens // record.block_size)
        if len(blocks) < needed:
            raise TicketError(
                f"{ticket.num_tokens} tokens in {len(blocks)} blocks of {record.block_size} {where}"
            )
        used = blocks[load.first_token // record.block_size : needed]
        if len(used) and not (used.min() >= 0 and used.max() < record.num_blocks):
            raise TicketError(f"block ids {used.min()} to {used.max()} of {record.num_blocks}")
