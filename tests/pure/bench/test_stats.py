import numpy as np
import pytest

from twostroke.bench import stats
from twostroke.bench.load import Outcome
from twostroke.errors import ConfigError

# Two overlapping requests and one that failed: sums can be done by hand.
FIRST = Outcome(10, 3, start_s=0.0, chunk_times_s=[0.1, 0.3, 0.5])
SECOND = Outcome(20, 2, start_s=0.2, chunk_times_s=[0.6, 1.2])
FAILED = Outcome(30, 0, start_s=0.3, error="HTTP 429")


def test_the_figures_of_a_run():
    result = stats.summarise([FIRST, FAILED, SECOND], 2.0, percentiles=[50, 99.9])
    assert (result["completed"], result["failed"]) == (2, 1)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (30, 5)
    assert result["request_throughput"] == 1.0
    assert result["output_throughput"] == 2.5
    assert result["total_token_throughput"] == 17.5
    assert result["mean_ttft_ms"] == pytest.approx(250)
    assert result["mean_tpot_ms"] == pytest.approx((200 + 600) / 2)
    assert result["median_itl_ms"] == pytest.approx(200)  # of 200, 200, 600
    assert result["mean_e2el_ms"] == pytest.approx((500 + 1000) / 2)
    assert result["p50_e2el_ms"] == pytest.approx(750)
    assert result["p99.9_ttft_ms"] == pytest.approx(399.7)
    assert result["max_concurrent_requests"] == 2
    assert result["max_output_tokens_per_s"] == 4  # all but the piece at 1.2 s
    assert result["request_goodput"] is None


def test_goodput_counts_requests_that_meet_every_limit():
    def goodput(limits):
        return stats.summarise([FIRST, SECOND, FAILED], 1.0, goodput_ms=limits)["request_goodput"]

    assert goodput({"ttft": 100.1}) == 1
    assert goodput({"ttft": 500}) == 2
    assert goodput({"ttft": 500, "tpot": 300}) == 1
    assert goodput({"e2el": 1}) == 0


def test_a_request_that_ends_as_another_starts_does_not_overlap_it():
    after = Outcome(1, 1, start_s=0.5, chunk_times_s=[0.7])
    assert stats.summarise([FIRST, after], 1.0)["max_concurrent_requests"] == 1


def test_a_run_in_which_all_failed_has_figures_of_zero():
    result = stats.summarise([FAILED], 1.0)
    assert result["completed"] == 0
    assert result["mean_ttft_ms"] == 0
    assert result["max_output_tokens_per_s"] == 0


def test_only_the_metrics_asked_for():
    result = stats.summarise([FIRST], 1.0, metrics=["ttft"])
    assert "mean_ttft_ms" in result
    assert "mean_tpot_ms" not in result


def test_goodput_limits_are_written_in_any_usual_way():
    limits = {"ttft": 200.0, "tpot": 50.0}
    assert stats.parse_goodput(["ttft:200", "tpot:50"]) == limits
    assert stats.parse_goodput(["ttft:200,tpot:50"]) == limits
    assert stats.parse_goodput(["ttft:200 tpot:50"]) == limits


@pytest.mark.parametrize(
    ("parse", "value", "words"),
    [
        (stats.parse_goodput, ["itl:5"], "names 'itl'; choices: ttft, tpot, e2el"),
        (stats.parse_goodput, ["ttft"], "write a limit in ms"),
        (stats.parse_names, "ttft,latency", "names 'latency'; choices"),
        (stats.parse_percentiles, "99,x", "write numbers"),
        (stats.parse_percentiles, "101", r"101.0; it must be in \[0, 100\]"),
    ],
)
def test_wrong_options_are_named(parse, value, words):
    with pytest.raises(ConfigError, match=words):
        parse(value)


def test_gaps_that_are_counted_give_what_gaps_one_by_one_give():
    gaps = np.array([0.5, 0.1, 0.3, 0.1])
    counts = np.array([3, 5, 1, 2])
    percentiles = [0, 10, 33.3, 50, 90, 99, 100]
    counted = stats._moments(gaps, counts, percentiles)
    plain = stats._moments(np.repeat(gaps, counts), None, percentiles)
    assert counted[:2] == pytest.approx(plain[:2])
    assert counted[2] == pytest.approx(plain[2])


@pytest.mark.parametrize("kinds", [1, 3, 500])
def test_percentiles_of_what_came_several_times_are_those_of_all(kinds):
    random = np.random.Generator(np.random.PCG64(kinds))
    values = random.lognormal(size=kinds)[random.integers(0, kinds, 400)]
    counts = random.integers(1, 9, 400)
    shares = [0.0, 12.5, 50.0, 99.0, 100.0]
    mean, deviation, cuts = stats._moments(values, counts, shares)
    each = np.repeat(values, counts)
    assert mean == pytest.approx(each.mean())
    assert deviation == pytest.approx(each.std())
    assert cuts == pytest.approx(np.percentile(each, shares).tolist())
