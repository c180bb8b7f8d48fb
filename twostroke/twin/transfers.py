"""The worker's half of the connector on a virtual clock: loads are flows on the network.

A load reads what the real one reads: the pieces that `connector.layout` works out from both block
tables, so a fragmented pool costs messages here too. Whether what arrived is good is said by the
source's lease words, as there.
"""

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import numpy as np

from twostroke.connector import layout
from twostroke.cost import BandwidthCurve
from twostroke.kv_messages import (
    KvCommands,
    KvEndpoint,
    KvLayoutRecord,
    KvLink,
    KvLoad,
    KvLoadEnd,
    KvReport,
)
from twostroke.twin.link import Flow, Network


@dataclass(frozen=True, kw_only=True)
class Link:
    """What connects engines. `bandwidth` is that of one engine, all its ranks together, each way;
    `fabric`, if any, is shared by all transfers. Base and message costs are those of `LinkCost`."""

    bandwidth: BandwidthCurve
    fabric: BandwidthCurve | None = None
    base_s: float = 0.0
    message_s: float = 0.0
    pipelined: bool = False


@dataclass(slots=True)
class _Load:
    """A load under way, in one or more pieces of a stream."""

    started_s: float
    open_pieces: dict[Hashable, KvLoad] = field(default_factory=dict)
    is_told_all: bool = False
    num_bytes: int = 0
    num_messages: int = 0


class Fabric:
    """All engines' ends of the links, and who holds which lease words."""

    def __init__(self, link: Link, *, record: bool = True) -> None:
        self.link = link
        self._record = record
        self._engines: dict[str, EngineTransfers] = {}
        self._owner: dict[Hashable, EngineTransfers] = {}
        self._links: dict[Hashable, BandwidthCurve] = {}
        self.network = Network({})

    def add(self, index: int, endpoint: KvEndpoint, now: Callable[[], float]) -> "EngineTransfers":
        """One engine joins, before anything moves."""
        self._links |= {("in", index): self.link.bandwidth, ("out", index): self.link.bandwidth}
        if self.link.fabric is not None:
            self._links["fabric",] = self.link.fabric
        self.network = Network(self._links, record=self._record)
        engine = EngineTransfers(index, endpoint, self, now)
        self._engines[endpoint.engine_id] = engine
        return engine

    def find(self, engine_id: str) -> "EngineTransfers | None":
        return self._engines.get(engine_id)

    def start(
        self,
        key: Hashable,
        owner: "EngineTransfers",
        source: int,
        num_bytes: int,
        messages: int,
        now_s: float,
        delay_s: float,
    ) -> None:
        """A flow of so many bytes begins, issued in so many messages by each rank."""
        issue_s = messages * self.link.message_s
        path: list[Hashable] = [("out", source), ("in", owner.index)]
        if self.link.fabric is not None:
            path.append(("fabric",))
        self._owner[key] = owner
        pipelined = self.link.pipelined and issue_s > 0
        self.network.start(
            key,
            path,
            num_bytes,
            now_s=now_s,
            latency_s=delay_s + self.link.base_s + (0.0 if pipelined else issue_s),
            limit=num_bytes / issue_s if pipelined else math.inf,
        )

    def cancel(self, key: Hashable, now_s: float) -> None:
        self.network.cancel(key, now_s=now_s)
        self._owner.pop(key, None)

    def advance(self, time_s: float) -> list["EngineTransfers"]:
        """Move flows on to `time_s`; returns the engines that have something to report now."""
        told: dict[int, EngineTransfers] = {}
        for key, _ in self.network.advance(time_s):
            owner = self._owner.pop(key, None)
            if owner is None:  # its load has just failed by another piece
                continue
            owner.arrived(key, time_s)
            if owner.has_report:
                told[owner.index] = owner
        return list(told.values())


