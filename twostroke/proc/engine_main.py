"""`twostroke engine`: one engine that works for a server elsewhere.

    server ◀──TCP, encrypted──▶ this process ◀──as in `serve`──▶ engine-core process

The engine itself is the same process as under `serve`; this one carries its messages, unread, and
answers for it: heart-beats go out while the core is there and not stopped.

    join ──▶ start the core ──▶ carry ──▶ server lost or gone: reset the core, join again
                                  ├────▶ the core died: say so, exit with its code
                                  └────▶ SIGTERM: leave, once the server can do without us; exit 0

The server is asked first, so that a wrong key or model is known before anything is loaded.
"""

import asyncio
import contextlib
import dataclasses
import logging
import os
import secrets
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import msgspec
import psutil

from twostroke import __version__, log
from twostroke import checkpoint as checkpoints
from twostroke.checkpoint import Checkpoint
from twostroke.config import EngineConfig
from twostroke.config_values import is_loopback, parse_address
from twostroke.errors import ConfigError, EngineDeadError, ModelError, TwostrokeError
from twostroke.keys import SharedKey, read_key
from twostroke.messages import (
    AbortRequests,
    EngineDead,
    EngineReady,
    FromEngine,
    UtilityCall,
    UtilityReply,
    decoder_for,
    encode,
)
from twostroke.proc.bars import StageBars
from twostroke.proc.launch import EngineProcess, startup_block
from twostroke.transport_tcp import BEATS, JoinRequest, ServerLine, ServerLostError

logger = logging.getLogger("twostroke")

LAST_WORDS_S = 0.5  # for what is not sent yet when we end
RESET_CALL = 0  # the id of our own calls; those of servers start at 1


def run(config: EngineConfig) -> int:
    """Find the model, join the server and work for it until told to stop; returns the exit code."""
    log.setup(config.log_level)
    if not config.join:
        raise ConfigError(
            "twostroke engine has no server", hint="--join HOST:PORT names its --engines-listen"
        )
    key = read_key(Path(config.key))
    if config.kv_transport == "nixl" and not config.kv_host:
        config = dataclasses.replace(config, kv_host=_address_towards(config.join))
    with StageBars() as bars:
        checkpoint = checkpoints.resolve(config, bars.show)
    engine = RemoteEngine(config, checkpoint, key)
    try:
        return asyncio.run(engine.run())
    finally:
        engine.stop()


def _address_towards(server: str) -> str:
    """Our address on the way to the server, where its other engines reach us too; "": this host."""
    host, port = parse_address(server, "--join")
    if is_loopback(host):
        return ""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(
            f"cannot find the way to {server}: {error}", hint="give our address with --kv-host"
        ) from None


