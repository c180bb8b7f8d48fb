"""The engines of a server on the nodes of a Ray cluster.

Ray places and watches, no more: an actor on a node runs `twostroke engine`'s process there, which
joins the server over TCP like any other. If a node is lost, Ray starts the actor on another one;
if the engine crashes, the actor is asked to run it again. Messages and KV never pass through Ray.

The key travels in the call to the actor, from process to process, and lies on the node in a file
for this user alone while the engine runs. The way is as safe as Ray's own connections are
(`RAY_USE_TLS`); who can submit to the cluster can run anything on it anyway.
"""

import asyncio
import dataclasses
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from twostroke.config import ANY_ADDRESS, EngineConfig, Role
from twostroke.config_values import parse_address
from twostroke.errors import ConfigError

logger = logging.getLogger("twostroke")

MAX_STARTS = 10  # of one engine
SLOW_S = 30.0  # after which somebody should know that Ray has no place for an engine
STOP_S = 20.0


class EngineActor:
    """Runs on a node of the cluster; starts one engine at a time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def node(self) -> str:
        """The address of the node."""
        import ray

        return str(ray.util.get_node_ip_address())

    def run(self, launch: bytes, key: str) -> int:
        """Run an engine to its end; returns its exit code. See `engine_main.Launch`."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "twostroke.proc.engine_main"], stdin=subprocess.PIPE
        )
        assert self._process.stdin is not None
        settings = msgspec.json.decode(launch) | {"key": key, "kv_host": self.node()}
        self._process.stdin.write(msgspec.json.encode(settings) + b"\n")
        self._process.stdin.flush()  # and stays open: when we end, so does the engine
        return self._process.wait()

    def stop(self) -> None:
        """End the engine in peace: `run` will return."""
        if self._process is not None:
            self._process.terminate()


class RayEngines:
    """The engines of a server on a cluster: connect early, `start` once engines may join."""

    def __init__(self, config: EngineConfig) -> None:
        try:
            import ray
        except ImportError:
            raise ConfigError(
                f"--ray is {config.ray}, but Ray is not installed",
                hint="pip install 'twostroke[ray]'",
            ) from None
        self._ray = ray
        self._config = config
        self._key = Path(config.key).read_text(encoding="ascii").strip()
        self._actors: list[Any] = []
        self._tasks: list[asyncio.Task[None]] = []
        try:
            ray.init(address=config.ray, log_to_driver=False, configure_logging=False)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise ConfigError(f"cannot reach the Ray cluster {config.ray}: {error}") from None

    def start(self, port: int) -> None:
        """Place the engines, which will join at that port of --engines-listen."""
        host, _ = parse_address(self._config.engines_listen, "--engines-listen")
        if host in ANY_ADDRESS:
            host = self._ray.util.get_node_ip_address()
        join = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        actor_class = self._ray.remote(EngineActor).options(
            scheduling_strategy="SPREAD",
            max_restarts=-1,  # on another node if that one is lost
            max_concurrency=3,  # one call runs as long as the engine
            **self._resources(),
        )
        for role in self._config.roles:
            actor = actor_class.remote()
            self._actors.append(actor)
            launch = msgspec.json.encode({"config": engine_config(self._config, join, role)})
            self._tasks.append(asyncio.create_task(self._keep(actor, role, launch)))

    def _resources(self) -> dict[str, float]:
        """What Ray sets aside for each engine. A GPU for each rank, unless it is to use none."""
        tp, threads = self._config.tensor_parallel_size, self._config.cpu_threads
        if self._config.device == "cuda":
            return {"num_cpus": max(threads, 1), "num_gpus": tp}
        return {"num_cpus": max(threads, 1)}

    async def _keep(self, actor: Any, role: Role, launch: bytes) -> None:
        """Run an engine, again and again as long as it helps."""
        error = ""
        for _ in range(MAX_STARTS):
            try:
                node = await self._node_of(actor, role)
                logger.info("starting an engine (%s) on node %s", role, node)
                code = await actor.run.remote(launch, self._key)
            except self._ray.exceptions.RayError as lost:
                error = f"its node or its actor is gone: {lost}"
            else:
                if code == 0:
                    return
                error = f"it exited with code {code}"
                if code in (2, 3):  # settings or model: it would end so again
                    break
            logger.error("an engine (%s) on the Ray cluster has ended: %s", role, error)
        logger.error("an engine (%s) is not started any more: %s", role, error)

    async def _node_of(self, actor: Any, role: Role) -> str:
        placed = asyncio.ensure_future(actor.node.remote())
        done, _ = await asyncio.wait([placed], timeout=SLOW_S)
        if not done:
            logger.warning(
                "Ray has no place for an engine (%s) yet: it needs %s of one node",
                role,
                self._resources(),
            )
        return str(await placed)

    async def stop(self) -> None:
        """End the engines and take leave of the cluster."""
        for actor in self._actors:
            actor.stop.remote()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=STOP_S)
        for task in self._tasks:
            task.cancel()
        for actor in self._actors:
            self._ray.kill(actor)
        self._ray.shutdown()


def engine_config(config: EngineConfig, join: str, role: Role) -> EngineConfig:
    """A server's settings as those of one engine that joins it there."""
    return dataclasses.replace(
        config, ray="", engines_listen="", key="", prefill=0, decode=0, join=join, role=role
    )
