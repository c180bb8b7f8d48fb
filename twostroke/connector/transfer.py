"""The worker's half of a hand-off: reads other engines' KV in threads of its own.

    worker thread   apply(commands) ──▶ queue of engine A ──▶ thread A: shake hands, measure, read
                                    └─▶ queue of engine B ──▶ thread B:  ...
                    report() ◀── ends of loads, links

One thread an engine, so that one that is slow, hung or dead keeps nobody else waiting. A thread
reads a load piece by piece, rank by rank, and looks at the lease words of all ranks it read from
after the data of each piece: only then is it known to be what the ticket promised. A load is
reported once, when no read of it is under way, and what arrives for it later is dropped: its blocks
may be another's by then.

A connection that breaks is made anew once; after that the engine is left alone for a while, longer
each time, and loads from it fail at once.
"""

import logging
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from twostroke.arrays import Int64s
from twostroke.clock import Clock, WallClock
from twostroke.connector.base import KvMemory, Peer, TransferError, Transport
from twostroke.connector.layout import TicketError, check, pieces, sources, split
from twostroke.connector.links import measure_link
from twostroke.kv_messages import (
    LEASE_ENDED,
    TRANSFER_ID_BYTES,
    KvCommands,
    KvEndpoint,
    KvLayoutRecord,
    KvLink,
    KvLoad,
    KvLoadEnd,
    KvReport,
)

logger = logging.getLogger("twostroke.transfer")

BATCH_BYTES = 64 << 20  # read between two looks at whether a load was given up
BACK_OFF_S, MAX_BACK_OFF_S = 0.5, 30.0

GIVEN_UP = "given up"

_NO_LEASE = bytes(TRANSFER_ID_BYTES)
# Ended loads that are remembered. What can arrive late was sent a step or two before the end.
_REMEMBERED = 4096
_JOIN_S = 2.0


@dataclass(eq=False)
class _Load:
    """A load that is not over."""

    remote: "_Remote"
    end: KvLoadEnd
    pieces: deque[KvLoad] = field(default_factory=deque)  # not begun
    reading: bool = False
    is_second_try: bool = False
    given_up: str = ""  # why


