import math

import pytest

from twostroke.advice.observation import Observation, from_dict
from twostroke.errors import ConfigError


def test_what_is_known_survives_a_round_trip() -> None:
    seen = Observation(source="test", tpot_s=0.02, num_decode=3)
    assert seen.as_dict() == {"source": "test", "tpot_s": 0.02, "num_decode": 3}
    assert from_dict(seen.as_dict()).as_dict() == seen.as_dict()


def test_unknown_fields_are_named() -> None:
    seen = Observation(tpot_s=0.02)
    assert seen.missing("tpot_s", "decode_s") == ("decode_s",)
    assert seen.knows("tpot_s")
    assert math.isnan(seen.decode_s)


def test_facts_are_added_and_none_adds_nothing() -> None:
    seen = Observation(tpot_s=0.02).with_facts(tpot_slo_s=0.05, turn_tokens=None)
    assert seen.tpot_slo_s == 0.05
    assert not seen.knows("turn_tokens")


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ([], "JSON object"),
        ({"nonsense": 1}, "no field 'nonsense'"),
        ({"tpot_s": "fast"}, "tpot_s of an observation is 'fast'"),
        ({"tpot_s": True}, "must be a number"),
        ({"source": 1.0}, "source"),
    ],
)
def test_wrong_files_are_refused_by_name(values: object, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        from_dict(values)
