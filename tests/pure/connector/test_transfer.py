"""The threads of `TransferWorker` against a transport that does what the test says."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from tests.pure.connector.test_layout import load_of, record
from twostroke.arrays import Int64s
from twostroke.clock import VirtualClock
from twostroke.connector import transfer
from twostroke.connector.base import KvMemory, TransferError
from twostroke.connector.layout import pool_bytes
from twostroke.connector.transfer import GIVEN_UP, RankReports, TransferWorker
from twostroke.kv_messages import (
    LEASE_ENDED,
    KvCommands,
    KvEndpoint,
    KvLayoutRecord,
    KvLink,
    KvLoad,
    KvLoadEnd,
    KvReport,
)

TIMEOUT_S = 10
WORD = bytes(range(16))


@dataclass
class Engine:
    """A remote rank's memory, and what happens to whoever reads it."""

    memory: np.ndarray
    leases: np.ndarray
    on_connect: Callable[[], object] = lambda: None
    on_read: Callable[[int], object] = lambda number: None  # called before the data is copied
    after_read: Callable[[int], object] = lambda number: None
    on_close: Callable[[], object] = lambda: None
    num_reads: int = 0
    num_open: int = 0
    batches: list[Int64s] = field(default_factory=list)


class FakePeer:
    def __init__(self, engine: Engine, target: np.ndarray) -> None:
        self.engine, self.target = engine, target
        self.is_open = True
        engine.num_open += 1

    def read(self, pieces: Int64s) -> None:
        engine = self.engine
        if pieces[0, 1] >= self.target.nbytes - SCRATCH:  # it measures the link
            return
        engine.num_reads += 1
        number = engine.num_reads
        engine.on_read(number)
        engine.batches.append(pieces)
        for start, to, size in pieces.tolist():
            self.target[to : to + size] = engine.memory[start : start + size]
        engine.after_read(number)

    def lease(self, slot: int) -> bytes:
        return self.engine.leases[slot].tobytes()

    def close(self) -> None:
        self.engine.num_open -= self.is_open
        self.is_open = False
        self.engine.on_close()


SCRATCH = 4096


class FakeTransport:
    name = "fake"
    max_pieces = 4
    max_piece_bytes = 1 << 20

    def __init__(self, engines: dict[str, Engine]) -> None:
        self.engines = engines
        self.is_open = False

    def open(self, memory: KvMemory, layout: KvLayoutRecord, engine_id: str) -> str:
        self.is_open = True
        return engine_id

    def connect(self, address: str, engine_id: str) -> FakePeer:
        engine = self.engines[address]
        engine.on_connect()
        return FakePeer(engine, self.target)

    def close(self) -> None:
        self.is_open = False