class TransferWorker:
    """Implements `connector.base.KvConnectorWorker` for one rank, over a transport.

    `layout` describes our pool, of which `memory` is rank `rank`'s. Raises ConfigError when the
    transport does not work on this machine.
    """

    def __init__(
        self,
        transport: Transport,
        memory: KvMemory,
        layout: KvLayoutRecord,
        *,
        engine_id: str,
        rank: int = 0,
        clock: Clock | None = None,
    ) -> None:
        from twostroke.connector.memory_order import fence  # here, because numba is there

        self.transport, self.memory, self.layout, self.rank = transport, memory, layout, rank
        self.fence = fence
        self.clock = clock or WallClock()
        self.lock = threading.Lock()  # of all that follows, and of the remotes' queues
        self.changed = threading.Condition(self.lock)
        self._remotes: dict[str, _Remote] = {}
        self._leaving: list[_Remote] = []
        self._loads: dict[int, _Load] = {}
        self._ended: dict[int, None] = {}  # in order
        self._report = KvReport()
        self._is_open = True
        address = transport.open(memory, layout, engine_id)
        self._endpoint = KvEndpoint(
            engine_id=engine_id, transport=transport.name, addresses=[address], layout=layout
        )

    # ------------------------------------------------------------ called by the worker

    @property
    def endpoint(self) -> KvEndpoint:
        return self._endpoint

    def apply(self, commands: KvCommands) -> None:
        for slot, word in commands.leases:
            self.memory.leases[slot] = np.frombuffer(word or _NO_LEASE, np.uint8)
        self.fence()  # whoever sees what this step writes into the blocks must see these words
        with self.lock:
            for load in commands.loads:
                self._add(load)
            for load_id in commands.given_up:
                self._give_up(load_id, GIVEN_UP)
            for endpoint in commands.connects:
                self._remote_of(endpoint).greet()
            for engine_id in commands.disconnects:
                self._drop(engine_id)

    def report(self) -> KvReport | None:
        with self.lock:
            if not (self._report.loads or self._report.links):
                return None
            report, self._report = self._report, KvReport()
            return report

    def wait(self, timeout_s: float) -> None:
        with self.lock:
            self.changed.wait_for(self._is_settled, timeout_s)

    def shutdown(self) -> None:
        with self.lock:
            if not self._is_open:
                return
            self._is_open = False
            for engine_id in list(self._remotes):
                self._drop(engine_id)
        # What hangs in spite of all still uses the memory; it ends with the process.
        if all([remote.join() for remote in self._leaving]):
            self.transport.close()

    # ------------------------------------------------------------ all below: with the lock

    def _is_settled(self) -> bool:
        if self._report.loads or self._report.links:
            return True
        under_way = any(load.reading or load.pieces for load in self._loads.values())
        return not (under_way or any(remote.is_connecting for remote in self._remotes.values()))

    def _add(self, piece: KvLoad) -> None:
        if piece.load_id in self._ended:
            return
        load = self._loads.get(piece.load_id)
        if load is None:
            remote = self._remote_of(piece.ticket.endpoint)
            load = self._loads[piece.load_id] = _Load(remote, KvLoadEnd(load_id=piece.load_id))
        load.pieces.append(piece)
        load.remote.enqueue(load)

    def _remote_of(self, endpoint: KvEndpoint) -> "_Remote":
        remote = self._remotes.get(endpoint.engine_id)
        if remote is None:
            # Whoever had these addresses before is gone.
            addresses = set(endpoint.addresses)
            for other in list(self._remotes.values()):
                if addresses & set(other.endpoint.addresses):
                    self._drop(other.endpoint.engine_id)
            self._leaving = [remote for remote in self._leaving if remote.is_alive]
            remote = self._remotes[endpoint.engine_id] = _Remote(self, endpoint)
        return remote

    def _give_up(self, load_id: int, why: str) -> None:
        load = self._loads.get(load_id)
        if load is not None:
            load.given_up = why
            load.remote.forget(load)
            if not load.reading:
                self.end(load, why)
        else:  # it has not begun, or its report was lost
            self._say_ended(KvLoadEnd(load_id=load_id, error=why))

    def _drop(self, engine_id: str) -> None:
        remote = self._remotes.pop(engine_id, None)
        if remote is not None:
            for load in [load for load in self._loads.values() if load.remote is remote]:
                self._give_up(load.end.load_id, "its engine is gone")
            remote.stop()
            self._leaving.append(remote)

    def end(self, load: _Load, error: str) -> None:
        """The load is over; no read of it is under way."""
        load.remote.forget(load)
        load.end.error = error
        load.end.ended_s = self.clock.now()
        load.end.started_s = load.end.started_s or load.end.ended_s
        del self._loads[load.end.load_id]
        self._say_ended(load.end)

    def _say_ended(self, end: KvLoadEnd) -> None:
        self._ended[end.load_id] = None
        if len(self._ended) > _REMEMBERED:
            del self._ended[next(iter(self._ended))]
        self._report.loads.append(end)
        self.changed.notify_all()

    def say_link(self, link: KvLink) -> None:
        """What a link is like, or why there is none; engines that were dropped are not told of."""
        if link.engine_id in self._remotes:
            self._report.links.append(link)
            self.changed.notify_all()


