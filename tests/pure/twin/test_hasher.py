import numpy as np

from twostroke.twin.hasher import PromptHasher


def test_a_prompt_is_hashed_once_for_two_engines():
    hasher = PromptHasher(4)
    prompt = np.arange(11, dtype=np.int32)
    start = hasher.start("")
    keys, ends = hasher.extend_one(start, 0, prompt[0:])
    again, same = hasher.extend_one(start, 0, prompt[0:])
    assert again is keys
    assert same is ends
    third, _ = hasher.extend_one(start, 0, prompt[0:])
    assert third == keys
    assert third is not keys


def test_other_prompts_and_later_blocks_are_hashed():
    hasher = PromptHasher(4)
    start = hasher.start("")
    keys, ends = hasher.extend_one(start, 0, np.zeros(8, np.int32)[0:])
    others, _ = hasher.extend_one(start, 0, np.ones(8, np.int32)[0:])
    assert set(keys) & set(others) == set()
    more = np.zeros(12, np.int32)
    later, _ = hasher.extend_one(ends, 2, more[8:])
    whole, _ = hasher.extend_one(start, 0, more[0:])
    assert whole == keys + later
