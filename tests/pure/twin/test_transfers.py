import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostroke.clock import VirtualClock
from twostroke.connector import layout
from twostroke.connector.layout import record_of
from twostroke.cost import BandwidthCurve
from twostroke.kv.sizing import KvLayout
from twostroke.kv_messages import KvCommands, KvEndpoint, KvLoad, KvTicket
from twostroke.twin.transfers import Fabric, Link, volume

LINK = Link(bandwidth=BandwidthCurve((0.0,), (1e6,)), base_s=0.5)
TID = bytes(16)


def kv(tp=1, block_size=16, heads=4):
    return KvLayout(
        num_layers=2,
        num_kv_heads=heads,
        head_dim=8,
        block_size=block_size,
        tensor_parallel_size=tp,
    )


def endpoint(name, shape):
    record = record_of(shape, 1000, "m")
    return KvEndpoint(engine_id=name, transport="twin", addresses=[""], layout=record)


def load_of(source, blocks, ours, *, num_tokens, first=0, load_id=1, is_last=True):
    ticket = KvTicket(
        transfer_id=TID,
        endpoint=source,
        lease_slot=3,
        num_tokens=num_tokens,
        block_ids=np.array(blocks, np.int32),
    )
    return KvLoad(
        load_id=load_id,
        ticket=ticket,
        first_token=first,
        block_ids=np.array(ours, np.int32),
        is_last=is_last,
    )


class Pair:
    """P, and D that reads from it."""

    def __init__(self, link=LINK):
        self.clock = VirtualClock()
        self.fabric = Fabric(link)
        self.source = endpoint("p", kv())
        self.p = self.fabric.add(0, self.source, self.clock.now)
        self.d = self.fabric.add(1, endpoint("d", kv()), self.clock.now)
        self.p.apply(KvCommands(leases=[(3, TID)]))

    def run(self, until_s=1e9):
        return self.d.report().loads if self.run_until_told(until_s) else []

    def run_until_told(self, until_s=1e9):
        """Until somebody has something to report; who."""
        while (next_s := self.fabric.network.next_event_s()) <= until_s:
            self.clock.advance_to(next_s)
            if told := self.fabric.advance(next_s):
                return told
        return []


def test_a_load_takes_what_the_link_takes():
    pair = Pair()
    pair.d.apply(KvCommands(loads=[load_of(pair.source, [5, 6], [1, 2], num_tokens=32)]))
    assert pair.d.is_busy
    num_bytes = 32 * kv().token_bytes
    (end,) = pair.run()
    assert (end.load_id, end.num_bytes, end.num_messages, end.error) == (1, num_bytes, 1, "")
    assert end.ended_s == pytest.approx(0.5 + num_bytes / 1e6)
    assert not pair.d.is_busy


def test_messages_cost_time_before_the_bytes_or_beside_them():
    blocks, ours = [5, 7], [1, 2]  # not adjacent there: two messages
    num_bytes = 32 * kv().token_bytes
    for pipelined, expected_s in ((False, 2 + num_bytes / 1e6), (True, max(2, num_bytes / 1e6))):
        link = Link(bandwidth=BandwidthCurve((0.0,), (1e6,)), message_s=1.0, pipelined=pipelined)
        pair = Pair(link)
        pair.d.apply(KvCommands(loads=[load_of(pair.source, blocks, ours, num_tokens=32)]))
        (end,) = pair.run()
        assert end.num_messages == 2
        assert end.ended_s == pytest.approx(expected_s)


def test_a_load_whose_lease_ended_meanwhile_has_failed():
    pair = Pair()
    pair.d.apply(KvCommands(loads=[load_of(pair.source, [5], [1], num_tokens=16)]))
    pair.p.apply(KvCommands(leases=[(3, b"")]))
    (end,) = pair.run()
    assert "lease" in end.error


