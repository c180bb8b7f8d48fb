"""Whole runs: what they must add up to, and that taking steps in one go changes nothing."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from tests.pure.twin.deployments import TOKEN_BYTES, group, run
from twostroke.cost import BandwidthCurve, HostCost, LinearStepCost
from twostroke.cost_spread import StepSpread
from twostroke.errors import ConfigError
from twostroke.ledger import Interval
from twostroke.router.dispatch import DispatchSettings
from twostroke.twin.transfers import Link

COLUMNS = (
    "arrival_s",
    "ttft_s",
    "tpot_s",
    "e2e_s",
    "intervals_s",
    "output_tokens",
    "cached_tokens",
    "num_preemptions",
)


def assert_same(one, other):
    for name in COLUMNS:
        a, b = getattr(one, name), getattr(other, name)
        assert np.array_equal(a, b, equal_nan=a.dtype.kind == "f"), name
    assert one.errors == other.errors
    assert one.duration_s == other.duration_s
    for a, b in zip(one.changes, other.changes, strict=True):
        assert np.array_equal(a, b)
    assert one.link_bytes == other.link_bytes
    tokens = [dict.fromkeys(r.itl_s.tolist(), 0) for r in (one, other)]
    for result, counts in zip((one, other), tokens, strict=True):
        for gap, count in zip(result.itl_s.tolist(), result.itl_counts.tolist(), strict=True):
            counts[gap] += count
    assert tokens[0] == tokens[1]


# Shrinking reruns whole simulations, for minutes.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)

SPREAD = StepSpread(most_tokens=(2, 64), percents=("90 95 230 210 101", "80 130 99"))

lengths = st.sampled_from(
    ["lognormal(200,1)", "uniform(1,900)", "300", "exponential(60)", "lognormal(40,2)"]
)
arrivals = st.sampled_from(["poisson:20/s", "gamma:30/s,cv=3", "burst:40/s,size=7", "constant:9/s"])
extras = st.sampled_from(["", ",prefix=100,prefixes=2", ",turns=3,gap=0.2"])
deployments = st.sampled_from(
    [
        [("both", 1)],
        [("both", 3)],
        [("prefill", 1), ("decode", 1)],
        [("prefill", 1), ("decode", 2)],
        [("prefill", 2), ("decode", 1), ("both", 1)],
    ]
)


@settings(max_examples=12, deadline=None, phases=PHASES)
@given(
    spec=st.tuples(arrivals, lengths, lengths, extras, st.integers(1, 25)),
    deployment=deployments,
    blocks=st.sampled_from([150, 200, 500]),
    seats=st.sampled_from([3, 8]),
    begins=st.sampled_from(["sync", "async", "late"]),
    host=st.sampled_from(
        [
            HostCost(),
            HostCost(gap_s=0.0003, gap_row_s=1e-5),
            HostCost(ingress_s=0.002, ingress_token_s=1e-6, egress_s=0.001, egress_row_s=1e-5),
            HostCost(gap_s=0.0003, spread=SPREAD),
            HostCost(changed_s=0.003, cold_s=0.002, spread=SPREAD),
            HostCost(ingress_s=0.002, gap_s=0.0003, arrival_s=0.004, arrivals_s=0.001),
        ]
    ),
    mode=st.sampled_from(["pull", "stream"]),
)
@example(  # a prompt that is too long is refused while others decode
    spec=("poisson:20/s", "uniform(1,900)", "uniform(1,900)", ",turns=3,gap=0.2", 3),
    deployment=[("both", 1)],
    blocks=200,
    seats=8,
    begins="sync",
    host=HostCost(ingress_s=0.002, ingress_token_s=1e-6, egress_s=0.001, egress_row_s=1e-5),
    mode="pull",
)
def test_fast_forward_changes_nothing(spec, deployment, blocks, seats, begins, host, mode):
    arrival, prompt, output, extra, count = spec
    load = f"{arrival},in={prompt},out={output},n={count}{extra}"
    engines = [
        replace(
            group(
                role,
                number,
                num_blocks=blocks,
                max_num_seqs=seats,
                async_scheduling=begins != "sync",
                host=host,
            ),
            plans_late=begins == "late",
        )
        for role, number in deployment
    ]
    fast, slow = (
        run(engines, load, fast_forward=fast, settings=DispatchSettings(kv_mode=mode))
        for fast in (True, False)
    )
    assert_same(fast, slow)
    assert sum(engine.num_steps for engine in fast.engines) == sum(
        engine.num_steps for engine in slow.engines
    )


def test_the_ledger_sums_to_the_latency():
    result = run([group("prefill"), group("decode", 2)], "poisson:8/s,in=300,out=50,n=60")
    assert not result.errors
    assert result.intervals_s.sum(axis=1) == pytest.approx(result.e2e_s, abs=2e-9)
    assert (result.intervals_s[:, Interval.TRANSFER] > 0).all()
    assert result.output_tokens.tolist() == [50] * 60
    assert int(result.itl_counts.sum()) == 60 * 49


def test_a_lone_request_takes_what_its_steps_cost():
    cost = LinearStepCost(base_s=0.010, token_s=0.001)
    result = run([group(cost=cost)], "constant:1/s,in=100,out=11,n=1")
    # One step for the prompt, ten for the other tokens.
    assert result.ttft_s[0] == pytest.approx(0.010 + 0.100)
    assert result.e2e_s[0] == pytest.approx(0.110 + 10 * 0.011)
    assert result.tpot_s[0] == pytest.approx(0.011)
    assert result.duration_s == pytest.approx(result.e2e_s[0])


def test_steps_are_as_late_as_the_spread_says():
    """All of up to 16 tokens by half, and no others."""
    cost, spread = LinearStepCost(base_s=0.010), StepSpread(most_tokens=(16,), percents=("150",))
    result = run([group(cost=cost, host=HostCost(spread=spread))], "constant:1/s,in=100,out=11,n=1")
    assert result.ttft_s[0] == pytest.approx(0.010)
    assert result.tpot_s[0] == pytest.approx(0.015)
    assert result.engines[0].busy_s == pytest.approx(0.160)


def test_a_lone_hand_off_takes_what_link_and_steps_cost():
    cost = LinearStepCost(base_s=0.010, token_s=0.001)
    engines = [group("prefill", cost=cost), group("decode", cost=cost)]
    result = run(engines, "constant:1/s,in=160,out=2,n=1")
    moved_s = 0.001 + 160 * TOKEN_BYTES / 1e9
    intervals = result.intervals_s[0]
    assert intervals[Interval.PREFILL] == pytest.approx(0.170)
    assert intervals[Interval.TRANSFER] == pytest.approx(moved_s)
    # D computes the prompt's last token again, for the first one of the answer.
    assert intervals[Interval.DECODE] == pytest.approx(2 * 0.011)
    assert result.link_bytes["D0 in"] == result.link_bytes["P0 out"] == 160 * TOKEN_BYTES


def test_transfers_share_a_link():
    slow = Link(bandwidth=BandwidthCurve((0.0,), (2e6,)))
    one, many = (
        run(
            [group("prefill"), group("decode")], f"burst:inf/s,size=9,in=160,out=2,n={n}", link=slow
        )
        for n in (1, 4)
    )
    alone_s = 160 * TOKEN_BYTES / 2e6
    assert one.intervals_s[0, Interval.TRANSFER] == pytest.approx(alone_s)
    # All begin at the same time, so all end when the link has moved them all.
    waits = many.intervals_s[:, Interval.TRANSFER]
    assert waits.max() == pytest.approx(4 * alone_s, rel=0.1)
    assert many.link_bytes["D0 in"] == 4 * 160 * TOKEN_BYTES


@pytest.mark.parametrize(
    ("host", "steps_together"),
    [(HostCost(), False), (HostCost(beside_s=1e-4), False), (HostCost(), True)],
)
def test_streams_over_a_slow_link_do_not_stand_still(host, steps_together):
    """Workers wait for pieces, and for nothing else, while the next plan is made."""
    alike = {"num_blocks": 120, "max_num_batched_tokens": 128, "host": host}
    engines = [
        replace(group(role, **alike), steps_together=steps_together)
        for role in ("prefill", "decode", "both")
    ]
    result = run(
        engines,
        "poisson:100/s,in=uniform(100,900),out=20,n=6,turns=3,gap=0.1",
        link=Link(bandwidth=BandwidthCurve((0.0,), (1e7,)), base_s=0.001),
        settings=DispatchSettings(kv_mode="stream"),
    )
    assert result.done.all()
    assert not result.errors
    assert result.duration_s < 10


def test_a_link_that_is_down_only_delays():
    down = Link(bandwidth=BandwidthCurve((0.0, 2.0, 5.0), (1e9, 0.0, 1e9)))
    result = run([group("prefill"), group("decode")], "constant:1/s,in=160,out=2,n=4", link=down)
    assert not result.errors
    waits = result.intervals_s[:, Interval.TRANSFER]
    assert waits[:1].max() < 0.1
    assert waits[1] > 2.5  # the second arrives just after 2 s


def test_later_turns_find_their_history_cached():
    result = run([group(num_blocks=1000)], "constant:1/s,in=160,out=32,n=3,turns=3,gap=0.5")
    assert not result.errors
    order = result.prompt_tokens.tolist()
    assert order == [160, 352, 544] * 3
    # All full blocks of what came before, the answer's last token aside: its KV is never computed.
    assert result.cached_tokens.tolist() == [0, 176, 368] * 3
    ends = result.arrival_s + result.e2e_s
    assert result.arrival_s[1::3] == pytest.approx(ends[::3] + 0.5)


def test_what_can_never_run_fails_alone():
    result = run([group(num_blocks=20)], "constant:5/s,in=uniform(10,900),out=5,n=30")
    too_long = result.prompt_tokens > 19 * 16
    assert set(result.errors) == set(np.flatnonzero(too_long).tolist())
    assert "needs" in next(iter(result.errors.values()))
    assert np.isfinite(result.e2e_s[~too_long]).all()


def test_a_run_can_be_cut_short():
    result = run([group()], "constant:1/s,in=100,out=20,n=30", until_s=10.5)
    assert 9 <= result.done.sum() <= 11
    assert "had not ended" in result.errors[29]


def test_the_same_scenario_gives_the_same_result():
    load = "gamma:20/s,cv=2,in=lognormal(200,1),out=lognormal(50,1),n=60"
    engines = [group("prefill"), group("decode", 2)]
    assert_same(run(engines, load), run(engines, load))


@pytest.mark.parametrize(
    ("engines", "words"),
    [
        ([], "no engine"),
        ([group("prefill")], "no engine decodes"),
        ([group(block_size=8)], "blocks hold"),
    ],
)
def test_deployments_that_cannot_work(engines, words):
    with pytest.raises(ConfigError, match=words):
        run(engines, "constant:1/s,in=10,out=5,n=1")