class World:
    """One reader and the engines it reads from."""

    def __init__(self, layout: KvLayoutRecord | None = None, **engines: KvLayoutRecord) -> None:
        self.layout = layout or record()
        self.layouts = engines or {"p": record()}
        self.engines = {}
        for name, theirs in self.layouts.items():
            for rank in range(theirs.tensor_parallel_size):
                memory = np.random.default_rng(rank).integers(0, 255, pool_bytes(theirs), np.uint8)
                leases = np.tile(np.frombuffer(WORD, np.uint8), (theirs.num_blocks, 1))
                self.engines[f"{name}{rank}"] = Engine(memory, leases)
        self.transport = FakeTransport(self.engines)
        size = pool_bytes(self.layout)
        self.pool = np.zeros(size + SCRATCH, np.uint8)
        self.transport.target = self.pool
        memory = KvMemory(
            address=0,
            pool_bytes=size,
            scratch_bytes=SCRATCH,
            leases=np.zeros((self.layout.num_blocks, 16), np.uint8),
        )
        self.memory = memory
        self.clock = VirtualClock(100.0)
        self.worker = TransferWorker(
            self.transport, memory, self.layout, engine_id="d", clock=self.clock
        )
        self.gates: list[Gate] = []

    def gate(self) -> "Gate":
        self.gates.append(Gate())
        return self.gates[-1]

    def close(self) -> None:
        """End its threads, wherever they are."""
        for engine in self.engines.values():
            engine.on_read = engine.on_connect = lambda *_: None
        for gate in self.gates:
            gate.open()
        self.worker.shutdown()
        assert all([remote.join() for remote in self.worker._leaving])

    def endpoint(self, name: str = "p", **changes: object) -> KvEndpoint:
        layout = self.layouts[name]
        addresses = [f"{name}{rank}" for rank in range(layout.tensor_parallel_size)]
        fields = {"engine_id": name, "transport": "fake", "addresses": addresses, "layout": layout}
        return KvEndpoint(**(fields | changes))

    def load(
        self,
        load_id: int = 0,
        first: int = 0,
        end: int = 8,
        name: str = "p",
        endpoint: KvEndpoint | None = None,
        is_last: bool = True,
    ) -> KvLoad:
        load = load_of(self.layouts[name], self.layout, first, end, seed=5, load_id=load_id)
        load.is_last = is_last
        load.ticket = type(load.ticket)(
            transfer_id=WORD,
            endpoint=endpoint or self.endpoint(name),
            lease_slot=3,
            num_tokens=end,
            block_ids=load.ticket.block_ids,
        )
        return load

    def apply(self, **commands: list) -> None:
        self.worker.apply(KvCommands(**commands))

    def reports(self, num_loads: int = 0, num_links: int = 0) -> KvReport:
        """What is reported until there are that many of each."""
        every = KvReport()
        while len(every.loads) < num_loads or len(every.links) < num_links:
            self.worker.wait(TIMEOUT_S)
            report = self.worker.report()
            assert report is not None, "nothing is reported"
            every.loads += report.loads
            every.links += report.links
        return every

    def loads(self, number: int = 1) -> list[KvLoadEnd]:
        return self.reports(number).loads

    def is_loaded(self, load: KvLoad) -> bool:
        """Whether our blocks hold what theirs do (one rank and equal blocks only)."""
        block = pool_bytes(self.layout) // self.layout.num_blocks
        theirs = self.engines["p0"].memory.reshape(-1, block)[load.ticket.block_ids]
        ours = self.pool[: pool_bytes(self.layout)].reshape(-1, block)[load.block_ids]
        return bool((theirs == ours).all())


class Gate:
    """Stops a thread until the test opens it."""

    def __init__(self) -> None:
        self.reached, self._opened = threading.Event(), threading.Event()

    def __call__(self, *_: object) -> None:
        self.reached.set()
        assert self._opened.wait(TIMEOUT_S)

    def wait(self) -> None:
        assert self.reached.wait(TIMEOUT_S)

    def open(self) -> None:
        self._opened.set()


def kv_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("kv-")}


@pytest.fixture
def new_world():
    """Makes worlds; ends their threads also where the test fails, lest others find them."""
    before, worlds = kv_threads(), []

    def new(**engines: KvLayoutRecord) -> World:
        worlds.append(World(**engines))
        return worlds[-1]

    yield new
    for world in worlds:
        world.close()
    assert kv_threads() <= before
    assert all(engine.num_open == 0 for world in worlds for engine in world.engines.values())


@pytest.fixture
def world(new_world):
    world = new_world()
    yield world
    world.close()
    assert not world.transport.is_open


def fail(text: str) -> Callable[..., None]:
    def raise_it(*_: object) -> None:
        raise TransferError(text)

    return raise_it


def test_a_load_is_read_checked_and_reported(world: World):
    load = world.load()
    world.apply(loads=[load])
    report = world.reports(1, 1)
    (end,) = report.loads
    assert end == KvLoadEnd(
        load_id=0,
        num_bytes=2 * pool_bytes(world.layout) // world.layout.num_blocks,
        num_messages=sum(map(len, world.engines["p0"].batches)),
        started_s=100.0,
        ended_s=100.0,
        reads=[(100.0, 100.0, end.num_bytes)],
    )
    assert world.is_loaded(load)
    (link,) = report.links
    assert link.engine_id == "p"
    assert link.bytes_per_s > 0
    assert not link.error
    assert world.worker.report() is None
    assert world.worker.endpoint.addresses == ["d"]


def test_reads_come_in_batches_that_a_transport_takes(world: World):
    world.transport.max_piece_bytes = 8
    load = world.load()
    world.apply(loads=[load])
    assert not world.loads()[0].error
    assert world.is_loaded(load)
    batches = world.engines["p0"].batches
    assert max(map(len, batches)) == world.transport.max_pieces
    assert max(int(rows[:, 2].max()) for rows in batches) == 8


