"""API process: uvicorn on one asyncio thread, the engine client, and the watch over both.

run()  ▶ engine client starts its output tasks
       ▶ uvicorn serves at once (/v1/models and /health answer while the model loads)
       ▶ SIGINT or SIGTERM: stop accepting, let running requests end, stop the engines, exit 0
         again, or time is up: what still runs ends with an error
       ▶ an engine dead: its clients get an error, those of others may finish, /health says 503,
         nothing new is taken, exit 1; where engines have roles, only once none decodes
"""

import asyncio
import gc
import logging
import math
import signal
import socket
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import uvicorn
import uvloop

from twostroke import __version__
from twostroke.api.app import ServerState, create_app
from twostroke.checkpoint import Checkpoint
from twostroke.client.chat import ChatTemplate
from twostroke.client.engine import AsyncEngine
from twostroke.client.tokenizer import Tokenizer, load_tokenizer
from twostroke.config import EngineConfig, Explained
from twostroke.cost_profile import profiled_step_cost
from twostroke.errors import ConfigError, EngineDeadError
from twostroke.keys import SharedKey
from twostroke.ledger_file import LedgerFile
from twostroke.messages import EngineReady
from twostroke.metrics import Metrics
from twostroke.proc.bars import StageBars
from twostroke.proc.deployment import Deployment
from twostroke.proc.launch import EngineGroup, startup_block
from twostroke.proc.ray_engines import RayEngines
from twostroke.router.dispatch import DispatchSettings
from twostroke.trace import Tracer

logger = logging.getLogger("twostroke")

# What clients get, after the requests were ended, to read the error and hang up.
CLOSING_S = 2
# After the engine's death the server still answers this long, so that health checks and waiting
# clients learn the reason and do not just meet a refused connection.
DEAD_LINGER_S = 3.0


class Server(uvicorn.Server):
    """uvicorn, except that a signal is an orderly end (exit 0) and is not raised again.

    Requests that still run `drain_s` seconds after the signal, or when it comes again, end with an
    error that their clients can read.
    """

    def __init__(self, config: uvicorn.Config, engine: AsyncEngine, drain_s: float) -> None:
        super().__init__(config)
        self._engine = engine
        self._drain_s = drain_s
        self._ending: asyncio.Task[None] | None = None
        self.stopped_engine = False  # whether its end is our doing, so no failure

    def drain(self) -> None:
        """Take no more connections, give running requests their time, and end."""
        self.should_exit = True
        asyncio.get_running_loop().call_later(self._drain_s, self._end_requests)

    def _end_requests(self) -> None:
        if self._ending is None:
            self.stopped_engine = self._engine.dead is None
            self._ending = asyncio.create_task(self._engine.close())

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        loop = asyncio.get_running_loop()
        signals = (signal.SIGINT, signal.SIGTERM)
        for number in signals:
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)
                signal.signal(number, signal.SIG_IGN)  # what is left takes a moment, and cleans up

    def _on_signal(self, number: signal.Signals) -> None:
        if not self.should_exit:
            logger.info("%s: draining; once more stops at once", number.name)
            self.drain()
        elif self._ending is None:
            logger.warning("%s again: stopping now", number.name)
            self._end_requests()


def run(
    config: EngineConfig,
    explained: Sequence[Explained],
    checkpoint: Checkpoint,
    engines: EngineGroup,
    listener: socket.socket,
    key: SharedKey | None,
    cluster: RayEngines | None,
) -> int:
    """Serve until stopped; returns the exit code.

    `key` is that of engines that may join; `cluster` starts some that do.
    """
    return uvloop.run(_run(config, explained, checkpoint, engines, listener, key, cluster))


async def _run(
    config: EngineConfig,
    explained: Sequence[Explained],
    checkpoint: Checkpoint,
    engines: EngineGroup,
    listener: socket.socket,
    key: SharedKey | None,
    cluster: RayEngines | None,
) -> int:
    tokenizer = await asyncio.to_thread(load_tokenizer, checkpoint, config.tokenizer)
    bars = StageBars()
    engine = _make_engine(config, checkpoint, tokenizer, engines, bars)
    deployment = Deployment(config, checkpoint, engine, key) if config.hands_off else None
    engine.start()
    if cluster is not None and deployment is not None and deployment.listener is not None:
        cluster.start(deployment.listener.port)
    state = ServerState(
        engine=engine,
        tokenizer=tokenizer,
        chat_template=_chat_template(config, checkpoint, tokenizer),
        model_name=engine.model_name,
        metrics=engine.metrics,
        api_key=config.api_key,
        explained=explained,
        version=__version__,
        max_num_queued_reqs=config.max_num_queued_reqs,
    )
    server = Server(
        uvicorn.Config(
            create_app(state),
            log_config=None,
            access_log=False,
            lifespan="off",  # there are no such handlers, and uvicorn is loud about a forced end
            timeout_graceful_shutdown=math.ceil(config.shutdown_timeout_s) + CLOSING_S,
        ),
        engine,
        config.shutdown_timeout_s,
    )
    died = asyncio.create_task(_wait_useless(engines, deployment))
    watch = asyncio.create_task(
        _watch(engine, server, died, deployment, checkpoint, listener, bars)
    )
    gc.freeze()  # all that was imported stays
    gc.enable()
    await server.serve(sockets=[listener])
    watch.cancel()
    died.cancel()
    failed = engine.dead is not None and not server.stopped_engine and not config.engines_listen
    await engine.close()
    if cluster is not None:
        await cluster.stop()
    if deployment is not None:
        await deployment.close()
    return 1 if failed else 0


