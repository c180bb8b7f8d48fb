from array import array

import numpy as np
import pytest

from twostroke.config import SchedulerConfig
from twostroke.kv.manager import IntegrityError, KvManager
from twostroke.kv.prefix import PrefixHasher, PrefixMap

TOKENS = np.arange(64, dtype=np.int32)


def make(**settings):
    defaults = {"block_size": 4, "num_blocks": 11, "max_model_len": 64}
    return KvManager(SchedulerConfig(**(defaults | settings)))


def new_table(kv, tokens=TOKENS, domain="", *, may_read=True):
    return kv.new_table(tokens, domain, may_read=may_read)


def allocate(kv, table, num_tokens, *, hits=(), num_new=None, **options):
    fields = {
        "num_computed": 0,
        "num_external": 0,
        "lookahead": 0,
        "reserve_full": True,
        "delay_registration": False,
    } | options
    present = fields["num_computed"] + len(hits) * kv.block_size + fields["num_external"]
    num_new = num_tokens - present if num_new is None else num_new
    return kv.allocate(
        table, num_tokens=num_tokens, hits=np.array(hits, np.int64), num_new=num_new, **fields
    )


def test_a_prefix_is_found_again_and_shared():
    kv = make()
    first, second = new_table(kv), new_table(kv)
    assert kv.lookup(first, 10).tolist() == []
    assert allocate(kv, first, 10)
    hits = kv.lookup(second, 10)
    assert hits.tolist() == first.blocks[:2].tolist()
    assert allocate(kv, second, 10, hits=hits)
    assert second.blocks[:2] == first.blocks[:2]
    assert kv.num_free == 10 - 3 - 1
    kv.check_integrity([first, second])


def test_one_token_is_always_left_to_compute():
    kv = make()
    first = new_table(kv)
    allocate(kv, first, 8)
    assert len(kv.lookup(new_table(kv), 8)) == 1
    assert len(kv.lookup(new_table(kv), 9)) == 2


def test_who_may_not_read_still_fills():
    kv = make()
    table = new_table(kv, may_read=False)
    assert kv.lookup(table, 12).tolist() == []
    allocate(kv, table, 12)
    assert len(kv.lookup(new_table(kv), 12)) == 2


def test_caching_off():
    kv = make(enable_prefix_caching=False)
    table = new_table(kv)
    assert table.keys == []
    assert allocate(kv, table, 12)
    assert kv.lookup(new_table(kv), 12).tolist() == []
    assert table.num_registered is None


def test_the_whole_sequence_must_fit():
    kv = make()
    assert not allocate(kv, new_table(kv), 44, num_new=8)
    assert kv.num_free == 10
    assert allocate(kv, new_table(kv), 44, num_new=8, reserve_full=False)
    assert kv.num_free == 8


def test_this_step_must_fit():
    kv = make()
    allocate(kv, new_table(kv), 36)
    assert not allocate(kv, new_table(kv, domain="x"), 8, reserve_full=False)


def test_free_hits_count_as_needed():
    kv = make(num_blocks=6)
    first = new_table(kv)
    allocate(kv, first, 20)
    kv.free(first)
    again = new_table(kv)
    hits = kv.lookup(again, 20)
    assert len(hits) == 4
    assert not allocate(kv, again, 24, hits=hits)
    assert allocate(kv, again, 20, hits=hits)
    assert kv.num_free == 0


def test_reused_blocks_lose_their_key():
    kv = make(num_blocks=4)
    first = new_table(kv)
    allocate(kv, first, 12)
    kv.free(first)
    other = new_table(kv, domain="x")
    allocate(kv, other, 4)
    # The last block was released first, so it was reused first.
    assert len(kv.lookup(new_table(kv), 12)) == 2
    kv.check_integrity([other])


