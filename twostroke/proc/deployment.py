"""Engines with roles behind one server: who joins, who leaves, who reads from whom.

Deployment   opens --engines-listen, hands each engine that joins to the client, lets it go
             again, and tells people about all of it
"""

import asyncio
import logging
from collections.abc import Sequence

from twostroke import checkpoint as checkpoints
from twostroke.checkpoint import Checkpoint
from twostroke.client.engine import AsyncEngine
from twostroke.config import EngineConfig
from twostroke.config_values import parse_address
from twostroke.cost import LinkCost
from twostroke.keys import SharedKey
from twostroke.kv_messages import KvLayoutRecord
from twostroke.messages import EngineReady
from twostroke.router.engines import Engine
from twostroke.transport_tcp import EngineListener, JoinedChannel, JoinRequest

logger = logging.getLogger("twostroke")

Fact = tuple[str, str, str]  # name, value, reason

LINKS_WAIT_S = 5.0  # that the start-up block waits for links to be measured
_LINKS_POLL_S = 0.05
# What must be equal where KV is to be handed over. How it is cut into blocks may differ.
_SAME_KV = ("version", "model", "dtype", "num_layers", "num_kv_heads", "head_dim")


class Deployment:
    """The engines of a server where they have roles. Belongs to the event loop of `engine`."""

    def __init__(
        self,
        config: EngineConfig,
        checkpoint: Checkpoint,
        engine: AsyncEngine,
        key: SharedKey | None,
    ) -> None:
        self._config = config
        self._engine = engine
        self._model = checkpoints.fingerprint(checkpoint, config.seed)
        self._gone: set[tuple[int, str]] = set()  # deaths that were told
        self._ready: dict[int, EngineReady] = {}  # engines that were told of
        self._leaving: set[asyncio.Task[None]] = set()
        self.listener: EngineListener | None = None
        if key is not None:
            host, port = parse_address(config.engines_listen, "--engines-listen")
            self.listener = EngineListener(
                host,
                port,
                key,
                check=self._check,
                check_ready=self._check_ready,
                on_join=self._on_join,
                silence_s=config.engine_timeout_s,
            )
            self.listener.start()
            logger.info("engines may join at %s:%d", host, self.listener.port)

    async def close(self) -> None:
        """Nobody may join any more, and those that did learn that the server ends."""
        for task in self._leaving:
            task.cancel()
        if self.listener is not None:
            await self.listener.close()

    # ------------------------------------------------------------ joining and leaving

    def _check(self, request: JoinRequest) -> str:
        if request.model != self._model:
            return f"its model {request.model_name} is not {self._engine.model_name} as it is here"
        if request.kv_transport != self._config.kv_transport:
            return (
                f"it reads KV over {request.kv_transport}, and the engines here over "
                f"{self._config.kv_transport}; start both with the same --kv-transport"
            )
        return ""

    def _check_ready(self, channel: JoinedChannel, ready: EngineReady) -> str:
        if ready.kv is None:
            return "its KV cannot be read by others"
        for other in self._engine.dispatcher.fleet:
            if other.endpoint is not None and other.state != "gone":
                if why := _difference(ready.kv.layout, other.endpoint.layout):
                    return f"its KV {why} in engine {other.index}"
                break
        return ""

    def _on_join(self, channel: JoinedChannel) -> None:
        channel.number = self._engine.add_engine(channel, channel.request.role)
        logger.info("engine %d joins: %s; it is loading", channel.number, channel)
        task = asyncio.create_task(self._let_go(channel), name=f"farewell to {channel}")
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def _let_go(self, channel: JoinedChannel) -> None:
        """Once it asks to leave: let it finish what it has, then say farewell."""
        await channel.leaving.wait()
        logger.info("engine %d wants to leave: it gets no more requests", channel.number)
        await self._engine.retire(channel.number)
        channel.close()

    # ------------------------------------------------------------ telling

    async def watch(self) -> None:
        """Tell of engines that come and go. Returns once none can serve, and none can join."""
        while True:
            fleet = self._engine.dispatcher.fleet
            for it in fleet:
                if it.state == "gone" and (it.index, it.error) not in self._gone:
                    self._gone.add((it.index, it.error))
                    level = logging.INFO if it.is_leaving else logging.ERROR
                    logger.log(level, "engine %d (%s) is gone: %s", it.index, it.role, it.error)
                elif it.ready is not None and self._ready.get(it.index) is not it.ready:
                    self._ready[it.index] = it.ready
                    logger.info("engine %d (%s) is ready", it.index, it.role)
            if self._engine.dead is not None and self.listener is None:
                return
            await self._engine.wait_change()

    async def facts(self) -> list[Fact]:
        """Roles, who reads from whom, and what the links give, once they are measured."""
        fleet = self._engine.dispatcher.fleet
        engines = [it for it in fleet if it.state != "gone"]
        roles = [f"{it.index}: {it.role}" for it in engines]
        rows = [("Engines", ", ".join(roles), self._why_these())]
        if self.listener is not None:
            host, _ = parse_address(self._config.engines_listen, "--engines-listen")
            rows.append(("Engines may join", f"{host}:{self.listener.port}", "--engines-listen"))
        rows.append(
            (
                "KV hand-off",
                f"over {self._config.kv_transport}, {self._config.kv_mode}",
                f"--pd-policy {self._config.pd_policy}",
            )
        )
        for reader, source in await self._measured_pairs(engines):
            assert source.endpoint is not None
            pair = fleet.pair(reader, source.endpoint.engine_id)
            name = f"Engine {reader.index} reads from {source.index}"
            if pair.link is not None:
                rows.append((name, describe_link(pair.link), "measured"))
            else:
                rows.append((name, pair.error or "not measured yet", ""))
        return rows

    def _why_these(self) -> str:
        return "--prefill, --decode" if self._config.prefill or self._config.decode else "--join"

    async def _measured_pairs(self, engines: Sequence[Engine]) -> list[tuple[Engine, Engine]]:
        """Readers with whom they read from; waits a little for what is not measured yet."""
        fleet = self._engine.dispatcher.fleet
        pairs = [
            (reader, source, fleet.pair(reader, source.endpoint.engine_id))
            for reader in engines
            for source in engines
            if source.endpoint is not None and source.endpoint.engine_id in reader.connected
        ]
        by_s = asyncio.get_running_loop().time() + LINKS_WAIT_S
        while any(pair.link is None and not pair.error for _, _, pair in pairs):
            if asyncio.get_running_loop().time() > by_s:
                break
            await asyncio.sleep(_LINKS_POLL_S)
        return [(reader, source) for reader, source, _ in pairs]


def _difference(mine: KvLayoutRecord, other: KvLayoutRecord) -> str:
    """The first thing in which they differ that must be equal; empty: none."""
    for name in _SAME_KV:
        here, there = getattr(mine, name), getattr(other, name)
        if here != there:
            return f"has {name} {here}, and {there}"
    return ""


def describe_link(link: LinkCost) -> str:
    """A link in people's units."""
    return (
        f"{link.bytes_per_s / 1e9:.2f} GB/s, {link.base_s * 1e6:.0f} us and "
        f"{link.message_s * 1e6:.1f} us a message"
    )
