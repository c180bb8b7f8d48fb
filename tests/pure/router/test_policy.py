"""Balance, affinity and its bound, death, and counters that return to zero."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostroke.errors import EngineDeadError
from twostroke.messages import EngineStats
from twostroke.router.policy import (
    COARSE,
    DECODE_TOKENS,
    FINE_BLOCKS,
    MAX_IMBALANCE,
    SLACK_TOKENS,
    PrefixIndex,
    PrefixKeys,
    RoutingPolicy,
)


def prompt(seed: int, length: int = 100) -> list[int]:
    return np.random.default_rng(seed).integers(0, 50_000, length).tolist()


def send(policy: RoutingPolicy, handle: int, tokens: list[int], salt: str = "") -> int:
    keys = policy.keys_of(tokens, salt)
    engine = policy.choose(keys)
    policy.sent(handle, engine, len(tokens), keys)
    return engine


def choose(policy: RoutingPolicy, tokens: list[int], salt: str = "") -> int:
    return policy.choose(policy.keys_of(tokens, salt))


def test_uniform_load_is_spread_evenly():
    policy = RoutingPolicy(4)
    engines = [send(policy, i, prompt(i)) for i in range(40)]
    assert [engines.count(i) for i in range(4)] == [10] * 4
    for handle in range(40):
        policy.first_token(handle)
    assert [policy.load(i) for i in range(4)] == [10 * DECODE_TOKENS] * 4
    for handle in range(40):
        policy.ended(handle)
    assert [policy.load(i) for i in range(4)] == [0] * 4


def test_one_after_the_other_goes_round():
    policy = RoutingPolicy(3)
    engines = []
    for i in range(6):
        engines.append(send(policy, i, prompt(i)))
        policy.ended(i)
    assert engines == [0, 1, 2, 0, 1, 2]


def test_a_burst_is_spread_by_its_prompts_tokens():
    """Own sends count at once: one long prompt weighs as much as many short ones."""
    policy = RoutingPolicy(2)
    assert send(policy, 0, prompt(0, 1000)) == 0
    assert [send(policy, i, prompt(i, 68)) for i in range(1, 11)] == [1] * 10
    policy.first_token(0)  # now it only decodes
    assert send(policy, 11, prompt(11, 68)) == 0


def test_an_equal_prefix_goes_where_it_is():
    policy = RoutingPolicy(3)
    shared = prompt(0, 320)
    home = send(policy, 0, shared + prompt(1, 10))
    policy.first_token(0)
    for handle in range(1, 8):
        assert send(policy, handle, shared + prompt(handle + 1, 10)) == home
        policy.first_token(handle)
    policy.ended(0)
    other = prompt(99, 320)
    assert choose(policy, other) != home


def test_another_salt_shares_nothing():
    policy = RoutingPolicy(2)
    shared = prompt(0, 320)
    assert send(policy, 0, shared, "a") == 0
    policy.ended(0)
    assert choose(policy, shared, "a") == 0
    assert choose(policy, shared, "b") == choose(policy, shared) == 1


def test_a_popular_prefix_spreads_when_its_engine_is_busy():
    policy = RoutingPolicy(2)
    shared = prompt(0, 4000)
    engines = []
    for handle in range(40):
        engines.append(send(policy, handle, shared + prompt(handle, 8)))
        policy.first_token(handle)
    assert engines[:10] == [0] * 9 + [1]
    assert engines.count(0) == engines.count(1) == 20  # both hold it now


def test_requests_that_wait_for_kv_weigh_more():
    policy = RoutingPolicy(2)
    for handle in range(2):
        policy.sent(handle, 0, 1)
        policy.first_token(handle)
    policy.engine_stats(0, EngineStats(num_waiting=1, kv_usage=1.0))
    assert policy.load(0) == DECODE_TOKENS * (2 + 6 * 0.5)
    assert [send(policy, i, prompt(i, 10)) for i in range(2, 5)] == [1, 1, 1]
    policy.engine_stats(0, EngineStats(num_waiting=1, kv_usage=0.4))
    assert policy.load(0) == DECODE_TOKENS * 2
    policy.engine_stats(0, EngineStats(num_waiting=1, kv_usage=1.0))
    for handle in range(2):
        policy.ended(handle)
    assert policy.load(0) == 0  # whatever the engine last said


def test_what_was_reset_or_fell_out_of_the_pool_attracts_nothing():
    policy = RoutingPolicy(2)
    shared = prompt(0, 320)
    send(policy, 0, shared)
    policy.ended(0)
    assert choose(policy, shared) == 0
    policy.prefixes_reset(0)
    assert choose(policy, shared) == 1
    policy.engine_ready(1, pool_tokens=16 * 16)
    for handle, seed in enumerate((0, 1), start=1):
        policy.sent(handle, 1, 320, policy.keys_of(prompt(seed, 320)))
        policy.ended(handle)
    assert choose(policy, prompt(1, 320)) == 1
    assert choose(policy, shared) == 0


def test_the_dead_are_never_chosen():
    policy = RoutingPolicy(2)
    shared = prompt(0, 320)
    assert send(policy, 0, shared) == 0
    policy.engine_died(0)
    policy.first_token(0)
    policy.ended(0)
    assert policy.load(0) == 0
    assert {send(policy, handle, shared) for handle in range(1, 40)} == {1}
    policy.engine_died(1)
    with pytest.raises(EngineDeadError, match="every engine"):
        choose(policy, shared)


def test_without_a_prefix_cache_there_is_no_affinity():
    policy = RoutingPolicy(2, affinity=False)
    for handle in range(4):
        assert send(policy, handle, prompt(0)) == handle % 2
        policy.ended(handle)


def test_one_engine_needs_no_keys():
    policy = RoutingPolicy(1)
    assert send(policy, 0, prompt(0)) == 0
    assert policy.load(0) == 100 + DECODE_TOKENS


def test_keys_stand_for_whole_prefixes_and_do_not_change():
    keys, tokens = PrefixKeys(16), prompt(0, 200)
    short = keys.of(tokens[:33], "")
    assert len(short) == 2
    assert keys.of(tokens, "")[:2] == short == PrefixKeys(16).of(np.array(tokens), "")[:2]
    assert len(keys.of(tokens[:32], "")) == 1  # the last token is computed in any case
    assert not keys.of(tokens[:16], "")
    assert not keys.of([], "")
    changed = keys.of([tokens[0] + 1, *tokens[1:]], "")
    assert not set(changed) & set(keys.of(tokens, ""))
    assert keys.of([0] * 33, "") != keys.of([0] * 33, "salt")


def test_the_index_forgets_the_ends_of_old_prompts_first():
    index = PrefixIndex(3)
    index.add([1, 2])
    index.add([3, 4])
    assert len(index) == 3
    assert (index.match([1, 2]), index.match([3, 4])) == (1, 2)
    index.clear()
    assert index.match([3]) == len(index) == 0


class KeyByKey:
    """What `PrefixIndex` is to be equal to."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.keys: dict[int, int] = {}  # and the blocks that each stands for; the oldest first

    def add(self, keys: list[int]) -> None:
        for place, key in reversed(list(enumerate(keys))):
            self.keys.pop(key, None)
            self.keys[key] = 1 if place < FINE_BLOCKS else COARSE
        if len(self) > self.capacity + self.capacity // 8:
            while len(self) > self.capacity:
                del self.keys[next(iter(self.keys))]

    def __len__(self) -> int:
        return sum(self.keys.values())


