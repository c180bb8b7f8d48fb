import math
from collections.abc import Callable

import numpy as np
import pytest

from twostroke.advice import closed_form as forms


def test_engines_balance_where_both_sides_carry_the_same() -> None:
    # An H100 at TP8: 19.2 prompts of 8k a second on P, 10.1 answers of 1k on D.
    wanted = forms.prefill_per_decode(19.2, 10.1)
    assert wanted == pytest.approx(0.526, abs=1e-3)
    assert forms.nearest_ratio(wanted, 11) == (1, 2)
    assert forms.nearest_ratio(0.575, 11) == (4, 7)
    assert forms.nearest_ratio(math.inf, 16) == (15, 1)


def test_the_best_split_of_a_fixed_number_of_engines() -> None:
    assert forms.best_split(11, 19.2, 10.1) == (4, 7)
    assert forms.best_split(8, 1.0, 1.0, link_per_s=0.1) == (4, 4)
    assert forms.best_split(1, 1.0, 1.0) == (1, 1)


def test_erlang_c_is_the_load_with_one_server_and_falls_with_more() -> None:
    assert forms.erlang_c(1, 0.7) == pytest.approx(0.7)
    # Tables: 5 servers, 4 erlang: 0.5541.
    assert forms.erlang_c(5, 4.0) == pytest.approx(0.5541, abs=1e-4)
    assert forms.erlang_c(3, 3.0) == 1.0
    assert 0 < forms.erlang_c(2000, 1900.0) < 0.1


def test_waiting_before_one_server_is_pollaczek_khinchine() -> None:
    # M/D/1 at half load waits half a service, M/M/1 a whole one.
    assert forms.wait_mgc_s(0.5, 1.0) == pytest.approx(0.5)
    assert forms.wait_mgc_s(0.5, 1.0, service_scv=1.0) == pytest.approx(1.0)
    assert forms.wait_mgc_s(2.0, 1.0, 2) == math.inf


def served(rate: float, service_s: Callable[[int], float], most: int) -> float:
    """Mean latency of a server that, when free, takes whom it can of those who wait."""
    arrivals = np.cumsum(np.random.Generator(np.random.PCG64(1)).exponential(1 / rate, 100_000))
    total, now, i = 0.0, 0.0, 0
    while i < len(arrivals):
        now = max(now, arrivals[i])
        j = min(i + most, int(np.searchsorted(arrivals, now, side="right")))
        now += service_s(j - i)
        total += (now - arrivals[i:j]).sum()
        i = j
    return float(total / len(arrivals))


@pytest.mark.parametrize("rate", [2.0, 8.0, 15.0])
def test_batches_that_grow_with_the_queue_match_a_simulation(rate: float) -> None:
    each, fixed = 0.05, 0.02
    line = forms.all_at_once(rate, each, fixed)
    expected = served(rate, lambda n: fixed + n * each, 1 << 20)
    assert line.latency_s() == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("most", [2, 3, 8])
@pytest.mark.parametrize("load", [0.2, 0.6, 0.85])
@pytest.mark.parametrize("fixed", [0.0, 0.3])
def test_batches_of_a_few_match_a_simulation(most: int, load: float, fixed: float) -> None:
    times = [fixed + 0.1 * n for n in range(1, most + 1)]
    rate = load * most / times[-1]
    line = forms.few_at_a_time(rate, times)
    assert line.latency_s() == pytest.approx(served(rate, lambda n: times[n - 1], most), rel=0.05)
    assert 1 <= line.in_step <= most
    assert line.together() == line.in_step


def test_one_at_a_time_is_pollaczek_khinchine_and_a_chain_of_ones() -> None:
    line = forms.one_at_a_time(0.5, 1.0)
    assert line.latency_s() == pytest.approx(1.5)
    assert forms.few_at_a_time(0.5, [1.0]).latency_s() == pytest.approx(1.5, rel=1e-6)
    assert forms.one_at_a_time(0.5, 1.0, service_scv=1.0).latency_s() == pytest.approx(2.0)


def test_before_several_servers_less_is_waited_where_work_can_be_evened_out() -> None:
    # M/D/2 at load 0.8: as Allen and Cunneen have it, within a few per cent.
    line = forms.one_at_a_time(0.8, 1.0)
    assert line.latency_s(2) == pytest.approx(1 + forms.wait_mgc_s(1.6, 1.0, 2), rel=0.03)
    # A step that lasts as long for many: whoever is at work stays so.
    constant = forms.all_at_once(2.0, 1e-6, 1.0)
    assert constant.latency_s() > constant.latency_s(3) > 1 + 0.5 * 0.8