class RemoteEngine:
    """An engine-core process and the line to the server that it works for."""

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint, key: SharedKey) -> None:
        self._config = config
        self._checkpoint = checkpoint
        self._key = key
        self._host, self._port = parse_address(config.join, "--join")
        self._request = JoinRequest(
            version=__version__,
            engine_id=secrets.token_hex(8),
            role=config.role,
            model=checkpoints.fingerprint(checkpoint, config.seed),
            model_name=checkpoint.served_name,
            kv_transport=config.kv_transport,
            host=socket.gethostname(),
            pid=os.getpid(),
        )
        self._core: EngineProcess | None = None
        self._ready: bytes | None = None  # the core's EngineReady, for every server that we join
        self._decode = decoder_for(FromEngine).decode

    async def run(self) -> int:
        """Work until told to stop; returns the exit code. Raises ConfigError when refused."""
        self._leaving, self._in_a_hurry = asyncio.Event(), asyncio.Event()
        self._core_speaks = asyncio.Event()  # its sockets are connected
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)
        while not self._leaving.is_set():
            line = ServerLine(self._host, self._port, self._key)
            code: int | None = 1
            try:
                code = await self._work(line)
            finally:
                line.close(linger_s=0.0 if code is None else LAST_WORDS_S)
            if code is not None:
                return code
        return 0

    def stop(self) -> None:
        """End the core. Call it once the event loop of `run` has ended."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # what is left takes a moment, and cleans up
        if self._core is not None:
            self._core.stop()

    def _on_signal(self, number: signal.Signals) -> None:
        if self._leaving.is_set():
            self._in_a_hurry.set()
        logger.info("%s: leaving; once more stops at once", number.name)
        self._leaving.set()

    async def _work(self, line: ServerLine) -> int | None:
        """Join and serve until the line ends. Returns the exit code, or None: join again."""
        logger.info("joining %s as %s", line.address, self._request.role)
        joining = asyncio.create_task(line.join(self._request))
        if not await self._first(joining, self._leaving.wait()):
            return 0
        logger.info("joined %s", line.address)
        if self._core is None:
            self._core = EngineProcess(self._config, self._checkpoint)
        elif self._ready is not None:
            await self._reset(self._core)
            line.send(self._ready)
        return await self._carry(line, self._core)

    async def _first(self, wanted: asyncio.Task[Any], other: Coroutine[Any, Any, Any]) -> bool:
        """Whether `wanted` ends before `other`; the loser is cancelled. Raises what it raises."""
        rival = asyncio.ensure_future(other)
        try:
            await asyncio.wait([wanted, rival], return_when=asyncio.FIRST_COMPLETED)
            if wanted.done():
                wanted.result()
                return True
            return False
        finally:
            for task in (wanted, rival):
                task.cancel()
            await asyncio.gather(wanted, rival, return_exceptions=True)

    async def _reset(self, core: EngineProcess) -> None:
        """End what the core does for a server that is lost; what comes of it is for nobody.

        KV that it holds for others expires with its leases, since nobody renews them.
        """
        slots = await self._call(core, "slots")
        core.channel.send(AbortRequests([slot["handle"] for slot in slots]))
        await self._call(core, "ping")

    async def _call(self, core: EngineProcess, method: str) -> Any:
        core.channel.send(UtilityCall(RESET_CALL, method))
        while True:
            message = await core.channel.receive()
            if isinstance(message, UtilityReply) and message.call_id == RESET_CALL:
                return message.result

    # ------------------------------------------------------------ carrying

    async def _carry(self, line: ServerLine, core: EngineProcess) -> int | None:
        """Carry messages until one of the ends does. Returns the exit code, or None: join again."""
        tasks = [
            asyncio.create_task(work)
            for work in (
                self._from_core(line, core),
                self._from_server(line, core),
                self._beat(line, core),
                self._leave(line),
            )
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return next(task for task in tasks if task.done()).result()
        except ServerLostError as error:
            logger.warning("lost %s: %s; joining again", line.address, error)
            return None
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _from_core(self, line: ServerLine, core: EngineProcess) -> int:
        """Ends, with an exit code, when the core does."""
        while True:
            data = await core.channel.receive_bytes()
            self._core_speaks.set()
            line.send(data)
            kind = msgspec.msgpack.decode(data, type=_Tag).type
            if kind == "ready":
                self._ready = data
                message: EngineReady = self._decode(data)
                print(startup_block([*self._facts(), *message.facts]), flush=True)
            elif kind == "dead":
                error: EngineDead = self._decode(data)
                logger.error("%s", error.error)
                return max(await asyncio.to_thread(core.process.wait), 1)

    def _facts(self) -> list[tuple[str, str, str]]:
        return [
            ("Model", self._request.model_name, str(self._checkpoint.path)),
            ("Role", self._request.role, "--role"),
            ("Server", self._config.join, "--join"),
        ]

    async def _from_server(self, line: ServerLine, core: EngineProcess) -> int | None:
        """Ends when the server says farewell: None, or the exit code if we asked for it."""
        while (data := await line.receive()) is not None:
            await self._core_speaks.wait()
            with contextlib.suppress(EngineDeadError):  # then `_from_core` hears of it
                core.channel.send_bytes(data)
        if self._leaving.is_set():
            return 0
        logger.warning("%s has ended; waiting for it to come back", line.address)
        return None

    async def _beat(self, line: ServerLine, core: EngineProcess) -> None:
        """Vouch for the core while it is there and not stopped, however busy it is."""
        process = psutil.Process(core.process.pid)
        while True:
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
                    line.beat()
            await asyncio.sleep(line.silence_s / BEATS)

    async def _leave(self, line: ServerLine) -> int:
        """Once told to stop: leave in peace, or say what happened when time is up."""
        await self._leaving.wait()
        line.leave()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.shutdown_timeout_s):
                await self._in_a_hurry.wait()
        line.send(encode(EngineDead("it was told to stop")))
        return 0


class _Tag(msgspec.Struct):
    """What kind of message it is."""

    type: str


class Launch(msgspec.Struct):
    """What a starter that is a program writes to our standard input, as one line of JSON.

    It keeps the pipe open: when that closes, the starter is gone, and we leave. `kv_host` is where
    others reach this host, unless the settings say so.
    """

    config: EngineConfig
    key: str
    kv_host: str = ""


def main() -> None:
    """Entry point of `python -m twostroke.proc.engine_main`, for starters that are programs."""
    launch = msgspec.json.decode(sys.stdin.buffer.readline(), type=Launch)
    threading.Thread(target=_watch_starter, daemon=True).start()
    with tempfile.TemporaryDirectory(prefix="twostroke-") as directory:  # mode 0700
        key = Path(directory) / "key"  # the core and its workers read it, too
        key.touch(mode=0o600)
        key.write_text(launch.key, encoding="ascii")
        kv_host = launch.config.kv_host or launch.kv_host
        code = _run_or_say_why(dataclasses.replace(launch.config, key=str(key), kv_host=kv_host))
    sys.exit(code)


def _run_or_say_why(config: EngineConfig) -> int:
    """As on the command line, but for the colour."""
    try:
        return run(config)
    except TwostrokeError as error:
        logger.error("%s", error)
        return 2 if isinstance(error, ConfigError) else 3 if isinstance(error, ModelError) else 1


def _watch_starter() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
