import random

import pytest

from twostroke.kv.blocks import BlockPool, run_of


def test_blocks_come_from_the_front():
    pool = BlockPool(6)
    assert pool.take(2) == [1, 2]
    assert list(pool.free_blocks()) == [3, 4, 5]
    assert (pool.num_free, pool.num_usable) == (3, 5)


def test_released_blocks_go_to_the_back_in_order():
    pool = BlockPool(6)
    taken = pool.take(3)
    pool.release(reversed(taken))
    assert list(pool.free_blocks()) == [4, 5, 3, 2, 1]


def test_the_whole_pool_can_be_taken_and_returned():
    pool = BlockPool(4)
    taken = pool.take(3)
    assert list(pool.free_blocks()) == []
    pool.release(taken)
    assert list(pool.free_blocks()) == [1, 2, 3]


def test_pinning_takes_a_free_block_out_of_the_middle():
    pool = BlockPool(6)
    pool.pin([3])
    assert list(pool.free_blocks()) == [1, 2, 4, 5]
    pool.pin([3])
    pool.release([3])
    assert 3 not in pool.free_blocks()
    pool.release([3])
    assert list(pool.free_blocks()) == [1, 2, 4, 5, 3]


def test_the_null_block_is_never_released():
    pool = BlockPool(3)
    pool.release([0, 0])
    assert list(pool.free_blocks()) == [1, 2]
    assert pool.references[0] == 0


@pytest.mark.parametrize("seed", range(5))
def test_against_a_plain_list(seed):
    rng = random.Random(seed)
    pool, model, held = BlockPool(30), list(range(1, 30)), []
    for _ in range(500):
        choice = rng.random()
        if choice < 0.4 and model:
            count = rng.randint(1, min(4, len(model)))
            held += pool.take(count)
            del model[:count]
        elif choice < 0.6:
            block = rng.randint(1, 29)
            pool.pin([block])
            held.append(block)
            if block in model:
                model.remove(block)
        elif held:
            block = held.pop(rng.randrange(len(held)))
            pool.release([block])
            if block not in held:
                model.append(block)
        assert list(pool.free_blocks()) == model
        assert pool.num_free == len(model)


def test_runs():
    up, down = list(range(3, 40)), list(range(40, 0, -1))
    values = list(range(50))
    for blocks in (up, down, list(range(30, -1, -1))):
        assert values[run_of(blocks)] == blocks
    for blocks in ([], [1, 2, 3], [*up, 50], [*up[:20], *up[21:]], [3] * 20):
        assert run_of(blocks) is None


def test_runs_are_taken_and_released_like_any_blocks():
    pool = BlockPool(100)
    taken = pool.take(40)
    pool.pin(taken[:20])
    pool.release(reversed(taken))  # the first 20 are still held
    assert pool.num_free == 79
    assert list(pool.free_blocks())[-20:] == taken[:19:-1]
    pool.release(reversed(taken[:20]))
    assert sorted(pool.free_blocks()) == list(range(1, 100))
    assert pool.references == [0] * 100
