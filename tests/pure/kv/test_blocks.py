import random

import numpy as np
import pytest

from twostroke.kv.blocks import BlockPool


def ids(*blocks):
    return np.array(blocks, np.int64)


def test_blocks_come_from_the_front():
    pool = BlockPool(6)
    assert pool.take(2).tolist() == [1, 2]
    assert pool.free_blocks().tolist() == [3, 4, 5]
    assert (pool.num_free, pool.num_usable) == (3, 5)


def test_released_blocks_go_to_the_back_in_order():
    pool = BlockPool(6)
    taken = pool.take(3)
    pool.release(taken[::-1])
    assert pool.free_blocks().tolist() == [4, 5, 3, 2, 1]


def test_the_whole_pool_can_be_taken_and_returned():
    pool = BlockPool(4)
    taken = pool.take(3)
    assert pool.free_blocks().tolist() == []
    pool.release(taken)
    assert pool.free_blocks().tolist() == [1, 2, 3]


def test_pinning_takes_a_free_block_out_of_the_middle():
    pool = BlockPool(6)
    pool.pin(ids(3))
    assert pool.free_blocks().tolist() == [1, 2, 4, 5]
    pool.pin(ids(3))
    pool.release(ids(3))
    assert 3 not in pool.free_blocks()
    pool.release(ids(3))
    assert pool.free_blocks().tolist() == [1, 2, 4, 5, 3]


def test_the_null_block_is_never_released():
    pool = BlockPool(3)
    pool.release(ids(0, 0))
    assert pool.free_blocks().tolist() == [1, 2]
    assert pool.references[0] == 0


@pytest.mark.parametrize("seed", range(5))
def test_against_a_plain_list(seed):
    rng = random.Random(seed)
    pool, model, held = BlockPool(30), list(range(1, 30)), []
    for _ in range(500):
        choice = rng.random()
        if choice < 0.4 and model:
            count = rng.randint(1, min(4, len(model)))
            held += pool.take(count).tolist()
            del model[:count]
        elif choice < 0.6:
            block = rng.randint(1, 29)
            pool.pin(ids(block))
            held.append(block)
            if block in model:
                model.remove(block)
        elif held:
            block = held.pop(rng.randrange(len(held)))
            pool.release(ids(block))
            if block not in held:
                model.append(block)
        assert pool.free_blocks().tolist() == model
        assert pool.num_free == len(model)


def test_what_is_held_twice_stays_when_it_is_released_once():
    pool = BlockPool(100)
    taken = pool.take(40)
    pool.pin(taken[:20])
    pool.release(taken[::-1])  # the first 20 are still held
    assert pool.num_free == 79
    assert pool.free_blocks().tolist()[-20:] == taken[:19:-1].tolist()
    pool.release(taken[:20][::-1])
    assert sorted(pool.free_blocks()) == list(range(1, 100))
    assert not pool.references.any()
