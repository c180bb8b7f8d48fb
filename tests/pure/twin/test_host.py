"""Engines that share a host: a step beside another's takes longer, and so does the other."""

import dataclasses

import numpy as np
import pytest

from tests.pure.twin.deployments import group, run
from twostroke.cost import HostCost
from twostroke.twin.workload import of_columns

BESIDE_S = 1e-3
SHARED = HostCost(beside_s=BESIDE_S, interrupted_s=BESIDE_S)


def test_each_step_makes_itself_and_the_other_engine_late():
    engines = [group("both", 2, host=SHARED, max_num_seqs=1)]
    sent_s, tokens = np.array([0.0, 1.3e-3]), np.full(2, 100, np.int32)
    together = run(engines, of_columns("two", sent_s, tokens, np.full(2, 40, np.int32)))
    alone = run(engines, "constant:inf/s,in=100,out=40,n=1")
    # Each of 40 steps begins while the other engine computes, and so does each of the other's 40.
    late_s = together.e2e_s - alone.e2e_s[0]
    assert late_s == pytest.approx([80 * BESIDE_S] * 2, rel=0.05)


def test_only_what_overlaps_is_late():
    """A short answer and a long one: once the short one is done the other is alone. They begin
    together and have the same steps, so both begin each of ten at once."""
    engines = [group("both", 2, host=SHARED, max_num_seqs=1)]
    lengths = np.array([10, 60], np.int32)
    two = run(engines, of_columns("two", np.zeros(2), np.full(2, 100, np.int32), lengths))
    short, long = (run(engines, f"constant:inf/s,in=100,out={n},n=1").e2e_s[0] for n in lengths)
    assert two.e2e_s[0] == pytest.approx(short + 10 * BESIDE_S, abs=2 * BESIDE_S)
    assert two.e2e_s[1] == pytest.approx(long + 10 * BESIDE_S, abs=2 * BESIDE_S)
    assert sum(it.busy_s for it in two.engines) == pytest.approx(two.e2e_s.sum())


def test_prefill_and_decode_on_one_host():
    """What both engines do at once takes longer; nothing is lost, and the sums hold."""
    load = "poisson:20/s,in=uniform(50,400),out=30,n=40"
    pair = [group(role, host=SHARED) for role in ("prefill", "decode")]
    shared, apart = run(pair, load), run([group("prefill"), group("decode")], load)
    assert shared.done.all()
    assert shared.intervals_s.sum(axis=1) == pytest.approx(shared.e2e_s)
    busy, alone = (sum(it.busy_s for it in result.engines) for result in (shared, apart))
    assert alone < busy < 1.7 * alone
    again = run(pair, load)
    assert np.array_equal(again.e2e_s, shared.e2e_s)


def test_a_prompt_that_is_handed_over_waits():
    load, slow = "constant:1/s,in=160,out=2,n=4", HostCost(handoff_s=0.05)
    roles = ("prefill", "decode")
    late, soon = (run([group(role, host=it) for role in roles], load) for it in (slow, HostCost()))
    assert late.ttft_s - soon.ttft_s == pytest.approx(0.05, abs=1e-6)


def test_steps_after_a_pause_are_slow():
    """The first step of each of four lone requests, but by no more than a share of it."""
    load, limit = "constant:1/s,in=160,out=20,n=4", HostCost(cold_s=10.0)
    engines = (
        [group("both", host=HostCost(cold_s=1e-4))],
        [group("both")],
        [group("both", host=limit)],
    )
    cold, warm, most = (run(it, load).ttft_s for it in engines)
    assert cold - warm == pytest.approx(1e-4)
    assert most / warm == pytest.approx(1.25, rel=0.01)


@pytest.mark.parametrize("steps_together", [False, True])
@pytest.mark.parametrize("beside_s", [0.0, 1e-9])
def test_a_step_during_which_requests_come_is_late(beside_s, steps_together):
    """The first engine decodes; the second request comes to it during a step, and is served at the
    end of that; the third comes with it."""
    sent_s, outputs = np.array([0.0, 0.5, 0.5]), np.array([200, 2, 2], np.int32)
    load = of_columns("three", sent_s, np.full(3, 16, np.int32), outputs)
    plain, late = (
        run(
            [
                dataclasses.replace(
                    group("both", host=host), steps_together=steps_together, plans_late=True
                )
            ],
            load,
        )
        for host in (
            HostCost(beside_s=beside_s),
            HostCost(beside_s=beside_s, arrival_s=3e-3, arrivals_s=5e-4),
        )
    )
    assert late.ttft_s - plain.ttft_s == pytest.approx([0.0, 3.5e-3, 3.5e-3], abs=1e-9)
    assert late.e2e_s[0] - plain.e2e_s[0] == pytest.approx(3.5e-3)
    assert late.engines[0].busy_s - plain.engines[0].busy_s == pytest.approx(3.5e-3)


def test_who_comes_to_an_idle_engine_delays_nothing():
    load = "constant:1/s,in=160,out=20,n=4"
    plain, late = (
        run([group("both", host=HostCost(arrival_s=arrival_s))], load) for arrival_s in (0.0, 3e-3)
    )
    assert np.array_equal(plain.e2e_s, late.e2e_s)