def test_lease_words_are_set_and_cleared(world: World):
    world.apply(leases=[(2, WORD), (4, WORD)])
    assert world.memory.leases[2].tobytes() == world.memory.leases[4].tobytes() == WORD
    world.apply(leases=[(2, b"")])
    assert not world.memory.leases[2].any()
    assert world.memory.leases[4].any()


def test_data_and_words_are_fenced_from_each_other(world: World):
    """Not to be seen on x86, which keeps their order: that the fence is where it must be."""
    seen, engine = [], world.engines["p0"]

    def fence() -> None:
        seen.append((engine.num_reads, world.memory.leases[2].any()))
        engine.leases[3] = 0  # too late for a word that was looked at before

    world.worker.fence = fence
    world.apply(leases=[(2, WORD)])
    assert seen == [(0, True)], "after the words that a step sets"
    world.worker.fence = lambda: None
    world.apply(connects=[world.endpoint()])
    world.reports(num_links=1)
    engine.leases[:] = list(WORD)
    engine.after_read = lambda _: setattr(world.worker, "fence", fence)
    world.apply(loads=[world.load()])
    assert world.loads()[0].error == LEASE_ENDED, "after the data, before its word"


def test_a_lease_that_ends_during_the_read_fails_the_load(world: World):
    engine = world.engines["p0"]
    engine.after_read = lambda _: engine.leases[3].fill(0)
    world.apply(loads=[world.load()])
    assert world.loads()[0].error == LEASE_ENDED
    # The engine is not to blame.
    engine.after_read = lambda _: engine.leases[3].__setitem__(slice(None), list(WORD))
    world.apply(loads=[world.load(1)])
    assert not world.loads()[0].error


def test_every_rank_is_read_before_any_lease_counts(new_world):
    world = new_world(p=record(tensor_parallel_size=2))
    world.engines["p1"].leases[3] = 0
    world.apply(loads=[world.load()])
    assert world.loads()[0].error == LEASE_ENDED
    assert {name: engine.num_reads > 0 for name, engine in world.engines.items()} == {
        "p0": True,
        "p1": True,
    }


def test_loads_are_read_in_order_and_engines_side_by_side(new_world):
    world = new_world(p=record(), q=record())
    gate = world.gate()
    world.engines["p0"].on_read = gate
    world.apply(loads=[world.load(0), world.load(1), world.load(2, name="q")])
    assert [end.load_id for end in world.reports(1, 2).loads] == [2]
    gate.wait()
    world.worker.wait(0.01)
    assert world.worker.report() is None
    gate.open()
    assert [end.load_id for end in world.loads(2)] == [0, 1]


def test_a_stream_is_over_with_its_last_piece(world: World):
    pieces = [world.load(0, 0, 4, is_last=False), world.load(0, 4, 8, is_last=False)]
    world.apply(loads=pieces)
    world.reports(num_links=1)
    world.worker.wait(TIMEOUT_S)  # until nothing is under way
    assert world.worker.report() is None
    world.apply(loads=[world.load(0, 8, 12)])
    (end,) = world.loads()
    assert not end.error
    assert world.is_loaded(world.load(0, 0, 12))


def test_a_stream_without_a_piece_can_be_given_up(world: World):
    world.apply(given_up=[7])
    assert [(end.load_id, end.error) for end in world.loads()] == [(7, GIVEN_UP)]
    world.apply(given_up=[7], loads=[world.load(7)])
    assert [(end.load_id, end.error) for end in world.loads()] == [(7, GIVEN_UP)], "asked again"
    assert not world.engines["p0"].num_reads


def test_given_up_while_it_is_read(world: World):
    gate = world.gate()
    world.engines["p0"].on_read = gate
    world.transport.max_pieces = 1
    world.transport.max_piece_bytes = 8
    world.apply(loads=[world.load()])
    gate.wait()
    world.reports(num_links=1)
    world.apply(given_up=[0])
    world.worker.wait(0.01)
    assert world.worker.report() is None, "its read is under way"
    gate.open()
    assert [end.error for end in world.loads()] == [GIVEN_UP]
    assert world.engines["p0"].num_reads == 1, "no further read is begun"


