"""Engines that share a host: their steps are slow while, and only while, others compute."""

import numpy as np
import pytest

from tests.pure.twin.deployments import group, run
from twostroke.cost import HostCost
from twostroke.twin.workload import of_columns

TWICE = HostCost(slowdown=(1.0, 2.0), prompt_slowdown=(1.0, 2.0))


def test_engines_that_share_a_host_slow_each_other_down():
    engines = [group("both", 2, host=TWICE, max_num_seqs=1)]
    together = run(engines, "burst:inf/s,size=2,in=100,out=40,n=2")
    alone = run(engines, "constant:inf/s,in=100,out=40,n=1")
    assert together.e2e_s.max() == pytest.approx(2 * alone.e2e_s[0], rel=0.01)


def test_a_step_is_slow_only_as_long_as_others_compute():
    """A short answer and a long one: both at half speed until the short one is done."""
    engines = [group("both", 2, host=TWICE, max_num_seqs=1)]
    lengths = np.array([10, 60], np.int32)
    two = run(engines, of_columns("two", np.zeros(2), np.full(2, 100, np.int32), lengths))
    short, long = (run(engines, f"constant:inf/s,in=100,out={n},n=1").e2e_s[0] for n in lengths)
    assert two.e2e_s[0] == pytest.approx(2 * short)
    assert two.e2e_s[1] == pytest.approx(long + short)
    assert sum(it.busy_s for it in two.engines) == pytest.approx(two.e2e_s.sum())


def test_prefill_and_decode_on_one_host():
    """What both engines do at once takes longer; nothing is lost, and the sums hold."""
    load = "poisson:20/s,in=uniform(50,400),out=30,n=40"
    host = HostCost(slowdown=(1.0, 1.7), prompt_slowdown=(1.0, 1.4))
    pair = [group(role, host=host) for role in ("prefill", "decode")]
    shared, apart = run(pair, load), run([group("prefill"), group("decode")], load)
    assert shared.done.all()
    assert shared.intervals_s.sum(axis=1) == pytest.approx(shared.e2e_s)
    busy, alone = (sum(it.busy_s for it in result.engines) for result in (shared, apart))
    assert alone < busy < 1.7 * alone * 1.1
    again = run(pair, load)
    assert np.array_equal(again.e2e_s, shared.e2e_s)
