import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from twostroke.kv.prefix import KEY_BYTES, PrefixHasher, PrefixMap, run_of

SECRET = b"s" * 32
TOKENS = np.arange(40, dtype=np.int32)


def keys_of(tokens, *, size=4, domain="", secret=SECRET):
    hasher = PrefixHasher(size, secret=secret)
    return hasher.extend_one(hasher.start(domain), 0, np.array(tokens, np.int32))[0]


def test_only_full_blocks_have_keys():
    assert keys_of(range(3)) == []
    keys = keys_of(range(11))
    assert len(keys) == 2
    assert {len(key) for key in keys} == {KEY_BYTES}


def test_equal_prefixes_share_keys_and_no_others():
    first = keys_of([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12])
    second = keys_of([1, 2, 3, 4, 5, 6, 7, 9, 9, 10, 11, 12])
    assert first[0] == second[0]
    assert not set(first[1:]) & set(second[1:])


def test_order_of_tokens_matters():
    assert keys_of([1, 2, 3, 4]) != keys_of([2, 1, 3, 4])


def test_token_zero_is_not_nothing():
    keys = keys_of([0] * 12)
    assert len(set(keys)) == 3


def test_domains_and_processes_are_separate():
    assert keys_of(range(8), domain="a") != keys_of(range(8))
    assert keys_of(range(8), domain="a") == keys_of(range(8), domain="a")
    assert keys_of(range(8), secret=None) != keys_of(range(8), secret=None)


def test_extending_equals_hashing_at_once():
    hasher = PrefixHasher(4, secret=SECRET)
    keys, sums = hasher.extend_one(hasher.start(""), 0, TOKENS[:10])
    more, _ = hasher.extend_one(sums, 2, TOKENS[8:])
    assert keys + more == keys_of(TOKENS)


def test_many_prefixes_at_once():
    hasher = PrefixHasher(4, secret=SECRET)
    _, short = hasher.extend_one(hasher.start(""), 0, TOKENS[:4])
    _, long = hasher.extend_one(hasher.start("x"), 0, TOKENS[:12])
    keys, sums = hasher.extend_many(
        np.stack((short, long)), np.array([1, 3], np.int32), np.stack((TOKENS[4:8], TOKENS[12:16]))
    )
    assert keys == [keys_of(TOKENS[:8])[1], keys_of(TOKENS[:16], domain="x")[3]]
    assert np.array_equal(sums[0], hasher.extend_one(short, 1, TOKENS[4:8])[1])


def test_multipliers_grow_without_changing():
    hasher = PrefixHasher(2, secret=SECRET)
    tokens = np.arange(400, dtype=np.int32)
    short = hasher.extend_one(hasher.start(""), 0, tokens[:8])[0]
    assert hasher.extend_one(hasher.start(""), 0, tokens)[0][:4] == short


@given(
    st.lists(st.integers(0, 3), min_size=4, max_size=24), st.lists(st.integers(0, 3), max_size=24)
)
def test_keys_are_equal_exactly_when_prefixes_are(first, second):
    for index, (mine, theirs) in enumerate(zip(keys_of(first), keys_of(second), strict=False)):
        end = 4 * (index + 1)
        assert (mine == theirs) == (first[:end] == second[:end])


def test_map_serves_the_oldest_and_falls_back():
    table = PrefixMap(6)
    table.add([b"k", b"k", b"k"], np.array([3, 1, 5]))
    table.add([b"other", b"null"], np.array([3, 0]))  # block 3 has a key already
    assert table.first == {b"k": 3}
    assert table.blocks_by_key() == {b"k": [3, 1, 5]}
    table.remove(1)
    table.remove(3)
    assert table.first == {b"k": 5}
    table.remove(5)
    assert table.first == {}
    assert table.key_of == [None] * 6
    table.add([b"k"], np.array([2]))
    table.clear()
    assert table.blocks_by_key() == {}
    assert table.key_of == [None] * 6


def test_runs():
    up, down = list(range(3, 40)), list(range(40, 0, -1))
    values = list(range(50))
    for blocks in (up, down, list(range(30, -1, -1))):
        assert values[run_of(blocks)] == blocks
    for blocks in ([], [1, 2, 3], [*up, 50], [*up[:20], *up[21:]], [3] * 20):
        assert run_of(blocks) is None