def test_lookups_are_remembered_until_something_changes():
    kv = make()
    first, waiting = new_table(kv), new_table(kv)
    allocate(kv, first, 8)
    hits = kv.lookup(waiting, 40)
    assert kv.num_lookups == 1
    kv.remember_lookup(first)  # not the one that was looked up
    kv.remember_lookup(waiting)
    assert kv.lookup(waiting, 40) is hits
    assert kv.num_lookups == 1
    kv.grow(first, 8, 12)
    kv.register(first, 12)  # the first missing key appears
    assert len(kv.lookup(waiting, 40)) == 3
    kv.remember_lookup(waiting)
    assert kv.num_lookups == 2
    kv.free(first)
    kv.forget([hits[0]])  # a hit is gone
    assert kv.lookup(waiting, 40).tolist() == []
    kv.forget([hits[0]])  # has no key any more


def test_a_lookup_that_is_out_of_date_is_not_remembered():
    kv = make()
    first, waiting = new_table(kv), new_table(kv)
    allocate(kv, first, 8)
    assert kv.lookup(waiting, 40).tolist() == [1, 2]
    kv.forget([1])
    kv.remember_lookup(waiting)
    assert kv.lookup(waiting, 40).tolist() == []


def test_memory_of_lookups_is_bounded():
    kv = make()
    tables = [new_table(kv) for _ in range(40)]
    for table in tables:
        kv.lookup(table, 40)
        kv.remember_lookup(table)
    assert kv.num_lookups == 40
    kv.lookup(tables[0], 40)
    assert kv.num_lookups == 41


def test_drafting_models_drop_the_last_hit():
    kv = make(num_spec_tokens=2, spec_method="eagle")
    allocate(kv, new_table(kv), 12)
    assert len(kv.lookup(new_table(kv), 13)) == 2


def test_external_tokens_get_blocks_but_no_keys_before_they_arrive():
    kv = make()
    table = new_table(kv)
    assert allocate(
        kv, table, 20, num_external=17, num_new=0, delay_registration=True, reserve_full=False
    )
    assert len(table.blocks) == 5
    assert table.num_registered == 0
    assert kv.lookup(new_table(kv), 20).tolist() == []
    kv.register(table, 17)
    assert len(kv.lookup(new_table(kv), 20)) == 4
    # Admitted once loaded: only what is missing is taken.
    assert allocate(kv, table, 20, num_computed=17, lookahead=3)
    assert len(table.blocks) == 6
    kv.check_integrity([table])


def test_growth_is_all_or_nothing():
    kv = make(num_blocks=4)
    table = new_table(kv)
    allocate(kv, table, 8)
    assert len(kv.grow(table, 8, 8)) == 0
    assert kv.grow(table, 8, 17) is None
    assert kv.grow(table, 8, 12).tolist() == [3]
    assert kv.usage == 1


def test_reset_needs_an_unused_pool():
    kv = make()
    table = new_table(kv)
    allocate(kv, table, 8)
    assert not kv.reset()
    kv.free(table)
    assert kv.reset()
    assert kv.lookup(new_table(kv), 9).tolist() == []


def test_a_pool_of_nothing():
    assert make(num_blocks=1).usage == 0


# ---------------------------------------------------------------- sliding window


def test_blocks_outside_the_window_are_released():
    kv = make(sliding_window=6, max_num_batched_tokens=16)
    table = new_table(kv)
    allocate(kv, table, 16)
    assert kv.window_boundary(table) == 9
    held = list(table.blocks)
    assert kv.grow(table, 16, 17) == [5]
    # Token 16 sees 11 to 15: blocks 0 and 1 are out.
    assert list(table.blocks) == [0, 0, held[2], held[3], 5]
    assert kv.window_boundary(table) == 17
    kv.release_unseen(table, 20)
    assert list(table.blocks[:3]) == [0, 0, 0]
    kv.check_integrity([table])
    kv.free(table)
    assert kv.num_free == 10


def test_null_blocks_are_not_registered():
    kv = make(sliding_window=6, num_blocks=20)
    table = new_table(kv)
    assert allocate(
        kv, table, 24, num_external=20, num_new=0, delay_registration=True, reserve_full=False
    )
    assert list(table.blocks) == [0, 0, 0, 1, 2]
    table.num_registered = 0
    kv.register(table, 20)
    assert kv.lookup(new_table(kv), 21).tolist() == [0, 0, 0, 1, 2]
    table.blocks[3:] = array("q", [0, 0])
    assert kv.window_boundary(table) == 29


