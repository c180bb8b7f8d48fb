"""A link is measured as what it is, also through a transport with limits or from a tiny pool."""

from types import SimpleNamespace

import numpy as np
import pytest

from twostroke.arrays import Int64s
from twostroke.connector import links
from twostroke.connector.base import KvMemory
from twostroke.connector.layout import pool_bytes, record_of
from twostroke.connector.links import SCRATCH_BYTES, measure_link
from twostroke.kv.sizing import KvLayout
from twostroke.kv_messages import KvEndpoint, KvLink

LAYOUT = KvLayout(num_layers=4, num_kv_heads=2, head_dim=64)


class TimedPeer:
    """Takes as long as it says, on a clock of its own; much longer where it was not read before."""

    def __init__(self, base_s: float, message_s: float, bytes_per_s: float) -> None:
        self.now_s = 0.0
        self.costs = (base_s, message_s, 1 / bytes_per_s)
        self.reads: list[Int64s] = []
        self._touched: set[int] = set()

    def read(self, rows: Int64s) -> None:
        base_s, message_s, byte_s = self.costs
        seconds = base_s + len(rows) * message_s + int(rows[:, 2].sum()) * byte_s
        self.now_s += seconds * (1 if rows[-1, 1] in self._touched else 9)
        self._touched.add(int(rows[-1, 1]))
        self.reads.append(rows)


def measured(
    peer: TimedPeer,
    monkeypatch: pytest.MonkeyPatch,
    *,
    num_blocks: int = 2000,
    max_pieces: int = 1000,
    max_piece_bytes: int = 1 << 30,
) -> KvLink:
    layout = record_of(LAYOUT, num_blocks, "model")
    endpoint = KvEndpoint(engine_id="p", transport="shm", addresses=[], layout=layout)
    memory = KvMemory(0, 1 << 20, SCRATCH_BYTES, np.zeros((0, 16), np.uint8))
    limits = SimpleNamespace(max_pieces=max_pieces, max_piece_bytes=max_piece_bytes)
    monkeypatch.setattr(links.time, "perf_counter", lambda: peer.now_s)
    link = measure_link(endpoint, peer, memory, limits)
    for rows in peer.reads:
        assert (rows[:, 2] <= max_piece_bytes).all()
        assert len(rows) <= max_pieces
        assert (rows >= 0).all()
        assert (rows[:, 0] + rows[:, 2] <= pool_bytes(layout)).all()
        assert (rows[:, 1] >= memory.pool_bytes).all()
        assert (rows[:, 1] + rows[:, 2] <= memory.pool_bytes + memory.scratch_bytes).all()
    return link


def test_base_messages_and_rate_are_told_apart(monkeypatch):
    link = measured(TimedPeer(2e-4, 1e-5, 2e9), monkeypatch)
    assert link.engine_id == "p"
    assert link.base_s == pytest.approx(2e-4, rel=0.01)
    assert link.message_s == pytest.approx(1e-5, rel=0.01)
    assert link.bytes_per_s == pytest.approx(2e9, rel=0.01)


def test_a_transport_that_takes_less_at_once(monkeypatch):
    peer = TimedPeer(2e-4, 1e-5, 2e9)
    link = measured(peer, monkeypatch, max_pieces=16, max_piece_bytes=1 << 18)
    assert link.bytes_per_s == pytest.approx(2e9, rel=0.1)


def test_a_tiny_pool_is_read_as_far_as_it_goes(monkeypatch):
    link = measured(TimedPeer(1e-4, 0, 1e9), monkeypatch, num_blocks=2)
    assert 0 < link.bytes_per_s < 2e9


def test_reads_that_take_no_time_give_a_rate(monkeypatch):
    link = measured(TimedPeer(0, 0, float("inf")), monkeypatch)
    assert link.bytes_per_s > 1e12
    assert not link.error