class EngineTransfers:
    """One engine's transfers."""

    def __init__(
        self, index: int, endpoint: KvEndpoint, fabric: Fabric, now: Callable[[], float]
    ) -> None:
        self.index = index
        self.endpoint = endpoint
        self.leases: dict[int, bytes] = {}
        self.num_bytes = 0
        self.num_messages = 0
        self._fabric = fabric
        self._now = now
        self._loads: dict[int, _Load] = {}
        self._report = KvReport()
        self._num_pieces = 0

    # ------------------------------------------------------------ for the executor

    @property
    def is_busy(self) -> bool:
        """Whether a load is under way."""
        return bool(self._loads)

    @property
    def reads_ahead(self) -> bool:
        """Whether it can be told of loads beside plans, as a worker of one rank can."""
        return self.endpoint.layout.tensor_parallel_size == 1

    @property
    def has_report(self) -> bool:
        return bool(self._report.loads or self._report.links)

    def report(self) -> KvReport | None:
        """What has ended since the last report."""
        if not self.has_report:
            return None
        report, self._report = self._report, KvReport()
        return report

    def apply(self, commands: KvCommands, delay_s: float = 0.0) -> None:
        """Do what the scheduler's half says; reads begin only after `delay_s`."""
        for slot, transfer_id in commands.leases:
            if transfer_id:
                self.leases[slot] = transfer_id
            else:
                self.leases.pop(slot, None)
        for endpoint in commands.connects:
            self._report.links.append(self._measured(endpoint))
        for load in commands.loads:
            self._start(load, delay_s)
        for load_id in commands.given_up:
            self._end(load_id, error="given up")
        for engine_id in commands.disconnects:
            self._disconnect(engine_id)

    def _measured(self, endpoint: KvEndpoint) -> KvLink:
        """The handshake: what the reader would find out about the link."""
        link = self._fabric.link
        error = layout.check(endpoint.layout, self.endpoint.layout)
        return KvLink(
            engine_id=endpoint.engine_id,
            base_s=link.base_s,
            message_s=link.message_s,
            bytes_per_s=link.bandwidth.rate_at(self._now()),
            error=error,
        )

    # ------------------------------------------------------------ loads

    def _start(self, load: KvLoad, delay_s: float) -> None:
        state = self._loads.setdefault(load.load_id, _Load(self._now() + delay_s))
        state.is_told_all |= load.is_last
        source = self._fabric.find(load.ticket.endpoint.engine_id)
        if source is None:
            self._end(load.load_id, error="the engine that holds the prompt is gone")
            return
        ours = self.endpoint.layout
        num_bytes, messages = volume(load.ticket.endpoint.layout, ours, load)
        state.num_bytes += num_bytes
        state.num_messages += messages
        self._num_pieces += 1
        key = (self.index, load.load_id, self._num_pieces)
        state.open_pieces[key] = load
        self._fabric.start(key, self, source.index, num_bytes, messages, self._now(), delay_s)

    def arrived(self, key: Hashable, time_s: float) -> None:
        """A flow has ended: look at the lease word, as a reader does after the data."""
        assert isinstance(key, tuple)
        load_id = key[1]
        state = self._loads[load_id]
        ticket = state.open_pieces.pop(key).ticket
        source = self._fabric.find(ticket.endpoint.engine_id)
        if source is None or source.leases.get(ticket.lease_slot) != ticket.transfer_id:
            error = "KV transfer failed: its lease had ended; try again"
            self._end(load_id, error=error, time_s=time_s)
        elif state.is_told_all and not state.open_pieces:
            self._end(load_id, time_s=time_s)

    def _end(self, load_id: int, *, error: str = "", time_s: float | None = None) -> None:
        """Report a load's end, once; one that is not known has failed."""
        # The engine's own clock may be behind that of the network, which calls with its time.
        now = self._now() if time_s is None else time_s
        state = self._loads.pop(load_id, None) or _Load(now)
        for key in state.open_pieces:
            self._fabric.cancel(key, now)
        end = KvLoadEnd(
            load_id=load_id,
            num_bytes=state.num_bytes,
            num_messages=state.num_messages,
            started_s=state.started_s,
            ended_s=now,
            error=error,
        )
        if not error:
            self.num_bytes += state.num_bytes
            self.num_messages += state.num_messages
        self._report.loads.append(end)

    def _disconnect(self, engine_id: str) -> None:
        lost = [
            load_id
            for load_id, state in self._loads.items()
            if any(it.ticket.endpoint.engine_id == engine_id for it in state.open_pieces.values())
        ]
        for load_id in lost:
            self._end(load_id, error="the engine that holds the prompt is gone")


def volume(theirs: KvLayoutRecord, ours: KvLayoutRecord, load: KvLoad) -> tuple[int, int]:
    """Bytes that all ranks read for a load, and the pieces that each of them reads them in."""
    if (theirs.block_size, theirs.tensor_parallel_size) == (
        ours.block_size,
        ours.tensor_parallel_size,
    ):
        # Whole blocks, and those adjacent at both ends together: as `pieces` says, but sooner.
        first = load.first_token // ours.block_size
        end = -(-load.ticket.num_tokens // ours.block_size)
        if load.first_token == load.ticket.num_tokens:
            return 0, 0
        gaps = np.diff(load.ticket.block_ids[first:end]) != 1
        gaps |= np.diff(load.block_ids[first:end]) != 1
        block_bytes = layout.pool_bytes(ours) // ours.num_blocks
        num_bytes = (end - first) * block_bytes * ours.tensor_parallel_size
        return num_bytes, 1 + int(np.count_nonzero(gaps))
    # All ranks read alike and at once: what the first one reads says what all do.
    rows = layout.pieces(theirs, ours, 0, load).values()
    num_bytes = sum(int(pieces[:, 2].sum()) for pieces in rows) * ours.tensor_parallel_size
    return num_bytes, sum(len(pieces) for pieces in rows)


__all__ = ["EngineTransfers", "Fabric", "Flow", "Link", "volume"]
