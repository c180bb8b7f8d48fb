"""Pieces against a reference that moves one element at a time by what it means."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twostroke.connector.layout import (
    TicketError,
    check,
    pieces,
    pool_bytes,
    record_of,
    sources,
    split,
)
from twostroke.kv.sizing import KvLayout
from twostroke.kv_messages import KvEndpoint, KvLayoutRecord, KvLoad, KvTicket

LAYOUT = KvLayout(num_layers=2, num_kv_heads=2, head_dim=2, dtype="float16", block_size=4)
NO_HEAD = -1


def record(num_blocks: int = 9, **changes: object) -> KvLayoutRecord:
    return record_of(replace(LAYOUT, **changes), num_blocks, "model")


def load_of(
    theirs: KvLayoutRecord,
    ours: KvLayoutRecord,
    first: int,
    end: int,
    seed: int | None = None,
    load_id: int = 0,
) -> KvLoad:
    """Tokens [first, end) in blocks that are adjacent (`seed` None) or anywhere."""
    generator = np.random.default_rng(seed)
    tables = []
    for layout in (theirs, ours):
        ids = np.arange(1, layout.num_blocks, dtype=np.int32)
        ids = ids if seed is None else generator.permutation(ids)
        tables.append(ids[: -(-end // layout.block_size)])
    endpoint = KvEndpoint(engine_id="p", transport="shm", addresses=[], layout=theirs)
    ticket = KvTicket(
        transfer_id=bytes(16),
        endpoint=endpoint,
        lease_slot=0,
        num_tokens=end,
        block_ids=tables[0],
    )
    return KvLoad(load_id=load_id, ticket=ticket, first_token=first, block_ids=tables[1])


def meanings(layout: KvLayoutRecord, rank: int, table: np.ndarray) -> np.ndarray:
    """Each 2-byte element of a rank's pool: which (token, layer, side, head, dim) it is, or -1."""
    heads, ranks = layout.num_kv_heads, layout.tensor_parallel_size
    held = [rank * heads // ranks + i for i in range(max(1, heads // ranks))]
    shape = (layout.num_blocks, layout.num_layers, 2, len(held), layout.block_size, layout.head_dim)
    pool = np.full(shape, -1, np.int64)
    for index, block in enumerate(table.tolist()):
        for slot in range(layout.block_size):
            token = index * layout.block_size + slot
            for at in np.ndindex(layout.num_layers, 2, len(held)):
                for dim in range(layout.head_dim):
                    key = (token, *at[:2], held[at[2]], dim)
                    sizes = (1 << 20, layout.num_layers, 2, heads, layout.head_dim)
                    pool[block, *at, slot, dim] = np.ravel_multi_index(key, sizes)
    return pool.reshape(-1)


def transferred(theirs: KvLayoutRecord, ours: KvLayoutRecord, rank: int, load: KvLoad):
    """Our pool after the pieces were copied, and what every element of it should be."""
    table = load.ticket.block_ids
    expected = meanings(ours, rank, load.block_ids)
    pool = np.full_like(expected, -1)
    reads = pieces(theirs, ours, rank, load)
    assert set(reads) <= set(sources(theirs, ours, rank))
    for there, rows in reads.items():
        source = meanings(theirs, there, table)
        assert rows.dtype == np.int64
        for start, to, size in rows.tolist():
            assert start % 2 == to % 2 == size % 2 == 0
            assert size > 0
            part = source[start // 2 : (start + size) // 2]
            assert len(part) == size // 2
            target = pool[to // 2 : (to + size) // 2]
            assert (target == -1).all(), "an element is read twice"
            target[:] = part
    return pool, expected


sizes = st.sampled_from([1, 2, 3, 4, 8])


@st.composite
def cases(draw: st.DrawFn):
    heads = draw(st.sampled_from([1, 2, 3, 4]))
    possible = [n for n in (1, 2, 3, 4, 6, 8) if heads % n == 0 or n % heads == 0]
    theirs, ours = (
        record(
            num_kv_heads=heads,
            block_size=draw(sizes),
            tensor_parallel_size=draw(st.sampled_from(possible)),
        )
        for _ in range(2)
    )
    most = min(layout.block_size * (layout.num_blocks - 1) for layout in (theirs, ours))
    end = draw(st.integers(1, most))
    first = draw(st.integers(0, end))
    seed = draw(st.none() | st.integers(0, 99))
    return theirs, ours, load_of(theirs, ours, first, end, seed, draw(st.integers(0, 9)))


@settings(max_examples=150, deadline=None)
@given(cases())
def test_every_element_lands_where_it_belongs(case):
    theirs, ours, load = case
    first, end = load.first_token, load.ticket.num_tokens
    per_token = ours.num_layers * 2 * ours.num_kv_heads * ours.head_dim
    for rank in range(ours.tensor_parallel_size):
        pool, expected = transferred(theirs, ours, rank, load)
        token = expected // per_token
        wanted = (token >= first) & (token < end) & (expected >= 0)
        assert (pool[wanted] == expected[wanted]).all()
        # Nothing else is touched, but for slots at the end of the last block that are still empty.
        assert (pool[(expected < 0) | (token < first)] == -1).all()
        if theirs.block_size != ours.block_size:
            assert (pool[~wanted] == -1).all()


@given(cases(), st.integers(1, 40))
def test_splitting_changes_no_byte(case, max_bytes):
    theirs, ours, load = case
    for rows in pieces(theirs, ours, 0, load).values():
        parts = split(rows, max_bytes)
        assert (parts[:, 2] <= max_bytes).all()
        assert (parts[:, 2] > 0).all()
        whole, cut = (
            [(a + i, b + i) for a, b, n in table.tolist() for i in range(n)]
            for table in (rows, parts)
        )
        assert whole == cut


def test_adjacent_blocks_are_one_piece():
    layout = record()
    rows = pieces(layout, layout, 0, load_of(layout, layout, 0, 14))
    block = pool_bytes(layout) // layout.num_blocks
    assert rows[0].tolist() == [[block, block, 4 * block]]
    scattered = pieces(layout, layout, 0, load_of(layout, layout, 4, 14, seed=1))
    assert scattered[0][:, 2].sum() == 3 * block
    assert len(scattered[0]) <= 3


def test_half_of_the_heads_come_in_a_piece_for_each_layer_and_side():
    whole, half = record(num_kv_heads=4), record(num_kv_heads=4, tensor_parallel_size=2)
    rows = pieces(whole, half, 1, load_of(whole, half, 0, 4))[0]
    assert rows[:, 2].tolist() == [2 * 4 * 2 * 2] * 4  # heads, slots, dims, bytes
    back = pieces(half, whole, 0, load_of(half, whole, 0, 4))
    assert {rank: len(rows) for rank, rows in back.items()} == {0: 4, 1: 4}


def test_loads_and_ranks_take_turns_between_copies_of_a_head():
    there, here = record(tensor_parallel_size=4), record()
    assert sources(there, here, 0) == [0, 1, 2, 3]
    ranks = [set(pieces(there, here, 0, load_of(there, here, 0, 4, load_id=i))) for i in range(3)]
    assert ranks == [{0, 2}, {1, 3}, {0, 2}]
    assert [list(pieces(there, there, rank, load_of(there, there, 0, 4))) for rank in range(4)] == [
        [0],
        [1],
        [2],
        [3],
    ]


def test_nothing_to_read_is_no_piece():
    layout = record()
    assert pieces(layout, layout, 0, load_of(layout, layout, 8, 8)) == {}


def test_a_long_prompt():
    layout = replace(LAYOUT, num_layers=48, num_kv_heads=8, head_dim=128, block_size=16)
    layout = record_of(layout, 5000, "model")
    rows = pieces(layout, layout, 0, load_of(layout, layout, 0, 64_000, seed=3))[0]
    assert rows[:, 2].sum() == 4000 * (pool_bytes(layout) // 5000)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 2}, "versions of the layout differ: 2 there, 1 here"),
        ({"model": "other"}, "models or weights differ: other there, model here"),
        ({"dtype": "float32"}, "types of KV differ: float32 there, float16 here"),
        ({"num_layers": 3}, "numbers of layers differ: 3 there, 2 here"),
        ({"num_kv_heads": 4}, "numbers of KV heads differ: 4 there, 2 here"),
        ({"head_dim": 4}, "sizes of a head differ: 4 there, 2 here"),
        ({"tensor_parallel_size": 3}, "2 KV heads cannot be dealt out to 3 ranks there"),
        ({"block_size": 0}, "the layout there has a size below 1"),
        ({"num_blocks": 0}, "the layout there has a size below 1"),
    ],
)
def test_a_pair_that_cannot_work_is_refused_in_words(change, words):
    ours = record()
    assert check(msgspec.structs.replace(ours, **change), ours).startswith(words)


def test_pairs_that_work():
    ours = record()
    assert check(ours, ours) == ""
    assert check(record(block_size=32, num_blocks=3, tensor_parallel_size=4), ours) == ""
    odd = msgspec.structs.replace(ours, dtype="int3")
    assert check(odd, odd) == "KV of type int3 is not known here"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"transfer_id": b"short"}, "a transfer id has 5 bytes"),
        ({"lease_slot": 9}, "lease slot 9 of 9"),
        ({"lease_slot": -1}, "lease slot -1 of 9"),
        ({"num_tokens": 2}, "tokens 4 to 2"),
        ({"num_tokens": 20}, "20 tokens in 3 blocks of 4 there"),
        ({"block_ids": np.array([1, 9, 2], np.int32)}, "block ids 2 to 9 of 9"),
        ({"block_ids": np.array([1, -5, 2], np.int32)}, "block ids -5 to 2 of 9"),
    ],
)
def test_a_ticket_that_does_not_fit_is_refused(change, words):
    layout = record()
    load = load_of(layout, layout, 4, 10)
    load.ticket = msgspec.structs.replace(load.ticket, **change)
    with pytest.raises(TicketError) as error:
        pieces(layout, layout, 0, load)
    assert str(error.value) == words


def test_our_own_table_is_checked_too():
    layout = record()
    load = load_of(layout, layout, 0, 10)
    load.block_ids = load.block_ids[:2]
    with pytest.raises(TicketError, match="10 tokens in 2 blocks of 4 here"):
        pieces(layout, layout, 0, load)
