import math

import pytest

from twostroke.client.sampling import validate
from twostroke.errors import RequestError
from twostroke.messages import SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("n", 129),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -2),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("presence_penalty", -2.1),
        ("frequency_penalty", 2.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 1e-4),
        ("repetition_penalty", 1001.0),
        ("repetition_penalty", math.inf),
        ("seed", 1 << 63),
        ("seed", -(1 << 63) - 1),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("logprobs", -1),
        ("logprobs", 21),
        ("prompt_logprobs", 21),
        ("stop", ("",)),
        ("stop", ("x",) * 65),
        ("stop", ("x" * 4097,)),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", (100,)),
        ("logit_bias", {100: 1.0}),
        ("logit_bias", {1: 101.0}),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", dict.fromkeys(range(4097), 0.0)),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(field, value):
    with pytest.raises(RequestError) as caught:
        validate(SamplingParams(**{field: value}), vocab_size=100)
    assert caught.value.param == field
    assert field in str(caught.value)


def test_the_limits_themselves_are_allowed():
    validate(
        SamplingParams(
            n=128,
            temperature=0,
            top_k=-1,
            top_p=1,
            min_p=1,
            presence_penalty=-2,
            frequency_penalty=2,
            repetition_penalty=0.001,
            logit_bias={0: -100, 99: 100},
            seed=-(1 << 63),
            max_tokens=5,
            min_tokens=5,
            stop=("x",) * 64,
            stop_token_ids=(0, 99),
            logprobs=20,
            prompt_logprobs=0,
        ),
        vocab_size=100,
    )
    validate(SamplingParams(max_tokens=None, min_tokens=1000, seed=(1 << 63) - 1), vocab_size=1)