def test_a_window_needs_only_so_many_blocks_at_once():
    kv = make(sliding_window=6, max_num_batched_tokens=8)
    assert kv.blocks_at_once(64) == 5
    assert kv.blocks_at_once(8) == 2
    assert kv.first_visible(3) == 0


@pytest.mark.parametrize(
    ("cached", "hits"),
    [
        ((0, 1, 2, 3, 4), 5),  # a run at the right end
        ((0, 1, 2, 3), 4),  # cut right of the run
        ((2, 3), 4),  # nulls left of it
        ((0, 2, 4), 1),  # no run: what begins at block 0
        ((1, 3), 0),
    ],
)
def test_window_hits(cached, hits):
    kv = make(sliding_window=6)
    table = new_table(kv, TOKENS[:21])
    allocate(kv, table, 21)
    kv.forget(block for index, block in enumerate(table.blocks) if index not in cached)
    found = kv.lookup(new_table(kv, TOKENS[:21]), 21)
    assert len(found) == hits
    seen = [index for index, block in enumerate(found) if block]
    assert [found[index] for index in seen] == [table.blocks[index] for index in seen]
    assert hits < 4 or seen[-2:] == [hits - 2, hits - 1]


def test_admission_with_a_windowed_hit_pins_only_what_is_seen():
    kv = make(sliding_window=6, num_blocks=20)
    first = new_table(kv)
    allocate(kv, first, 24)
    kv.free(first)
    table = new_table(kv)
    hits = kv.lookup(table, 24)
    assert allocate(kv, table, 24, hits=hits)
    # 20 tokens are present; the next sees 15 to 19: blocks 3 and 4.
    assert list(table.blocks[:3]) == [0, 0, 0]
    assert list(table.blocks[3:5]) == hits[3:5].tolist()
    kv.check_integrity([table])


# ---------------------------------------------------------------- integrity


def broken(change):
    kv = make()
    table = new_table(kv)
    allocate(kv, table, 8)
    change(kv, table)
    return kv, [table]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda kv, table: setattr(kv, "num_owners", 2), "1 tables hold blocks; counted 2"),
        (lambda kv, table: table.blocks.pop(), "has 1 references; 0 tables"),
        (lambda kv, table: table.blocks.append(1), "has 1 references; 2 tables"),
        (lambda kv, table: setattr(kv.pool, "num_free", 3), "free list has 8 blocks; counted 3"),
        (lambda kv, table: kv._map.key_of.__setitem__(9, b"x"), "prefix map"),
    ],
)
def test_integrity_errors(change, words):
    kv, tables = broken(change)
    with pytest.raises(IntegrityError, match=words):
        kv.check_integrity(tables)


def test_integrity_sees_free_blocks_that_are_held():
    kv, tables = broken(lambda kv, table: kv.pool.release(np.array([1])))
    kv.pool.references[1] = 1
    with pytest.raises(IntegrityError, match=r"free and held: \[1\]"):
        kv.check_integrity(tables)


def test_integrity_sees_lost_blocks():
    kv, tables = broken(lambda kv, table: kv.pool.take(1))
    kv.pool.references[3] = 0
    with pytest.raises(IntegrityError, match="7 free and 2 held blocks; the pool has 10"):
        kv.check_integrity(tables)


@pytest.mark.parametrize("order", [[0, 2, 1, 3], [2, 0, 3, 1]])
def test_of_two_blocks_with_one_key_the_first_in_turn_is_served(order):
    kv = make()
    kv.use_keys(PrefixHasher(4), PrefixMap(11))
    tables = [new_table(kv), new_table(kv)]
    for table in tables:
        assert allocate(kv, table, 12, delay_registration=True)
    kv.register_in_turns(tables, [2, 2], lambda: np.array(order))
    assert kv.lookup(new_table(kv), 10).tolist() == tables[order[0] // 2].blocks[:2].tolist()
    kv.check_integrity(tables)