def test_a_stream_whose_lease_ended_fails_once_at_the_time_of_its_first_piece():
    """Two pieces arrive at once, at an engine whose clock is behind: it cruises."""
    pair = Pair()
    behind = VirtualClock()
    d = pair.fabric.add(2, endpoint("d2", kv()), behind.now)
    both, only = [5, 6], [1, 2]
    pieces = [
        load_of(pair.source, both[:1], only[:1], num_tokens=16, is_last=False),
        load_of(pair.source, both, only, num_tokens=32, first=16),
    ]
    d.apply(KvCommands(loads=pieces))
    pair.p.apply(KvCommands(leases=[(3, b"")]))
    assert pair.run_until_told() == [d]
    (end,) = d.report().loads
    assert "lease" in end.error
    assert end.ended_s == pytest.approx(0.5 + 32 * kv().token_bytes / 1e6)
    assert not d.is_busy
    assert len(pair.fabric.network) == 0


def test_a_load_given_up_ends_at_once_and_leaves_the_link():
    pair = Pair()
    pair.d.apply(KvCommands(loads=[load_of(pair.source, [5], [1], num_tokens=16)]))
    pair.d.apply(KvCommands(given_up=[1, 99]))
    ends = pair.d.report().loads
    assert [(end.load_id, bool(end.error)) for end in ends] == [(1, True), (99, True)]
    assert pair.run() == []


def test_a_stream_ends_with_its_last_piece():
    pair = Pair()
    pieces = [
        load_of(pair.source, [5], [1, 2], num_tokens=16, is_last=False),
        load_of(pair.source, [5, 6], [1, 2], num_tokens=32, first=16),
    ]
    pair.d.apply(KvCommands(loads=pieces[:1]))
    assert pair.run(until_s=100.0) == []
    pair.d.apply(KvCommands(loads=pieces[1:]))
    (end,) = pair.run()
    assert end.num_bytes == 32 * kv().token_bytes
    assert end.num_messages == 2


def test_an_engine_that_is_gone_ends_what_is_read_from_it():
    pair = Pair()
    pair.d.apply(KvCommands(loads=[load_of(pair.source, [5], [1], num_tokens=16)]))
    pair.d.apply(KvCommands(disconnects=["p"]))
    (end,) = pair.d.report().loads
    assert "gone" in end.error
    pair.d.apply(KvCommands(loads=[load_of(endpoint("x", kv()), [5], [1], num_tokens=16)]))
    (end,) = pair.d.report().loads
    assert "gone" in end.error


def test_handshakes_tell_what_the_link_is_or_why_there_is_none():
    pair = Pair()
    pair.d.apply(KvCommands(connects=[pair.source, endpoint("x", kv(heads=2))]))
    good, bad = pair.d.report().links
    assert (good.engine_id, good.base_s, good.bytes_per_s, good.error) == ("p", 0.5, 1e6, "")
    assert "KV heads differ" in bad.error


ids = st.lists(st.integers(1, 60), min_size=12, max_size=12, unique=True).map(
    lambda them: sorted(them) if them[0] % 2 else them
)


@given(ids, ids, st.integers(1, 192), st.integers(0, 191), st.sampled_from([1, 2, 4, 8]))
def test_volumes_are_those_of_the_pieces(theirs, ours, num_tokens, first, tp):
    shape = kv(tp)
    record = record_of(shape, 100, "m")
    source = KvEndpoint(engine_id="p", transport="twin", addresses=[""], layout=record)
    load = load_of(source, theirs, ours, num_tokens=num_tokens, first=min(first, num_tokens))
    rows = list(layout.pieces(record, record, 0, load).values())
    num_bytes = sum(int(pieces[:, 2].sum()) for pieces in rows) * tp
    expected = (num_bytes, sum(map(len, rows)))
    if load.first_token % 16 == 0:  # else a first piece is less than a block
        assert volume(record, record, load) == expected


def test_other_layouts_need_more_pieces():
    load = load_of(endpoint("p", kv(1)), [5, 6], [1, 2], num_tokens=32)
    theirs, ours = record_of(kv(1), 100, "m"), record_of(kv(2), 100, "m")
    num_bytes, messages = volume(theirs, ours, load)
    assert num_bytes == 32 * kv(1).token_bytes
    assert messages == 2 * 2 * 2  # blocks, layers, keys and values
