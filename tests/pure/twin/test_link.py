"""Links conserve bytes, share fairly, and end transfers when the integral of B says so."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostroke.cost import BandwidthCurve
from twostroke.twin.link import Network, next_change_s

STEADY = BandwidthCurve((0.0,), (100.0,))


def drain(network, starts=(), *, until_s=math.inf):
    """Run to the end; `starts` are (time, key, path, bytes) with options. Ends by key."""
    ends = {}
    pending = sorted(starts, key=lambda start: start[0])
    while True:
        next_s = network.next_event_s()
        if pending and pending[0][0] <= next_s:
            time_s, key, path, num_bytes, *options = pending.pop(0)
            fields = options[0] if options else {}
            network.start(key, path, num_bytes, now_s=time_s, **fields)
        elif next_s < until_s:
            ends |= {key: next_s for key, _ in network.advance(next_s)}
        else:
            return ends


def test_one_transfer_takes_latency_and_bytes():
    network = Network({"a": STEADY})
    ends = drain(network, [(1.0, "x", ["a"], 50.0, {"latency_s": 0.25})])
    assert ends == {"x": 1.75}
    assert network.bytes_moved == {"a": 50.0}
    assert network.busy_s["a"] == pytest.approx(0.5)


def test_two_transfers_share_while_both_are_there():
    # x moves 50 alone, then 50 beside y; y has 50 left when x is gone.
    ends = drain(Network({"a": STEADY}), [(0.0, "x", ["a"], 100.0), (0.5, "y", ["a"], 100.0)])
    assert ends == {"x": pytest.approx(1.5), "y": pytest.approx(2.0)}


def test_the_tightest_link_decides_and_leaves_the_rest_to_others():
    links = {"thin": BandwidthCurve((0.0,), (10.0,)), "wide": STEADY}
    network = Network(links)
    ends = drain(network, [(0.0, "x", ["thin", "wide"], 10.0), (0.0, "y", ["wide"], 90.0)])
    assert ends == {"x": pytest.approx(1.0), "y": pytest.approx(1.0)}


def test_a_limit_of_its_own_leaves_the_rest_to_others():
    starts = [(0.0, "x", ["a"], 20.0, {"limit": 20.0}), (0.0, "y", ["a"], 80.0)]
    assert drain(Network({"a": STEADY}), starts) == {"x": 1.0, "y": 1.0}


def test_bandwidth_that_changes_and_stops():
    curve = BandwidthCurve((0.0, 1.0, 3.0), (100.0, 0.0, 50.0))
    ends = drain(Network({"a": curve}), [(0.5, "x", ["a"], 100.0)])
    assert ends == {"x": pytest.approx(4.0)}
    dead = Network({"a": BandwidthCurve((0.0, 1.0), (100.0, 0.0))})
    assert drain(dead, [(0.0, "x", ["a"], 101.0)]) == {}
    assert dead.next_event_s() == math.inf


def test_cancelled_transfers_leave_their_share():
    network = Network({"a": STEADY})
    network.start("x", ["a"], 100.0, now_s=0.0)
    network.start("y", ["a"], 100.0, now_s=0.0)
    assert network.cancel("x", now_s=1.0) == pytest.approx(50.0)
    assert network.cancel("x", now_s=1.0) == 0.0
    assert drain(network) == {"y": pytest.approx(1.5)}


def test_a_transfer_of_nothing_ends_at_once():
    assert drain(Network({"a": STEADY}), [(2.0, "x", ["a"], 0.0)]) == {"x": 2.0}


def test_what_is_left_may_take_no_time_that_the_clock_can_tell():
    # Rounding leaves such rests when shares change often; the world must not stand still at them.
    network = Network({"a": BandwidthCurve((0.0,), (1e10,))})
    network.start("x", ["a"], 1e-7, now_s=4.0)
    network.start("y", ["a"], 1e10, now_s=4.0)
    assert [key for key, _ in network.advance(network.next_event_s())] == ["x"]
    assert network.next_event_s() == pytest.approx(5.0)


def test_what_cannot_be():
    network = Network({"a": STEADY})
    network.start("x", ["a"], 100.0, now_s=0.0)
    with pytest.raises(ValueError, match="under way already"):
        network.start("x", ["a"], 1.0, now_s=0.0)
    with pytest.raises(ValueError, match="no link"):
        network.start("y", [], 1.0, now_s=0.0)
    with pytest.raises(ValueError, match="next event"):
        network.advance(1.5)


def test_when_a_bandwidth_changes_next():
    curve = BandwidthCurve((1.0, 2.0), (5.0, 6.0))
    assert [next_change_s(curve, t) for t in (0.0, 1.0, 1.5, 2.0)] == [1.0, 2.0, 2.0, math.inf]
    waves = BandwidthCurve((0.0, 2.0), (5.0, 6.0), period_s=3.0)
    assert [next_change_s(waves, t) for t in (0.0, 2.0, 3.0, 5.5)] == [2.0, 3.0, 5.0, 6.0]


def test_use_is_recorded_where_it_changes():
    network = Network({"a": STEADY})
    drain(network, [(1.0, "x", ["a"], 100.0), (5.0, "y", ["a"], 100.0)])
    assert list(zip(network.use["a"].times_s, network.use["a"].rates, strict=True)) == [
        (0.0, 0.0),
        (1.0, 100.0),
        (2.0, 0.0),
        (5.0, 100.0),
        (6.0, 0.0),
    ]


curves = st.lists(st.integers(0, 50), min_size=1, max_size=5).map(
    lambda rates: BandwidthCurve(
        tuple(map(float, range(len(rates)))), (*map(float, rates[:-1]), rates[-1] + 1.0)
    )
)
paths = st.sampled_from([("a",), ("b",), ("a", "b"), ("b", "c"), ("a", "b", "c")])
flows = st.lists(st.tuples(st.integers(0, 40), paths, st.integers(0, 300)), max_size=8)


@given(st.fixed_dictionaries({"a": curves, "b": curves, "c": curves}), flows)
def test_bytes_are_conserved_and_no_link_carries_more_than_it_can(links, flows):
    starts = [(at / 10, nth, path, float(size)) for nth, (at, path, size) in enumerate(flows)]
    network = Network(links)
    ends = drain(network, starts)
    assert ends.keys() == {nth for _, nth, _, _ in starts}
    for name, curve in links.items():
        through = [start for start in starts if name in start[2]]
        total = sum(size for _, _, _, size in through)
        assert network.bytes_moved[name] == pytest.approx(total)
        if through:
            first, last = min(s[0] for s in through), max(ends[s[1]] for s in through)
            assert total <= curve.moved_bytes(first, last) * (1 + 1e-9) + 1e-6


@given(curves, st.lists(st.tuples(st.integers(0, 20), st.integers(1, 300)), min_size=1, max_size=7))
def test_one_link_is_busy_until_the_integral_of_its_bandwidth_is_used_up(curve, sizes):
    """Work is conserved: while anything is there, the link moves all that it can."""
    starts = [(at / 10, nth, ("a",), float(size)) for nth, (at, size) in enumerate(sizes)]
    ends = drain(Network({"a": curve}), starts)
    now, expected = 0.0, 0.0
    for at, _, _, size in sorted(starts):
        now = max(now, at)
        now = expected = curve.end_s(now, size)
    assert max(ends.values()) == pytest.approx(expected)


@given(curves, flows, st.randoms(use_true_random=False))
def test_the_order_of_equal_starts_does_not_matter(curve, flows, random):
    starts = [(0.0, nth, path, float(size)) for nth, (_, path, size) in enumerate(flows)]
    links = {"a": curve, "b": STEADY, "c": curve}
    one = drain(Network(links), starts)
    shuffled = starts.copy()
    random.shuffle(shuffled)
    other = drain(Network(links), shuffled)
    assert one == pytest.approx(other)
