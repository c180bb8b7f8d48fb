"""Prompts that know their runs: tokens like any other, and the same prefixes."""

import random

import numpy as np
import pytest

from twostroke.router.policy import PrefixKeys
from twostroke.twin.hasher import RunHasher, RunKeys
from twostroke.twin.prompt import Prompt, prompt_of, runs_of

SIZE = 4


def random_prompt(rng) -> Prompt:
    """Runs of all kinds: whole rows of numbers, parts of blocks, none, the same id twice."""
    lengths = rng.choice([[128], [128, 128, 4, 100], [0, 1, 3, 4, 6, 130]])
    count = rng.randint(1, 8)
    values = np.array([rng.randrange(3) for _ in range(count)], np.int32)
    counts = np.array([rng.choice(lengths) for _ in range(count)], np.int32)
    return prompt_of(values, counts)


def plain(prompt):
    return np.array(prompt.tolist(), np.int32)


def test_a_prompt_is_a_column_that_knows_its_runs():
    prompt = prompt_of(np.array([7, 8], np.int32), np.array([3, 2], np.int32))
    assert prompt.dtype == np.int32
    assert prompt.tolist() == [7, 7, 7, 8, 8]
    assert runs_of(prompt) == ([7, 8], [3, 2])
    assert runs_of(prompt[1:]) == runs_of(plain(prompt[1:])) == ([7, 8], [2, 2])


@pytest.mark.parametrize("seed", range(5))
def test_its_prefixes_are_those_of_its_tokens(seed):
    rng = random.Random(seed)
    hasher = RunHasher(SIZE)
    for _ in range(100):
        prompt, domain = random_prompt(rng), rng.choice(["", "", "", "salt"])
        inputs = [prompt, plain(prompt)]
        rng.shuffle(inputs)
        one, other = (hasher.extend_one(hasher.start(domain), 0, tokens) for tokens in inputs)
        assert one[0] == other[0]
        assert one[1].tolist() == other[1].tolist()
        assert len(one[0]) == len(prompt) // SIZE


@pytest.mark.parametrize("seed", range(5))
def test_the_routers_keys_are_equal_where_those_of_tokens_are(seed):
    rng = random.Random(seed)
    runs, sums = RunKeys(SIZE), PrefixKeys(SIZE)
    sum_of = {}
    for _ in range(100):
        prompt, salt = random_prompt(rng), rng.choice(["", "", "salt"])
        own, expected = runs.of(prompt, salt), sums.of(plain(prompt), salt)
        assert len(own) == len(expected)
        for key, key_of_sums in zip(own, expected, strict=True):
            assert sum_of.setdefault(key, key_of_sums) == key_of_sums
    assert len(set(sum_of.values())) == len(sum_of)
