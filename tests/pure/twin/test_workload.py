import numpy as np
import pytest

from twostroke.errors import ConfigError
from twostroke.twin.workload import from_spec, load, of_columns

COLUMNS = ("arrival_s", "prompt_tokens", "output_tokens", "values", "counts", "after", "gap_s")


def test_the_article_s_load():
    load = from_spec("poisson:65/s,in=8192,out=1024,n=325")
    assert len(load) == 325
    assert load.arrival_s[-1] == pytest.approx(5.0)
    assert (np.diff(load.arrival_s) > 0).all()
    assert set(load.prompt_tokens) == {8192}
    assert set(load.output_tokens) == {1024}
    assert len(load.prompt(7)) == 8192
    values = {load.output_value(i) for i in range(325)} | {
        int(load.prompt(i)[0]) for i in range(325)
    }
    assert len(values) == 650  # nothing is shared


def test_the_same_seed_gives_the_same_bytes():
    spec = "gamma:9/s,cv=2,in=lognormal(900,1),out=uniform(1,50),n=200,prefix=64,prefixes=3"
    one, other, third = from_spec(spec, seed=3), from_spec(spec, seed=3), from_spec(spec, seed=4)
    for name in COLUMNS:
        assert getattr(one, name).tobytes() == getattr(other, name).tobytes()
    assert one.prompt_tokens.tobytes() != third.prompt_tokens.tobytes()


@pytest.mark.parametrize(
    ("spec", "mean"),
    [
        ("fixed(70)", 70),
        ("uniform(100,300)", 200),
        ("lognormal(500,0.5)", 500),
        ("exponential(400)", 400),
        ("normal(300,20)", 300),
    ],
)
def test_lengths_from_distributions(spec, mean):
    load = from_spec(f"constant:1/s,in={spec},out=5,n=4000", seed=1)
    assert load.prompt_tokens.mean() == pytest.approx(mean, rel=0.05)
    assert load.prompt_tokens.min() >= 1


def test_arrivals():
    constant = from_spec("constant:2/s,in=1,out=1,n=4")
    assert constant.arrival_s.tolist() == [0.5, 1.0, 1.5, 2.0]
    burst = from_spec("burst:10/s,size=5,in=1,out=1,n=12")
    assert len(set(burst.arrival_s.tolist())) == 3
    assert from_spec("constant:inf/s,in=1,out=1,n=3").arrival_s.tolist() == [0, 0, 0]
    assert len(from_spec("poisson:4/s,in=1,out=1,duration=10")) == 40
    gaps = np.diff(from_spec("gamma:10/s,cv=3,in=1,out=1,n=5000").arrival_s)
    assert gaps.std() / gaps.mean() == pytest.approx(3, rel=0.2)


def test_shared_prefixes_come_on_top():
    load = from_spec("constant:1/s,in=10,out=1,n=20,prefix=30,prefixes=2", seed=1)
    assert set(load.prompt_tokens) == {40}
    heads = {tuple(load.prompt(i)[:30]) for i in range(20)}
    assert len(heads) == 2
    assert len({int(load.prompt(i)[-1]) for i in range(20)}) == 20


def test_turns_repeat_what_was_said():
    load = from_spec("constant:1/s,in=10,out=4,n=2,turns=3,gap=5")
    assert load.after.tolist() == [-1, 0, 1, -1, 3, 4]
    assert load.gap_s.tolist() == [0, 5, 5, 0, 5, 5]
    assert load.prompt_tokens.tolist() == [10, 24, 38] * 2
    for first in (0, 3):
        before = np.concatenate((load.prompt(first), [load.output_value(first)] * 4))
        assert load.prompt(first + 1)[:14].tolist() == before.tolist()
        again = np.concatenate((load.prompt(first + 1), [load.output_value(first + 1)] * 4))
        assert load.prompt(first + 2)[:28].tolist() == again.tolist()
    assert load.prompt(0)[0] != load.prompt(3)[0]


def test_the_head_of_a_load_is_the_same_requests():
    load = from_spec("constant:1/s,in=uniform(5,50),out=4,n=20", seed=2)
    head = load.head(7)
    assert len(head) == 7
    assert all(head.prompt(i).tolist() == load.prompt(i).tolist() for i in range(7))
    assert [head.output_value(i) for i in range(7)] == [load.output_value(i) for i in range(7)]
    assert load.head(50) is load


def test_a_load_played_faster():
    fast = load("constant:2/s,in=1,out=1,n=4", speed=2.0)
    assert fast.arrival_s.tolist() == [0.25, 0.5, 0.75, 1.0]


def test_columns_are_sorted_by_arrival():
    tokens = np.array([1, 2, 3], np.int32)
    load = of_columns("x", np.array([2.0, 1.0, 3.0]), tokens, tokens)
    assert load.prompt_tokens.tolist() == [2, 1, 3]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("poisson:0/s,in=1,out=1,n=1", "rate is '0/s'"),
        ("poisson:x,in=1,out=1,n=1", "rate is 'x'"),
        ("poisson:1/s,out=1,n=1", "in is missing"),
        ("poisson:1/s,in=0,out=1,n=1", "in is 0"),
        ("poisson:1/s,in=lognormal(3),out=1,n=1", "must be lognormal"),
        ("poisson:1/s,in=lognormal(0,1),out=1,n=1", "mean must be over 0"),
        ("poisson:1/s,in=uniform(9,1),out=1,n=1", "low must not be over high"),
        ("poisson:1/s,in=zipf(3),out=1,n=1", "one of fixed"),
        ("poisson:1/s,in=1,out=1", "n or duration"),
        ("poisson:1/s,in=1,out=1,n=1,duration=2", "not both"),
        ("poisson:inf/s,in=1,out=1,duration=2", "finite rate"),
        ("poisson:1/s,in=1,out=1,n=1.5", "n is 1.5"),
        ("poisson:1/s,in=1,out=1,n=99999999999", "n is"),
        ("poisson:1/s,in=1,out=1,n=1,n=2", "twice"),
        ("poisson:1/s,in=1,out=1,n=1,colour=red", "'colour=red' is unknown"),
        ("poisson:1/s,in=1,out=1,n=1,cv=2", "cv is for gamma"),
        ("gamma:1/s,in=1,out=1,n=1", "cv is missing"),
        ("burst:1/s,in=1,out=1,n=1", "size is missing"),
        ("poisson:1/s,in=1,out=1,n=1,gap=2", "gap"),
        ("poisson:1/s,in=1,out=1,n=1,prefixes=2", "prefixes"),
        ("poisson:1/s,in=1,out=1,n=1,prefix=4,turns=2", "cannot be combined"),
    ],
)
def test_what_is_wrong_is_named(spec, words):
    with pytest.raises(ConfigError, match=words.replace("(", r"\(")):
        from_spec(spec)


def test_a_speed_and_a_count_that_make_no_sense():
    with pytest.raises(ConfigError, match="speed"):
        load("constant:1/s,in=1,out=1,n=1", speed=0)
    with pytest.raises(ConfigError, match="at least 1"):
        load("constant:1/s,in=1,out=1,n=1", num_requests=0)
