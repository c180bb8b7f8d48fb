import json
import math
from pathlib import Path

import pytest

from tests.pure.advice.test_verdicts import HEALTHY
from twostroke.cost import LinearStepCost, LinkCost
from twostroke.cost_fit import FitError
from twostroke.cost_profile import Profile
from twostroke.errors import ConfigError
from twostroke.plan import diagnose as doctor


def nothing(label: str, share: float) -> None:
    """No bar."""


def observe(path: Path) -> doctor.Observation:
    return doctor.observe(path, "", [], [], "60s", nothing)


def test_an_observation_is_read_back_from_a_report(tmp_path: Path) -> None:
    report = doctor.diagnose(HEALTHY).as_dict()
    (tmp_path / "report.json").write_text(json.dumps(report))
    (tmp_path / "seen.json").write_text(json.dumps(HEALTHY.as_dict()))
    for name in ("report.json", "seen.json"):
        assert observe(tmp_path / name).as_dict() == HEALTHY.as_dict()


def test_the_report_has_all_nine_and_is_narrow() -> None:
    text = doctor.diagnose(HEALTHY).text
    assert text.startswith("nothing binds at 20 req/s, of ")
    assert "2P:4D, over 60 s" in text
    assert "20 req/s, 8,192 tokens in, 1,024 tokens out, 19.5 ms a token" in text
    assert all(f" {number}. " in text for number in range(1, 10))
    assert max(map(len, text.splitlines())) <= 100


def test_the_cause_comes_first() -> None:
    seen = HEALTHY.with_facts(transfer_s=10.0, link_low_bytes_per_s=4e9)
    assert "of the link is asked for" in doctor.diagnose(seen).text.splitlines()[0]


def test_nothing_known_is_said_so() -> None:
    diagnosis = doctor.diagnose(doctor.Observation())
    assert diagnosis.text.startswith("nothing can be told")
    assert all(it.answer == "unknown" for it in diagnosis.verdicts)


LEDGER = [
    {
        "arrival_s": float(i), "prompt_tokens": 100, "output_tokens": 11, "ttft_s": 0.5,
        "e2e_s": 1.5, "cached_tokens": 10,
        "intervals": {"queue": 0.1, "prefill": 0.2, "held": 0.1, "transfer": 0.1, "decode": 1.0},
    }
    for i in range(10)
]  # fmt: skip


