import math
from itertools import pairwise

import pytest

from twostroke.bench import workload
from twostroke.errors import ConfigError

SIZES = {"input_tokens": 30, "output_tokens": 10, "vocab_size": 100}


def test_random_prompts_follow_from_their_seed():
    one = workload.random_prompts(5, **SIZES, seed=3)
    assert one == workload.random_prompts(5, **SIZES, seed=3)
    assert one != workload.random_prompts(5, **SIZES, seed=4)
    assert all(len(prompt.prompt) == 30 and prompt.output_tokens == 10 for prompt in one)
    assert all(20 <= token < 100 for prompt in one for token in prompt.prompt)


def test_the_prefix_is_shared_and_comes_on_top():
    prompts = workload.random_prompts(4, **SIZES, prefix_tokens=8, seed=0)
    assert {len(prompt.prompt) for prompt in prompts} == {38}
    assert len({tuple(prompt.prompt[:8]) for prompt in prompts}) == 1
    assert len({tuple(prompt.prompt[8:]) for prompt in prompts}) == 4


def test_lengths_vary_within_the_ratio():
    prompts = workload.random_prompts(200, **SIZES, range_ratio=0.5, seed=0)
    lengths = {len(prompt.prompt) for prompt in prompts}
    assert min(lengths) == 15
    assert max(lengths) == 45
    assert {prompt.output_tokens for prompt in prompts} == set(range(5, 16))


def test_arrivals_end_on_time_whatever_the_burstiness():
    for burstiness in (0.3, 1.0, 4.0, math.inf):
        offsets = workload.arrival_offsets_s(200, request_rate=10, burstiness=burstiness, seed=1)
        assert offsets[-1] == pytest.approx(20)
        assert list(offsets) == sorted(offsets)


def test_burstiness_sets_how_uneven_the_gaps_are():
    def variation(burstiness):
        offsets = workload.arrival_offsets_s(4000, request_rate=1, burstiness=burstiness, seed=1)
        gaps = [after - before for before, after in pairwise(offsets)]
        mean = sum(gaps) / len(gaps)
        return math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) / mean

    # The gamma distribution's coefficient of variation is 1 / sqrt(shape).
    assert variation(1.0) == pytest.approx(1, rel=0.1)
    assert variation(0.25) == pytest.approx(2, rel=0.1)
    assert variation(math.inf) == pytest.approx(0, abs=1e-9)


def test_an_infinite_rate_sends_all_at_once():
    assert workload.arrival_offsets_s(3, request_rate=math.inf, burstiness=1, seed=0) == [0, 0, 0]


@pytest.mark.parametrize(
    "changes", [{"request_rate": 0}, {"burstiness": -1}, {"request_rate": math.nan}]
)
def test_impossible_arrivals_are_refused(changes):
    with pytest.raises(ConfigError, match="must be over 0"):
        workload.arrival_offsets_s(3, **({"request_rate": 1, "burstiness": 1, "seed": 0} | changes))


def test_prompts_of_a_file(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"prompt": "b", "output_tokens": 7}\n{"prompt": "c"}\n')
    prompts = workload.prompts_from_file(path, 2, output_tokens=5)
    assert [(prompt.prompt, prompt.output_tokens) for prompt in prompts] == [("a", 5), ("b", 7)]


@pytest.mark.parametrize(
    ("text", "words"),
    [("", "has no prompt"), ('{"prompt": "a"}\n[1]', "line 2 of"), ("{", "line 1 of")],
)
def test_a_damaged_file_is_refused_by_line(tmp_path, text, words):
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        workload.prompts_from_file(path, 9, output_tokens=5)


def test_a_missing_file_and_impossible_sizes(tmp_path):
    with pytest.raises(ConfigError, match="cannot read the dataset"):
        workload.prompts_from_file(tmp_path / "none", 1, output_tokens=1)
    with pytest.raises(ConfigError, match="--vocab-size is 20"):
        workload.random_prompts(1, input_tokens=1, output_tokens=1, vocab_size=20, seed=0)
    with pytest.raises(ConfigError, match="--random-range-ratio is 1"):
        workload.random_prompts(1, **SIZES, range_ratio=1, seed=0)
