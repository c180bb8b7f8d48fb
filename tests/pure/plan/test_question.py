import math

import numpy as np
import pytest

from twostroke.errors import ConfigError, TwostrokeError
from twostroke.plan.question import ask, parse_slo, shared_tokens
from twostroke.twin.workload import from_spec

GOOD = {
    "model": "qwen3-30b-a3b",
    "gpu": "H100",
    "workload": "poisson:4/s,in=512,out=64,n=20",
    "slo": "ttft=2s,tpot=50ms",
}


def test_bounds_on_latency() -> None:
    both = parse_slo("ttft=2s, tpot=50ms")
    assert (both.ttft_s, both.tpot_s) == (2.0, 0.05)
    assert str(both) == "TTFT <= 2 s and TPOT <= 50 ms"
    assert parse_slo("").tpot_s == math.inf
    assert str(parse_slo("")) == "no bound on latency"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("tftt=2s", "did you mean ttft"),
        ("ttft", "known are ttft and tpot"),
        ("ttft=2", "with its unit"),
        ("ttft=-2s", "a time over 0"),
        ("ttft=nans", "a time over 0"),
        ("ttft=infs", "a time over 0"),
        ("ttft=1s,ttft=2s", "gives ttft twice"),
        ("itl=5ms", "known are"),
    ],
)
def test_wrong_bounds_are_named(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        parse_slo(text)


def test_a_question_knows_its_load() -> None:
    asked = ask(**GOOD)
    assert asked.demand.mean_prompt == 512
    assert asked.demand.rate_per_s == pytest.approx(4.0, rel=0.5)
    assert asked.longest_tokens == 576
    assert asked.nic_bytes_per_s == 50e9


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"model": ""}, "--model is missing"),
        ({"gpu": ""}, "--gpu is missing"),
        ({"workload": ""}, "--workload is missing"),
        ({"gpu": "H10"}, "did you mean H100"),
        ({"model": "qwen3-30b-a3c"}, "did you mean qwen3-30b-a3b"),
        ({"workload": "nowhere.jsonl"}, "no file"),
        ({"workload": "poisson:4/s,in=300000,out=64,n=2"}, "takes 262,144"),
        ({"gpus": 100_000}, "at most 4,096"),
        ({"gpu": "RTX 4090"}, "no network card"),
        ({"link": "quick"}, "--link is 'quick'"),
    ],
)
def test_wrong_questions_name_the_flag(change: dict[str, object], complaint: str) -> None:
    with pytest.raises(TwostrokeError, match=complaint):
        ask(**GOOD | change)  # type: ignore[arg-type]


def test_shared_prefixes_are_found() -> None:
    workload = from_spec("poisson:1/s,in=100,out=1,n=4,prefix=900,prefixes=1")
    assert shared_tokens(workload).tolist() == [0, 900, 900, 900]
    alone = from_spec("poisson:1/s,in=100,out=1,n=4")
    assert not np.any(shared_tokens(alone))
