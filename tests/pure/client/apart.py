"""Engines in this process that hand KV over: real cores, and pools that are read on the spot."""

import contextlib
from collections.abc import AsyncIterator

from twostroke.client.engine import AsyncEngine
from twostroke.clock import WallClock
from twostroke.config import SchedulerConfig
from twostroke.connector.handoff import HandoffScheduler
from twostroke.core.loop import EngineCore
from twostroke.kv_messages import (
    KvCommands,
    KvEndpoint,
    KvLayoutRecord,
    KvLink,
    KvLoad,
    KvLoadEnd,
    KvReport,
)
from twostroke.messages import EngineReady
from twostroke.router.dispatch import DispatchSettings
from twostroke.testing.byte_tokenizer import ByteTokenizer
from twostroke.testing.fake_engine import InProcessChannel
from twostroke.testing.fake_kv import FakePool, KvExecutor

BLOCK = 4


class Reader:
    """A connector's worker half that reads at once what it is told to; `breaks`: and fails."""

    def __init__(self, pools: dict[str, FakePool], endpoint: KvEndpoint) -> None:
        self._pools = pools
        self._endpoint = endpoint
        self._report = KvReport()
        self._over: set[int] = set()
        self.breaks = False
        self.stalls = False

    @property
    def endpoint(self) -> KvEndpoint:
        return self._endpoint

    @property
    def _pool(self) -> FakePool:
        return self._pools[self._endpoint.engine_id]

    def apply(self, commands: KvCommands) -> None:
        self._pool.set_leases(commands.leases)
        for load in commands.loads:
            self._read(load)
        for load_id in commands.given_up:
            self._end(load_id, 0, "given up")
        for endpoint in commands.connects:
            self._report.links.append(KvLink(engine_id=endpoint.engine_id, bytes_per_s=1e9))

    def _read(self, load: KvLoad) -> None:
        ticket = load.ticket
        source = self._pools.get(ticket.endpoint.engine_id)
        if self.stalls:
            return
        if self.breaks or source is None or not source.honours(ticket):
            self._end(load.load_id, 0, "cannot be read")
            return
        kv = source.read(ticket.block_ids.tolist(), load.first_token, ticket.num_tokens)
        self._pool.write(load.block_ids.tolist(), load.first_token, kv)
        if load.is_last:
            self._end(load.load_id, kv.nbytes, "")

    def _end(self, load_id: int, num_bytes: int, error: str) -> None:
        if load_id not in self._over:
            self._over.add(load_id)
            end = KvLoadEnd(load_id=load_id, num_bytes=num_bytes, ended_s=1e-6, error=error)
            self._report.loads.append(end)

    def report(self) -> KvReport | None:
        if not (self._report.loads or self._report.links):
            return None
        report, self._report = self._report, KvReport()
        return report

    def wait(self, timeout_s: float) -> None:
        """It never has anything under way."""

    def shutdown(self) -> None:
        """Nothing to end."""


class Part:
    """One engine."""

    def __init__(self, name: str, pools: dict[str, FakePool], **fields) -> None:
        settings = {"num_blocks": 40, "max_num_seqs": 8, "max_num_batched_tokens": 32}
        settings |= {"max_model_len": 128, "block_size": BLOCK} | fields
        config = SchedulerConfig(**settings)
        layout = KvLayoutRecord(
            model="fake",
            dtype="float32",
            num_layers=1,
            num_kv_heads=1,
            head_dim=1,
            block_size=config.block_size,
            num_blocks=config.num_blocks,
        )
        endpoint = KvEndpoint(engine_id=name, transport="fake", addresses=["a"], layout=layout)
        pools[name] = FakePool(config.num_blocks, config.block_size)
        clock = WallClock()
        self.name = name
        self.reader = Reader(pools, endpoint)
        self.connector = HandoffScheduler(clock, endpoint)
        self.core = EngineCore(config, clock, connector=self.connector, check=True)
        self.ready = EngineReady(
            0, config.max_model_len, config.num_blocks, config.block_size, kv=endpoint
        )
        executor = KvExecutor(pools[name], self.reader)
        self.channel = InProcessChannel(self.core, executor, self.ready)

    @property
    def is_empty(self) -> bool:
        return self.core.is_empty() and self.connector.counts().num_holds == 0


class Deployment:
    """A client of engines with roles."""

    def __init__(self, roles: list[str], **settings) -> None:
        self.pools: dict[str, FakePool] = {}
        self.fields = settings.pop("fields", {})
        self.parts = [Part(f"e{i}", self.pools, **self.fields) for i in range(len(roles))]
        self.engine = AsyncEngine(
            [part.channel for part in self.parts],
            ByteTokenizer(),
            model_name="m",
            max_model_len=128,
            eos_token_ids=[],
            vocab_size=40_000,
            max_num_queued_reqs=1000,
            roles=roles,
            dispatch=DispatchSettings(**settings),
            status_interval_s=0,
        )

    def join(self, role: str) -> int:
        part = Part(f"e{len(self.parts)}", self.pools, **self.fields)
        self.parts.append(part)
        return self.engine.add_engine(part.channel, role)

    def kill(self, index: int) -> None:
        """As a crash would: nobody reads its memory any more."""
        self.parts[index].channel.kill()
        del self.pools[self.parts[index].name]


@contextlib.asynccontextmanager
async def deployed(*roles: str, **settings) -> AsyncIterator[Deployment]:
    it = Deployment(list(roles), **settings)
    it.engine.start()
    try:
        yield it
    finally:
        await it.engine.close()
        for part in it.parts:
            part.channel.close()