def _make_engine(
    config: EngineConfig,
    checkpoint: Checkpoint,
    tokenizer: Tokenizer,
    engines: EngineGroup,
    bars: StageBars,
) -> AsyncEngine:
    name = config.served_model_name or checkpoint.served_name
    shape = checkpoint.shape
    return AsyncEngine(
        engines.channels,
        tokenizer,
        model_name=name,
        max_model_len=shape.max_position_embeddings,
        eos_token_ids=shape.eos_token_ids,
        vocab_size=shape.vocab_size,
        max_num_queued_reqs=config.max_num_queued_reqs,
        roles=config.local_roles if config.hands_off else None,
        dispatch=dispatch_settings(config) if config.hands_off else None,
        metrics=Metrics(
            model_name=name,
            prefix=config.metrics_prefix,
            max_model_len=shape.max_position_embeddings,
        ),
        default_seed=config.seed,
        prefix_caching=config.enable_prefix_caching,
        on_progress=lambda progress: bars.show(progress.stage, progress.done, progress.total),
        tracer=Tracer(Path(config.trace), "requests") if config.trace else None,
        ledger_file=_ledger_file(config.save_ledger),
    )


def _ledger_file(path: str) -> LedgerFile | None:
    return LedgerFile(Path(path), time.monotonic()) if path else None


def dispatch_settings(config: EngineConfig) -> DispatchSettings:
    """The settings of the one who spreads requests over engines."""
    return DispatchSettings(
        pd_policy=config.pd_policy,
        kv_mode=config.kv_mode,
        lease_s=config.kv_lease_s,
        handoff_timeout_s=config.handoff_timeout_s,
        max_retries=config.handoff_retries,
        recompute_max_tokens=config.kv_recompute_max_tokens,
        affinity=config.enable_prefix_caching,
        step_cost=profiled_step_cost(config),
    )


def _chat_template(
    config: EngineConfig, checkpoint: Checkpoint, tokenizer: Tokenizer
) -> ChatTemplate | None:
    """The template of --chat-template, else the model's own; None when it has none."""
    template = checkpoint.chat_template
    if config.chat_template:
        try:
            template = Path(config.chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"cannot read --chat-template {config.chat_template}: {error}"
            ) from None
    if template is None:
        return None
    return ChatTemplate(template, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token)


async def _watch(
    engine: AsyncEngine,
    server: Server,
    died: asyncio.Task[None],
    deployment: Deployment | None,
    checkpoint: Checkpoint,
    listener: socket.socket,
    bars: StageBars,
) -> None:
    """Print the start-up block once the engines are ready; end the server if it is no use."""
    try:
        with bars:
            ready = await _wait_ready(engine, may_join=bool(deployment and deployment.listener))
    except EngineDeadError as error:
        logger.error("%s", error.message)
        server.should_exit = True
        return
    facts = ready.facts
    if deployment is not None:
        shared = [fact for fact in facts if fact[0] not in ("Engines", "KV hand-off")]
        facts = [*shared, *await deployment.facts()]
    host, port = listener.getsockname()[:2]
    since_s = time.time() - psutil.Process().create_time()
    rows = [
        ("Model", engine.model_name, str(checkpoint.path)),
        *facts,
        ("URL", f"http://{host}:{port}/v1", f"ready after {since_s:.1f} s; metrics at /metrics"),
    ]
    print(startup_block(rows), flush=True)
    await died
    if server.should_exit:
        return
    why = engine.dead.message if engine.dead else "its process ended"
    logger.error("an engine is gone: %s; this server ends in %.0f s", why, DEAD_LINGER_S)
    await asyncio.sleep(DEAD_LINGER_S)
    server.drain()  # requests on other engines still get the shutdown's time


async def _wait_ready(engine: AsyncEngine, *, may_join: bool) -> EngineReady:
    """Wait until the server can serve. Raises EngineDeadError when it never will."""
    while True:
        try:
            return await engine.wait_ready()
        except EngineDeadError:
            if not may_join:
                raise
            await engine.wait_change()


async def _wait_useless(engines: EngineGroup, deployment: Deployment | None) -> None:
    """Wait until an engine is dead that cannot be done without."""
    if deployment is not None:
        await deployment.watch()
        return
    loop = asyncio.get_running_loop()
    died = asyncio.Event()
    engines.on_death(lambda: loop.call_soon_threadsafe(died.set))
    await died.wait()