class _Remote:
    """Another engine, and the thread that reads from it."""

    def __init__(self, worker: TransferWorker, endpoint: KvEndpoint) -> None:
        self.endpoint = endpoint
        self.is_connecting = False
        self._worker = worker
        self._work = threading.Condition(worker.lock)
        self._queue: deque[_Load] = deque()  # an entry a piece
        self._stopping = False
        self._peers: dict[int, Peer] = {}
        self._link = KvLink(engine_id=endpoint.engine_id)
        self._num_troubles = 0
        self._retry_at_s = 0.0  # until then the engine is left alone, because of `_link.error`
        self.thread = threading.Thread(
            target=self._run, name=f"kv-{endpoint.engine_id[:8]}", daemon=True
        )
        self.thread.start()
        self._end: threading.Thread | None = None  # what hangs up once it is to stop

    # ------------------------------------------------------------ with the worker's lock

    def greet(self) -> None:
        """Shake hands, if that is not done, and say what the link is like."""
        self.is_connecting = True
        self._work.notify()

    def enqueue(self, load: _Load) -> None:
        self._queue.append(load)
        self._work.notify()

    def forget(self, load: _Load) -> None:
        """Begin no further piece of this load."""
        load.pieces.clear()
        self._queue = deque(other for other in self._queue if other is not load)

    def stop(self) -> None:
        """End the thread; a read that hangs ends with its connection."""
        self._stopping = True
        self._work.notify()
        self._end = threading.Thread(target=self._hang_up, name=self.thread.name, daemon=True)
        self._end.start()

    @property
    def is_alive(self) -> bool:
        return self.thread.is_alive() or (self._end is not None and self._end.is_alive())

    def join(self) -> bool:
        """Without the lock: whether it has ended, after a while."""
        self.thread.join(_JOIN_S)
        if self._end is not None:
            self._end.join(_JOIN_S)
        return not self.is_alive

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        while self._has_work():
            if self.is_connecting:
                self._greet()
            elif self._peers or self._connect():
                self._serve()
            else:
                with self._worker.lock:
                    for load in dict.fromkeys(self._queue):
                        self._worker.end(load, self._link.error)
        self._hang_up()

    def _has_work(self) -> bool:
        """Wait for something to do; False: no more will come."""
        with self._worker.lock:
            self._work.wait_for(lambda: self._queue or self.is_connecting or self._stopping)
            return not self._stopping

    def _greet(self) -> None:
        if self._peers or not self._connect():
            with self._worker.lock:
                self._worker.say_link(self._link)
        with self._worker.lock:
            self.is_connecting = False
            self._worker.changed.notify_all()

    def _connect(self) -> bool:
        """Shake hands with every rank that may be read from; False: see `_link.error`."""
        worker, endpoint = self._worker, self.endpoint
        if worker.clock.now() < self._retry_at_s:
            return False
        trouble = ""
        try:
            if problem := check(endpoint.layout, worker.layout):
                raise TransferError(problem)
            if endpoint.transport != worker.transport.name:
                raise TransferError(
                    f"it is read by {endpoint.transport}, and we read by {worker.transport.name}"
                )
            num_ranks = endpoint.layout.tensor_parallel_size
            if len(endpoint.addresses) != num_ranks:
                raise TransferError(f"{len(endpoint.addresses)} addresses of {num_ranks} ranks")
            for there in sources(endpoint.layout, worker.layout, worker.rank):
                address = endpoint.addresses[there]
                peer = worker.transport.connect(address, endpoint.engine_id)
                self._peers[there] = peer
                if self._stopping:  # whoever hangs up may have come too early for this one
                    raise TransferError("its engine is gone")
            self._link = measure_link(endpoint, peer, worker.memory, worker.transport)
        except TransferError as error:
            trouble = str(error)
        except Exception as error:
            logger.exception("the handshake with engine %s failed", endpoint.engine_id)
            trouble = f"{type(error).__name__}: {error}"
        if trouble:
            self._leave_alone(trouble)
            return False
        with worker.lock:
            worker.say_link(self._link)
        return True

    def _leave_alone(self, trouble: str) -> None:
        """Hang up, and do not try again for a while."""
        self._hang_up()
        self._link = KvLink(engine_id=self.endpoint.engine_id, error=trouble)
        pause_s = min(BACK_OFF_S * 2**self._num_troubles, MAX_BACK_OFF_S)
        self._retry_at_s = self._worker.clock.now() + pause_s
        self._num_troubles += 1
        logger.warning("cannot read from engine %s: %s", self.endpoint.engine_id, trouble)

    def _hang_up(self) -> None:
        peers, self._peers = self._peers, {}
        for peer in peers.values():
            peer.close()

    def _serve(self) -> None:
        """Read the next piece, if it has not been given up meanwhile."""
        with self._worker.lock:
            if not self._queue:
                return
            load = self._queue.popleft()
            piece = load.pieces.popleft()
            load.reading = True
        is_broken = True
        try:
            error = self._read(load, piece)
            is_broken = False
        except TicketError as failure:
            error, is_broken = str(failure), False
        except TransferError as failure:
            error = str(failure)
        except Exception as failure:
            logger.exception("reading from engine %s failed", self.endpoint.engine_id)
            error = f"{type(failure).__name__}: {failure}"
        if is_broken and load.is_second_try:
            self._leave_alone(error)
        elif is_broken:
            self._hang_up()
        with self._worker.lock:
            load.reading = False
            self._worker.changed.notify_all()
            if is_broken and not (load.is_second_try or load.given_up):
                load.is_second_try = True
                load.pieces.appendleft(piece)
                self._queue.appendleft(load)
            elif error or load.given_up or piece.is_last:
                self._worker.end(load, load.given_up or error)

    def _read(self, load: _Load, piece: KvLoad) -> str:
        worker, end, ticket, peers = self._worker, load.end, piece.ticket, self._peers
        max_bytes = min(worker.transport.max_piece_bytes, BATCH_BYTES)
        reads = pieces(self.endpoint.layout, worker.layout, worker.rank, piece)
        began_s, num_bytes = worker.clock.now(), end.num_bytes
        end.started_s = end.started_s or began_s
        for there, rows in reads.items():
            for batch in _batches(split(rows, max_bytes), worker.transport.max_pieces):
                if load.given_up:
                    return load.given_up
                peers[there].read(batch)
                end.num_messages += len(batch)
                end.num_bytes += int(batch[:, 2].sum())
        self._num_troubles = 0
        end.reads.append((began_s, worker.clock.now(), end.num_bytes - num_bytes))
        worker.fence()  # only now the words
        if all(peers[at].lease(ticket.lease_slot) == ticket.transfer_id for at in reads):
            return ""
        return LEASE_ENDED


