"""Prefixes by numbers are what prefixes by hashes are, and their map does what the other does."""

import random
from array import array

import numpy as np
import pytest

from twostroke.config import SchedulerConfig
from twostroke.kv.manager import KvManager
from twostroke.kv.prefix import PrefixHasher, PrefixMap
from twostroke.twin.hasher import NumberMap, RunHasher

SIZE = 4


def tokens_of(*runs):
    return np.repeat([token for token, _ in runs], [count for _, count in runs]).astype(np.int32)


def keys_of(hasher, tokens, domain=""):
    return hasher.extend_one(hasher.start(domain), 0, tokens)[0]


def named(keys):
    return [b"%d" % key for key in keys]


def random_prompt(rng):
    """Runs that often begin alike, most of whole blocks, some longer than a row of numbers."""
    lengths = [4, 8, 8, 3, 140]
    return tokens_of(*((rng.randrange(2), rng.choice(lengths)) for _ in range(rng.randint(1, 6))))


@pytest.mark.parametrize("seed", range(5))
def test_two_keys_are_equal_where_two_hashes_are(seed):
    rng = random.Random(seed)
    runs, hashes = RunHasher(SIZE), PrefixHasher(SIZE)
    hash_of = {}
    for _ in range(60):
        prompt, domain = random_prompt(rng), rng.choice(["", "", "salt"])
        for number, key in zip(
            keys_of(runs, prompt, domain), keys_of(hashes, prompt, domain), strict=True
        ):
            assert hash_of.setdefault(number, key) == key
    assert len(set(hash_of.values())) == len(hash_of)
    assert max(hash_of) < runs.num_numbers


def test_only_full_blocks_have_keys():
    hasher = RunHasher(SIZE)
    start = hasher.start("")
    keys, ends = hasher.extend_one(start, 0, tokens_of((5, 3)))
    assert list(keys) == []
    assert ends is start


@pytest.mark.parametrize("seed", range(5))
def test_block_by_block_gives_the_keys_of_the_whole(seed):
    rng = random.Random(seed)
    hasher = RunHasher(SIZE)
    prompts = [random_prompt(rng) for _ in range(20)]
    prompts = [prompt[: len(prompt) // SIZE * SIZE] for prompt in prompts if len(prompt) >= 8]
    sums = np.stack([hasher.extend_one(hasher.start(""), 0, it[:4])[1] for it in prompts])
    keys, _ = hasher.extend_many(
        sums, np.ones(len(prompts), np.int32), np.stack([it[4:8] for it in prompts])
    )
    for prompt, key, before in zip(prompts, keys, sums, strict=True):
        whole, ends = hasher.extend_one(hasher.start(""), 0, prompt)
        assert whole[1] == key
        rest, same = hasher.extend_one(before, 1, prompt[4:])
        assert whole[1:] == rest
        assert np.array_equal(ends, same)


@pytest.mark.parametrize("seed", range(10))
def test_the_map_of_numbers_does_what_that_of_hashes_does(seed):
    rng = random.Random(seed)
    hasher = RunHasher(SIZE)
    numbers, plain = NumberMap(40, hasher), PrefixMap(40)
    for _ in range(300):
        keys = keys_of(hasher, random_prompt(rng))[:6]
        match rng.randrange(8):
            case 0 | 1 | 2:
                blocks = np.array(rng.sample(range(1, 40), len(keys)), np.int64)
                if rng.random() < 0.2 and len(keys):
                    keys[-1], blocks[0] = keys[0], 0  # one key twice, and a null block
                numbers.add(keys, blocks)
                plain.add(named(keys), blocks)
            case 3 | 4 | 5 | 6:
                blocks = np.array(rng.sample(range(1, 40), rng.randint(1, 8)), np.int64)
                assert numbers.remove_all(blocks) == plain.remove_all(blocks)
            case _ if rng.random() < 0.05:
                numbers.clear()
                plain.clear()
        assert numbers.find(keys).tolist() == plain.find(named(keys)).tolist()
        assert numbers.find_each(keys).tolist() == plain.find_each(named(keys)).tolist()
        held = numbers.blocks_by_key()
        assert dict(zip(named(held), held.values(), strict=True)) == plain.blocks_by_key()
        key_of = numbers.keys_by_block()
        assert dict(zip(key_of, named(key_of.values()), strict=True)) == plain.keys_by_block()


def test_one_key_twice_at_once():
    hasher = RunHasher(SIZE)
    key = keys_of(hasher, tokens_of((1, 4)))[0]
    table = NumberMap(8, hasher)
    table.add([key, key], np.array([3, 2]))
    assert table.blocks_by_key() == {key: [3, 2]}


@pytest.mark.parametrize("seed", range(3))
def test_a_manager_gives_the_same_blocks_with_either(seed):
    rng = random.Random(seed)
    config = SchedulerConfig(block_size=SIZE, num_blocks=60, max_model_len=1000)
    plain, by_number = KvManager(config), KvManager(config)
    hasher = RunHasher(SIZE)
    by_number.use_keys(hasher, NumberMap(60, hasher))
    held = []
    for _ in range(200):
        if held and rng.random() < 0.5:
            for kv, table in zip(
                (plain, by_number), held.pop(rng.randrange(len(held))), strict=True
            ):
                kv.free(table)
            continue
        prompt = random_prompt(rng)
        tables, hits = [], []
        for kv in (plain, by_number):
            table = kv.new_table(prompt, "", may_read=True)
            hits.append(kv.lookup(table, len(prompt)))
            done = kv.allocate(
                table,
                num_tokens=len(prompt),
                num_computed=0,
                hits=hits[-1],
                num_external=0,
                num_new=len(prompt) - SIZE * len(hits[-1]),
                lookahead=0,
                reserve_full=True,
                delay_registration=False,
            )
            tables.append((table, done))
        assert hits[0].tolist() == hits[1].tolist()
        (one, done), (other, same) = tables
        assert done == same
        assert one.blocks == other.blocks
        if done:
            held.append((one, other))
    for kv, tables in zip((plain, by_number), zip(*held, strict=True), strict=True):
        kv.check_integrity(tables)
    assert isinstance(one.blocks, array)