def test_a_ledger_tells_where_time_went_and_no_more(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_text("\n".join(map(json.dumps, [*LEDGER, LEDGER[0] | {"e2e_s": None}])))
    seen = observe(path)
    assert seen.tpot_s == pytest.approx(0.1)
    assert seen.room_wait_s == pytest.approx(0.1)
    assert seen.requests_per_s == pytest.approx(10 / 10.5)
    found = {it.name: it for it in doctor.diagnose(seen).verdicts}
    assert found["link_limit"].answer == "unknown"
    assert "decode_kv_usage" in found["decode_bound"].missing


def test_a_ledger_with_its_engines_tells_how_many_were_at_it_at_once(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    rows = [row | {"engines": [1, 2]} for row in LEDGER]
    # Two more come with the last: three decode at once for a while, each token takes as long again.
    late = {"e2e_s": 2.5, "intervals": LEDGER[0]["intervals"] | {"decode": 2.0}}
    rows += [rows[-1] | late | {"arrival_s": 9.0}] * 2
    path.write_text("\n".join(map(json.dumps, rows)))
    seen = observe(path)
    assert (seen.num_prefill, seen.num_decode) == (1, 2)
    window_s = 11.5
    # Nine are computed alone, for 0.2 s each; the last three at the same time.
    assert seen.prefill_busy == pytest.approx(10 * 0.2 / window_s)
    assert seen.prefill_tokens_per_s == pytest.approx(12 * 90 / 2.0)
    # Somebody decodes from 0.5 s to 11.5 s.
    assert seen.decode_running == pytest.approx((10 * 1.0 + 2 * 2.0) / 11.0 / 2)
    assert seen.decode_elasticity > 0
    found = {it.name: it for it in doctor.diagnose(seen).verdicts}
    assert found["decode_waits"].answer == "neither"
    assert found["decode_bound"].answer == "unknown"


def crowded() -> list[dict]:
    """Four requests of 150 tokens a second, each computed in 0.1 s and decoded in 4 s; D has room
    for four at a time."""
    rows, ends = [], [0.0] * 4
    for index in range(40):
        arrival_s, first = index / 4, min(ends)
        held_s = max(0.0, first - arrival_s)
        ends[ends.index(first)] = arrival_s + held_s + 4.1
        spent = {"queue": 0.0, "prefill": 0.1, "held": held_s, "decode": 4.0}
        rows.append(
            {
                "arrival_s": arrival_s, "prompt_tokens": 100, "output_tokens": 50,
                "ttft_s": held_s + 0.2, "e2e_s": held_s + 4.1, "engines": [1, 1],
                "intervals": spent,
            }
        )  # fmt: skip
    return rows


def test_who_waits_for_room_tells_how_large_the_pool_is(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_text("\n".join(map(json.dumps, crowded())))
    seen = observe(path)
    assert seen.decode_pool_tokens == pytest.approx(4 * 150, rel=0.05)
    assert 0.75 < seen.decode_kv_usage <= 1.0
    found = {it.name: it for it in doctor.diagnose(seen).verdicts}
    assert found["decode_bound"].answer == "kv"
    assert found["ratio"].answer == "more_decode"
    assert found["prefill_blocked"].answer == "unknown", "it may be P's pool that is full"


def test_where_nobody_waits_nothing_binds(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    waits = {"held": 0.001, "decode": 1.099}
    rows = [it | {"engines": [1, 2], "intervals": it["intervals"] | waits} for it in LEDGER]
    path.write_text("\n".join(map(json.dumps, rows)))
    seen = observe(path).with_facts(kv_token_bytes=1e6, link_bytes_per_s=1e9)
    found = {it.name: it for it in doctor.diagnose(seen).verdicts}
    assert found["decode_bound"].answer == "nothing"
    assert found["prefill_blocked"].answer == "no"
    # 100 tokens of 1 MB at nearly one request a second.
    assert found["link_limit"].answer == "far"
    assert any(line == "utilisation: 10%" for line in found["link_limit"].evidence)
    assert found["message_size"].confidence == "low"


def test_a_profile_tells_how_steps_grow_and_what_the_link_does(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    step = LinearStepCost(base_s=0.010, token_s=0.001)
    link = LinkCost(base_s=1e-3, message_s=2e-5, bytes_per_s=2e9)
    Profile(
        model="tiny", device="here", step=step, step_error=FitError(9, 0.0, 0.0, 0.0), link=link
    ).save(path)
    unknown = math.nan
    seen = HEALTHY.with_facts(
        decode_elasticity=unknown, link_bytes_per_s=unknown, decode_running=10.0
    )
    told = doctor.with_profile(seen, path)
    assert told.decode_elasticity == pytest.approx(0.5), "ten rows double a step"
    assert told.link_bytes_per_s == 2e9
    assert told.link_message_s == HEALTHY.link_message_s, "what was seen counts for more"
    with pytest.raises(ConfigError, match="cannot read the profile"):
        doctor.with_profile(seen, tmp_path / "none.json")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "has no request"),
        ("hello", "line 1 of .* is no request of a ledger"),
        ('{"arrival_s": 1}', "no request of a ledger"),
        ('{"observation": {"nonsense": 1}}', "no request of a ledger"),
        ('{"observation": {"tpot_s": "fast"}}', "must be a number"),
        ("[1, 2]", "no request of a ledger"),
    ],
)
def test_wrong_files_are_named(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "wrong.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=complaint):
        observe(path)


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        observe(Path("/nowhere/at/all"))


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ((None, "", [], [], "60s"), "give one thing to diagnose"),
        ((Path("x"), "http://h", [], [], "60s"), "give one thing to diagnose"),
        ((None, "", ["http://h"], [], "60s"), "--decode is missing"),
        ((None, "", [], ["http://h"], "60s"), "--prefill is missing"),
        ((None, "http://h", [], [], "a while"), "--for is 'a while'"),
    ],
)
def test_exactly_one_source_is_wanted(given: tuple, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        doctor.observe(*given, nothing)


def test_facts_that_a_user_adds() -> None:
    facts = doctor.facts(
        slo="tpot=50ms",
        link="50GB/s",
        model="qwen3-30b-a3b",
        tensor_parallel_size=8,
        turn_tokens=64,
    )
    assert facts == {
        "tpot_slo_s": 0.05, "link_bytes_per_s": 50e9, "kv_token_bytes": 8 * 24_576.0,
        "num_kv_heads": 4.0, "decode_tp": 8.0, "turn_tokens": 64.0,
    }  # fmt: skip
    assert doctor.facts() == {}


def test_a_report_may_end_with_its_json(tmp_path: Path) -> None:
    path = tmp_path / "twin.txt"
    path.write_text("a report\n\n" + json.dumps({"observation": HEALTHY.as_dict()}) + "\n")
    assert observe(path).as_dict() == HEALTHY.as_dict()


def test_what_is_not_known_is_named_in_words_and_asked_for() -> None:
    unknown = math.nan
    text = doctor.diagnose(HEALTHY.with_facts(link_bytes_per_s=unknown, turn_tokens=unknown)).text
    assert "not known: rate of the link (--link)" in text
    assert "do: give --turn-tokens" in text
    assert "link_bytes_per_s" not in text


def test_a_silent_deployment_is_said_to_be_silent() -> None:
    assert doctor.diagnose(HEALTHY.with_facts(requests_per_s=0.0)).text.startswith("no request")


def test_near_its_limit_the_shorter_side_is_named() -> None:
    seen = HEALTHY.with_facts(
        prefill_busy=0.99, requests_per_s=20.0, decode_kv_usage=0.2, decode_pool_tokens=1e7
    )
    first = " ".join(doctor.diagnose(seen).text.partition("\n\n")[0].split())
    assert first.startswith("near its limit: 20 req/s, of 20.2 that it carries; too few P in 2P:4D")
