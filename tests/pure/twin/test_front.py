"""The front end's share of latencies: added once, in order, and the same at any speed."""

import numpy as np
import pytest

from tests.pure.twin.deployments import group, run
from twostroke.cost import HostCost
from twostroke.messages import AddRequest, SamplingParams
from twostroke.twin.front import FrontEnd

FRONT = HostCost(
    frontend_s=0.003,
    frontend_token_s=1e-5,
    frontend_busy_s=0.001,
    deliver_s=0.002,
    deliver_row_s=1e-4,
    deliver_first_s=0.015,
)
SPEC = "poisson:30/s,in=uniform(20,400),out=uniform(2,60),n=50"


def test_a_lone_request_is_later_by_the_front_end() -> None:
    load = "constant:1/s,in=100,out=5,n=1"
    plain, fronted = run([group()], load), run([group(host=FRONT)], load)
    later_s = 0.003 + 100 * 1e-5 + 0.002 + 1e-4 + 0.015
    assert fronted.ttft_s - plain.ttft_s == pytest.approx([later_s])
    assert fronted.tpot_s == pytest.approx(plain.tpot_s - 0.015 / 4)


def test_a_handoff_passes_the_front_end_once() -> None:
    load = "constant:1/s,in=100,out=5,n=1"
    plain = run([group("prefill"), group("decode")], load)
    fronted = run([group("prefill", host=FRONT), group("decode", host=FRONT)], load)
    later_s = 0.003 + 100 * 1e-5 + 0.002 + 1e-4 + 0.015
    assert fronted.ttft_s - plain.ttft_s == pytest.approx([later_s])


def test_requests_that_come_together_share_the_front_end() -> None:
    busy = HostCost(frontend_s=0.003, frontend_busy_s=0.002)
    load = "burst:inf/s,size=8,in=16,out=1,n=8"
    plain, fronted = (run([group(host=host)], load) for host in (HostCost(), busy))
    assert fronted.intervals_s[:, 0] == pytest.approx(8 * 0.002 + 0.001)
    assert plain.intervals_s[:, 0] == pytest.approx(0)


def test_one_that_comes_later_delays_the_first() -> None:
    """10 ms of work each, the second 4 ms after the first: it has 6 ms left, which takes 12."""
    front = FrontEnd(HostCost(frontend_s=0.010, frontend_busy_s=0.010))
    first, second = (
        AddRequest(
            handle=i,
            request_id=str(i),
            prompt_token_ids=np.arange(4, dtype=np.int32),
            params=SamplingParams(),
            max_tokens=1,
        )
        for i in (1, 2)
    )
    front.send(first, 1.0)
    assert front.next_s == pytest.approx(1.010)
    front.send(second, 1.004)
    assert front.next_s == pytest.approx(1.016)
    assert [it[1] for it in front.done(front.next_s)] == [first]
    assert front.next_s == pytest.approx(1.020)
    assert [it[1] for it in front.done(front.next_s)] == [second]
    assert front.next_s == np.inf


@pytest.mark.parametrize("roles", [("both",), ("prefill", "decode")])
def test_fast_forward_changes_nothing(roles: tuple[str, ...]) -> None:
    engines = [group(role, 2, host=FRONT) for role in roles]
    fast, slow = (run(engines, SPEC, fast_forward=fast) for fast in (True, False))
    assert fast.done.all()
    for name in ("ttft_s", "tpot_s", "e2e_s", "intervals_s"):
        assert np.array_equal(getattr(fast, name), getattr(slow, name)), name
    for result in (fast, slow):  # first tokens are told late, and nothing is told before them
        assert (result.e2e_s >= result.ttft_s).all()
        assert result.intervals_s.sum(axis=1) == pytest.approx(result.e2e_s)
    gaps = (np.repeat(it.itl_s, it.itl_counts).sum() for it in (fast, slow))
    assert next(gaps) == pytest.approx(next(gaps))


def test_an_answer_of_one_token_ends_with_it() -> None:
    host = HostCost(deliver_first_s=0.5)
    result = run([group(host=host)], "constant:1/s,in=100,out=1,n=2")
    assert np.array_equal(result.e2e_s, result.ttft_s)
    assert (result.ttft_s > 0.5).all()
    assert result.intervals_s.sum(axis=1) == pytest.approx(result.e2e_s)