def test_given_up_before_it_is_read_is_told_at_once(world: World):
    gate = world.gate()
    world.engines["p0"].on_read = gate
    world.apply(loads=[world.load(0), world.load(1), world.load(2)])
    gate.wait()
    world.apply(given_up=[1])
    assert [end.load_id for end in world.loads()] == [1]
    gate.open()
    assert [(end.load_id, end.error) for end in world.loads(2)] == [(0, ""), (2, "")]


def test_pieces_of_a_failed_stream_are_dropped(world: World):
    engine = world.engines["p0"]
    engine.leases[:] = 0
    world.apply(loads=[world.load(0, 0, 4, is_last=False)])
    assert world.loads()[0].error == LEASE_ENDED
    num_reads = engine.num_reads
    # It was sent before the failure was known; its blocks may be another's now.
    world.apply(loads=[world.load(0, 4, 8)])
    world.worker.wait(TIMEOUT_S)
    assert world.worker.report() is None
    assert engine.num_reads == num_reads


def test_a_broken_connection_is_made_anew_once(world: World):
    engine = world.engines["p0"]
    engine.on_read = lambda number: number == 1 and fail("it hung up")()
    load = world.load()
    world.apply(loads=[load])
    report = world.reports(1, 2)
    assert not report.loads[0].error
    assert world.is_loaded(load)


def test_an_engine_that_fails_again_is_left_alone_for_longer_each_time(world: World):
    engine = world.engines["p0"]
    engine.on_read = fail("it hung up")
    world.apply(loads=[world.load(0)])
    assert world.loads()[0].error == "it hung up"
    for load_id, pause_s in ((1, 0.5), (3, 1.0), (5, 2.0)):
        num_reads = engine.num_reads
        world.apply(loads=[world.load(load_id)])
        assert world.loads()[0].error == "it hung up"
        assert engine.num_reads == num_reads, "it is left alone"
        world.clock.advance_to(world.clock.now() + pause_s)
        world.apply(loads=[world.load(load_id + 1)])
        assert world.loads()[0].error == "it hung up"
        assert engine.num_reads == num_reads + 2
    engine.on_read = lambda _: None
    world.clock.advance_to(world.clock.now() + 4)
    world.apply(loads=[world.load(200)])
    assert not world.loads()[0].error


def test_a_failed_handshake_fails_what_waits_for_it(world: World):
    gate = world.gate()

    def refuse() -> None:
        gate()
        fail("refused")()

    world.engines["p0"].on_connect = refuse
    world.apply(loads=[world.load(0), world.load(1)])
    gate.wait()
    world.apply(given_up=[1])
    assert [end.error for end in world.loads()] == [GIVEN_UP], "also while shaking hands"
    gate.open()
    assert [end.error for end in world.loads()] == ["refused"]
    for _ in range(2):  # who asks is told, though nothing is tried so soon
        world.apply(connects=[world.endpoint()])
        assert [link.error for link in world.reports(num_links=1).links] == ["refused"]
    world.clock.advance_to(200)
    world.engines["p0"].on_connect = lambda: None
    for _ in range(2):
        world.apply(connects=[world.endpoint()])
        (link,) = world.reports(num_links=1).links
        assert not link.error
        assert link.bytes_per_s > 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layout": record(dtype="float32")}, "types of KV differ: float32 there, float16 here"),
        ({"transport": "nixl"}, "it is read by nixl, and we read by fake"),
        ({"addresses": []}, "0 addresses of 1 ranks"),
    ],
)
def test_a_pair_that_cannot_work_is_refused(world: World, changes: dict, words: str):
    endpoint = world.endpoint(**changes)
    world.apply(connects=[endpoint])
    assert [link.error for link in world.reports(num_links=1).links] == [words]
    world.apply(loads=[world.load(endpoint=endpoint)])
    assert world.loads()[0].error == words


def test_a_ticket_that_contradicts_the_layout_fails_alone(world: World):
    bad = world.load(0)
    bad.block_ids = bad.block_ids[:1]
    good = world.load(1)
    world.apply(loads=[bad, good])
    ends = world.loads(2)
    assert [end.error for end in ends] == ["8 tokens in 1 blocks of 4 here", ""]
    assert world.is_loaded(good)


def test_what_is_not_foreseen_fails_the_load_only(world: World, caplog):
    engine = world.engines["p0"]
    engine.on_read = lambda number: 1 / 0
    world.apply(loads=[world.load(0)])
    assert world.loads()[0].error == "ZeroDivisionError: division by zero"
    assert "reading from engine p failed" in caplog.text
    engine.on_read = lambda number: None
    world.clock.advance_to(101)
    world.apply(loads=[world.load(1)])
    assert not world.loads()[0].error


