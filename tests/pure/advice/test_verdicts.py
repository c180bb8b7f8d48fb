import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twostroke.advice.observation import FIELDS, Observation
from twostroke.advice.verdict import NAMES, Verdict
from twostroke.advice.verdicts import judge

# A balanced deployment in which nothing is short.
HEALTHY = Observation(
    window_s=60,
    num_prefill=2,
    num_decode=4,
    decode_tp=4,
    num_kv_heads=4,
    kv_token_bytes=98_304,
    requests_per_s=20.0,
    prompt_tokens=8192,
    cached_tokens=0,
    output_tokens=1024,
    prefill_busy=0.6,
    prefill_queue_s=0.02,
    prefill_s=0.06,
    prefill_waiting=0.1,
    prefill_pin_wait_s=0.0,
    room_wait_s=0.0,
    transfer_s=0.02,
    transfer_bytes=8192 * 98_304,
    transfer_messages=512,
    transfer_bytes_per_s=20 * 8192 * 98_304,
    link_bytes_per_s=50e9,
    link_low_bytes_per_s=45e9,
    link_message_s=1e-6,
    num_links=4,
    decode_queue_s=0.01,
    decode_s=20.0,
    preempted_s=0.0,
    tpot_s=0.0195,
    decode_busy=0.99,
    decode_running=100,
    decode_loading=0.2,
    decode_waiting=0.0,
    decode_kv_usage=0.6,
    decode_pool_tokens=1.5e6,
    decode_max_num_seqs=512,
    decode_elasticity=0.5,
    tpot_slo_s=0.05,
    turn_tokens=2048,
    prefix_tokens=7168,
)


def verdict(name: str, **changes: float) -> Verdict:
    seen = dataclasses.replace(HEALTHY, **changes)
    return next(it for it in judge(seen) if it.name == name)


def test_a_healthy_deployment_is_left_alone() -> None:
    answers = {it.name: it.answer for it in judge(HEALTHY)}
    assert answers == {
        "decode_bound": "nothing",
        "message_size": "good",
        "layout": "keep",
        "link_limit": "far",
        "prefill_blocked": "no",
        "decode_waits": "neither",
        "move_prefix": "move",
        "append_on_decode": "prefill",
        "ratio": "fits",
    }


@pytest.mark.parametrize(
    ("name", "changes", "answer"),
    [
        ("decode_bound", {"decode_kv_usage": 0.97}, "kv"),
        ("decode_bound", {"decode_kv_usage": 0.97, "decode_elasticity": 0.95}, "compute"),
        ("decode_bound", {"decode_max_num_seqs": 100}, "seats"),
        ("decode_bound", {"tpot_s": 0.06}, "compute"),
        ("decode_bound", {"decode_pool_tokens": 25_000, "decode_waiting": 3}, "kv"),
        ("message_size", {"transfer_messages": 512 * 96}, "small"),
        ("message_size", {"link_message_s": 100e-6}, "small"),
        ("layout", {"num_prefill": 5, "num_decode": 1, "prefill_busy": 0.1}, "change"),
        ("layout", {"link_low_bytes_per_s": 5e9}, "change"),
        ("layout", {"link_low_bytes_per_s": 0.0}, "change"),
        ("link_limit", {"link_low_bytes_per_s": 4e9}, "near"),
        ("link_limit", {"num_links": 0.3}, "near"),
        ("prefill_blocked", {"prefill_pin_wait_s": 5.0}, "yes"),
        ("decode_waits", {"transfer_s": 10.0}, "waits"),
        ("decode_waits", {"decode_loading": 60.0}, "waits"),
        ("decode_waits", {"decode_kv_usage": 0.95}, "decode"),
        ("move_prefix", {"link_bytes_per_s": 1e9, "link_low_bytes_per_s": 0.5e9}, "recompute"),
        ("append_on_decode", {"turn_tokens": 16}, "append"),
        ("ratio", {"prefill_busy": 0.1}, "more_decode"),
        (
            "ratio",
            {"prefill_busy": 1.0, "decode_kv_usage": 0.1, "decode_pool_tokens": 1e7},
            "more_prefill",
        ),
    ],
)
def test_one_change_makes_the_verdict(name: str, changes: dict[str, float], answer: str) -> None:
    found = verdict(name, **changes)
    assert found.answer == answer
    assert found.evidence
    assert found.confidence in ("high", "medium", "low")
    if found.calls_for_action:
        assert found.action


def test_replicated_heads_are_named_where_the_link_binds() -> None:
    found = verdict("layout", link_low_bytes_per_s=5e9, decode_tp=8)
    assert "TP 4" in found.action


def test_nothing_known_means_nothing_said() -> None:
    for found in judge(Observation()):
        assert found.answer == "unknown"
        assert found.calls_for_action is None
        assert found.missing
        assert found.confidence == "none"


def test_numbers_and_questions() -> None:
    assert [it.number for it in judge(Observation())] == list(range(1, 10))
    assert all(it.question.endswith("?") for it in judge(Observation()))


NUMBERS = st.one_of(
    st.just(math.nan), st.just(0.0), st.floats(0, 1e12), st.floats(0, 1), st.integers(0, 100)
)


@settings(max_examples=300, deadline=None)
@given(st.lists(NUMBERS, min_size=len(FIELDS), max_size=len(FIELDS)))
def test_any_figures_are_judged_without_a_crash(values: list[float]) -> None:
    given_values = dict(zip(FIELDS, map(float, values), strict=True))
    seen = Observation(**given_values | {"source": ""})  # type: ignore[arg-type]
    assert tuple(it.name for it in judge(seen)) == NAMES


def test_what_waits_for_prefill_on_decode_is_not_held_against_it() -> None:
    """Where KV streams D is full of requests for which P has no time."""
    busy = {
        "kv_streams": 1.0, "decode_kv_usage": 0.95, "decode_running": 20.0, "requests_per_s": 2.0,
        "decode_loading": 150.0, "decode_waiting": 9.0, "decode_pool_tokens": 1.6e6,
    }  # fmt: skip
    assert verdict("decode_waits", **busy | {"kv_streams": 0.0}).answer == "waits"
    assert verdict("decode_waits", **busy).answer == "neither"
    found = verdict("decode_bound", **busy)
    assert found.answer == "nothing"
    assert "by requests that still wait for P: 84%" in found.evidence