@pytest.mark.parametrize(
    "line",
    [forms.all_at_once(20.0, 0.05, 0.0), forms.one_at_a_time(1.0, 1.0),
     forms.few_at_a_time(2.0, [0.5, 1.0])],
)  # fmt: skip
def test_a_server_asked_for_too_much_never_ends_its_queue(line: forms.Line) -> None:
    assert line.latency_s() == line.latency_s(3) == math.inf
    assert forms.shared_transfer_s(0.0, 1e9, 1e9, 1.0) == math.inf


def test_the_decode_batch_follows_from_the_rate() -> None:
    def step_s(rows: float) -> float:
        return 0.01 + 0.0001 * rows

    batch = forms.decode_batch(5.0, 1000.0, step_s, 1024)
    assert batch == pytest.approx(5000 * 0.0101 / (1 - 5000 * 0.0001), rel=1e-4)
    assert forms.decode_per_s(batch, 1000.0, step_s(batch + 1)) == pytest.approx(5.0, rel=1e-4)
    assert forms.decode_batch(20.0, 1000.0, step_s, 1024) == math.inf


def test_steps_with_a_change_match_a_simulation() -> None:
    random = np.random.default_rng(0)
    comes = np.cumsum(random.exponential(10.0, 20_000))  # a request in ten steps, of 60 each
    changed = np.unique(np.concatenate((comes, comes + 60)).astype(np.int64))
    share = np.mean((changed > 1000) & (changed < comes[-1] - 1000)) * len(changed) / comes[-1]
    assert forms.changed_steps(6.0, 60.0, 2.0) == pytest.approx(share, rel=0.02)
    assert forms.changed_steps(0.0, 60.0, 2.0) == 0


def test_the_largest_batch_within_a_bound() -> None:
    assert forms.largest_batch(lambda rows: rows * 1e-3, 0.05, 1024) == 50
    assert forms.largest_batch(lambda rows: 1.0, 0.05, 1024) == 0
    assert forms.largest_batch(lambda rows: 0.0, 0.05, 1024) == 1024


def test_elasticity_is_one_where_rows_cost_all_and_zero_where_they_are_free() -> None:
    assert forms.batch_elasticity(lambda rows: 3 * rows, 64) == pytest.approx(1.0)
    assert forms.batch_elasticity(lambda rows: 3.0, 64) == pytest.approx(0.0)


def test_the_articles_concurrency() -> None:
    tokens = 54 * 2**30 // 24576
    assert forms.concurrency(tokens, 8192) == 288
    assert forms.concurrency(tokens, 8192 + 1024) == 256


def test_staging_and_pins() -> None:
    assert forms.staging_slots(100_000, 1000, 64) == 36
    assert forms.held_tokens(10.0, 8192, 0.5) == 40_960


def test_messages_of_four_times_cost_and_rate_reach_80_per_cent() -> None:
    size = forms.message_bytes_for(0.8, 1e-6, 25e9)
    assert size == pytest.approx(100e3)
    assert forms.message_efficiency(size, 1e-6, 25e9) == pytest.approx(0.8)
    assert forms.message_efficiency(0, 0, 25e9) == 0.0


def test_where_a_prefix_is_worth_moving() -> None:
    # 7k tokens of the article's model save 46.6 ms on an H100 at TP8: about 15 GB/s.
    assert forms.worth_moving_bytes_per_s(7168 * 98_304, 0.0466) == pytest.approx(15.1e9, rel=0.01)
    assert forms.worth_moving_bytes_per_s(1, 0.0) == math.inf
    assert math.isnan(forms.worth_moving_bytes_per_s(1, math.nan))


def test_short_turns_stay_on_decode_and_long_ones_do_not() -> None:
    # 128 rows at 16 ms with a bound of 50 ms; 30 ms through P.
    slack = 50 / 16
    assert forms.append_on_decode(0.0003, 128, slack, 0.030)
    assert not forms.append_on_decode(0.0041, 128, slack, 0.030)
    assert not forms.append_on_decode(0.0003, 128, 0.0, 0.030)