def test_disconnected_its_loads_fail_and_a_read_ends_first(world: World):
    gate = world.gate()
    world.engines["p0"].on_read = gate
    world.apply(loads=[world.load(0), world.load(1)])
    gate.wait()
    world.apply(disconnects=["p", "unknown"])
    assert [(end.load_id, end.error) for end in world.loads()] == [(1, "its engine is gone")]
    gate.open()
    assert [(end.load_id, end.error) for end in world.loads()] == [(0, "its engine is gone")]
    world.apply(loads=[world.load(2)])  # back again
    assert not world.loads()[0].error


def test_a_read_that_hangs_ends_when_its_engine_is_disconnected(world: World):
    gate = world.gate()

    def hang(_: int) -> None:
        gate()
        fail("the connection was closed")()

    engine = world.engines["p0"]
    engine.on_read, engine.on_close = hang, gate.open
    world.apply(loads=[world.load(0)])
    gate.wait()
    world.apply(given_up=[0])
    world.apply(disconnects=["p"])
    assert [(end.load_id, end.error) for end in world.loads()] == [(0, "its engine is gone")]
    assert engine.num_reads == 1


def test_an_engine_that_took_over_an_address_replaces_the_one_before(world: World):
    world.apply(loads=[world.load(0)])
    assert not world.loads()[0].error
    reborn = world.endpoint(engine_id="p reborn")
    world.apply(connects=[reborn], loads=[world.load(1, endpoint=reborn)])
    assert not world.loads()[0].error
    with world.worker.lock:
        assert list(world.worker._remotes) == ["p reborn"]


def test_nothing_to_read_is_a_load_too(world: World):
    world.apply(loads=[world.load(0, 8, 8)])
    (end,) = world.loads()
    assert (end.error, end.num_bytes) == ("", 0)


def test_what_is_remembered_of_ended_loads_is_bounded(world: World, monkeypatch):
    monkeypatch.setattr(transfer, "_REMEMBERED", 3)
    world.apply(given_up=list(range(9)))
    assert len(world.worker._ended) == 3


def test_shutdown_leaves_a_hung_read_alone(new_world):
    world = new_world()
    gate = world.gate()
    world.engines["p0"].on_read = gate
    world.apply(loads=[world.load()])
    gate.wait()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfer, "_JOIN_S", 0.01)
        world.worker.shutdown()
        world.worker.shutdown()
    assert world.transport.is_open, "the read may still use the memory"


# ---------------------------------------------------------------- several ranks


def end_of(load_id: int, error: str = "", at_s: float = 1.0) -> KvReport:
    return KvReport(
        loads=[
            KvLoadEnd(
                load_id=load_id,
                num_bytes=10,
                num_messages=2,
                started_s=at_s,
                ended_s=at_s + 1,
                error=error,
            )
        ]
    )


def test_a_load_is_over_when_it_is_on_all_ranks():
    ranks = RankReports(3)
    assert ranks.merge([end_of(1, at_s=3.0), None, end_of(1)]) is None
    assert ranks.merge([None, None, end_of(1)]) is None, "said twice"
    merged = ranks.merge([None, end_of(1, "no"), None])
    assert merged == KvReport(
        loads=[
            KvLoadEnd(
                load_id=1, num_bytes=30, num_messages=6, started_s=1.0, ended_s=4.0, error="no"
            )
        ]
    )
    assert ranks.merge([None, None, None]) is None


def test_a_link_is_what_all_ranks_get_together():
    ranks = RankReports(2)
    first = KvLink(engine_id="p", base_s=1.0, message_s=0.5, bytes_per_s=8.0, pipelined=True)
    second = KvLink(engine_id="p", base_s=2.0, message_s=0.25, bytes_per_s=6.0)
    assert ranks.merge([KvReport(links=[first]), None]) is None
    merged = ranks.merge([None, KvReport(links=[second])])
    assert merged.links == [KvLink(engine_id="p", base_s=2.0, message_s=0.25, bytes_per_s=12.0)]
    bad = KvLink(engine_id="p", error="gone")
    assert ranks.merge([KvReport(links=[bad]), None]).links[0].error == "gone"