def _batches(rows: Int64s, max_pieces: int) -> Iterator[Int64s]:
    """The rows in order, in batches of at most `max_pieces` and of about BATCH_BYTES."""
    ends = np.cumsum(rows[:, 2])
    start, done = 0, 0
    while start < len(rows):
        full = int(np.searchsorted(ends, done + BATCH_BYTES, side="right"))
        stop = min(max(full, start + 1), start + max_pieces)
        yield rows[start:stop]
        start, done = stop, int(ends[stop - 1])


class RankReports:
    """The reports of all ranks as one. Those that a `TransferWorker` makes: loads and links.

    A load is over once every rank has said so, and has failed if it has on any; said twice counts
    once.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._loads: dict[int, dict[int, KvLoadEnd]] = {}
        self._links: dict[str, dict[int, KvLink]] = {}

    def merge(self, reports: list[KvReport | None]) -> KvReport | None:
        """What is known of all ranks now, given what each, in order, has reported since."""
        touched = dict[str, None]()
        for rank, report in enumerate(reports):
            for end in report.loads if report else ():
                self._loads.setdefault(end.load_id, {}).setdefault(rank, end)
            for link in report.links if report else ():
                self._links.setdefault(link.engine_id, {})[rank] = link
                touched[link.engine_id] = None
        complete = [key for key, ends in self._loads.items() if len(ends) == self._num_ranks]
        merged = KvReport(
            loads=[_merged_end(list(self._loads.pop(key).values())) for key in complete],
            links=[
                _merged_link(list(self._links[key].values()))
                for key in touched
                if len(self._links[key]) == self._num_ranks
            ],
        )
        return merged if merged.loads or merged.links else None


def _merged_end(ends: list[KvLoadEnd]) -> KvLoadEnd:
    return KvLoadEnd(
        load_id=ends[0].load_id,
        num_bytes=sum(end.num_bytes for end in ends),
        num_messages=sum(end.num_messages for end in ends),
        started_s=min(end.started_s for end in ends),
        ended_s=max(end.ended_s for end in ends),
        reads=sorted(read for end in ends for read in end.reads),
        error=next((end.error for end in ends if end.error), ""),
    )


def _merged_link(links: list[KvLink]) -> KvLink:
    """Ranks read side by side, each its share of messages and bytes."""
    return KvLink(
        engine_id=links[0].engine_id,
        base_s=max(link.base_s for link in links),
        message_s=max(link.message_s for link in links) / len(links),
        bytes_per_s=min(link.bytes_per_s for link in links) * len(links),
        pipelined=all(link.pipelined for link in links),
        error=next((link.error for link in links if link.error), ""),
    )