def keys_in(index: PrefixIndex) -> list[int]:
    return [key for stretch in index._by_age for key in stretch.keys]


FORKS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 12)), max_size=3)


@given(st.lists(FORKS, max_size=60), st.integers(0, 80))
def test_the_index_equals_one_that_is_kept_key_by_key(prompts, capacity):
    """Prompts that share beginnings: a prompt's key stands for all before it."""
    index, model = PrefixIndex(capacity), KeyByKey(capacity)
    for forks in prompts:
        path = [branch for branch, length in forks for _ in range(length)]
        keys = [hash(tuple(path[: end + 1])) for end in range(len(path))]
        assert index.match(keys) == sum(key in model.keys for key in keys)
        index.add(keys)
        model.add(keys)
        assert len(index) == len(model)
        assert sorted(keys_in(index)) == sorted(model.keys)


def test_the_index_has_what_is_sent_again_and_again_only_once():
    index, keys = PrefixIndex(1000), list(range(30))
    for tail in range(50):
        index.add([*keys, -1 - tail])
    assert len(keys_in(index)) == 30 + 50
    index.capacity = FINE_BLOCKS
    index.add(keys)
    assert keys_in(index) == list(range(FINE_BLOCKS))


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["send", "send", "send", "token", "end", "stats", "kill", "reset"]),
        st.integers(0, 1000),
    ),
    max_size=120,
)


@given(st.integers(1, 4), STEPS)
def test_random_lives(num_engines: int, steps: list[tuple[str, int]]):
    policy, twin = RoutingPolicy(num_engines), RoutingPolicy(num_engines)
    alive, open_on = set(range(num_engines)), {}
    for number, (what, value) in enumerate(steps):
        engine = value % num_engines
        handle = list(open_on)[value % len(open_on)] if open_on else -1
        if what == "send" and alive:
            tokens = prompt(value % 3, 64) + prompt(value, value % 200)
            chosen = choose(policy, tokens, str(value % 2))
            loads = {i: policy.load(i) for i in alive}
            assert chosen in alive
            assert loads[chosen] <= MAX_IMBALANCE * min(loads.values()) + SLACK_TOKENS
            assert choose(twin, tokens, str(value % 2)) == chosen  # nothing but what it was told
            for it in (policy, twin):
                keys = it.keys_of(tokens, str(value % 2))
                it.sent(number, chosen, len(tokens), keys)
            assert loads[chosen] + DECODE_TOKENS < policy.load(chosen)
            open_on[number] = chosen
        elif what == "kill" and value < 100:
            alive.discard(engine)
            open_on = {h: e for h, e in open_on.items() if e != engine}
            for it in (policy, twin):
                it.engine_died(engine)
        for it in (policy, twin):
            if what == "token":
                it.first_token(handle)
            elif what == "end":
                it.ended(handle)
            elif what == "reset":
                it.prefixes_reset(engine)
            elif what == "stats" and engine in alive:
                it.engine_stats(engine, EngineStats(num_waiting=value % 5, kv_usage=value / 1000))
        if what == "end":
            open_on.pop(handle, None)
    for handle in open_on:
        policy.ended(handle)
    assert [policy.load(i) for i in range(num_engines)] == [0] * num_engines
