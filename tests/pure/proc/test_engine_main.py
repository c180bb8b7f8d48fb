"""`twostroke engine` around a core that is a thread of this process."""

import asyncio
import contextlib
import dataclasses
import shutil
import signal
import tempfile
import threading
from pathlib import Path

import psutil
import pytest

from tests.pure.test_transport_tcp import Server
from twostroke.checkpoint import Checkpoint, fingerprint
from twostroke.config import EngineConfig
from twostroke.errors import ConfigError, EngineDeadError
from twostroke.keys import read_key, write_key
from twostroke.messages import (
    AbortRequests,
    EngineDead,
    EngineReady,
    Shutdown,
    UtilityCall,
    UtilityReply,
)
from twostroke.proc import engine_main
from twostroke.proc.engine_main import RemoteEngine
from twostroke.shape import from_hf_config
from twostroke.testing.tiny_model import tiny_config
from twostroke.transport import CoreSockets, ZmqEngineChannel

READY = EngineReady(engine=0, max_model_len=8, num_blocks=2, block_size=4)
CHECKPOINT = Checkpoint(
    name="tiny",
    path=Path("tiny"),
    format="dummy",
    shape=from_hf_config(tiny_config("llama")),
    chat_template=None,
    served_name="tiny",
)


class FakeCore:
    """What `EngineProcess` is to its user, with a thread in the process's place."""

    pid = psutil.Process().pid

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="twostroke-"))
        self.channel = ZmqEngineChannel(self.directory, 0)
        self.process = self  # for its pid and its exit code
        self.got: list[object] = []
        self.sockets = CoreSockets(self.directory, 0)
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        """Ready at once; answers calls; dies when it is asked for `die`, ends on Shutdown."""
        self.sockets.send(READY)
        while True:
            data = self.sockets.receive_bytes()
            assert data is not None
            message = self.sockets.decode(data)
            self.got.append(message)
            match message:
                case UtilityCall(_, "die"):
                    self.sockets.send(EngineDead("as it was told"))
                case UtilityCall(call_id, "slots"):
                    self.sockets.send(UtilityReply(call_id, [{"handle": 5}, {"handle": 6}]))
                case UtilityCall(call_id, method):
                    self.sockets.send(UtilityReply(call_id, method))
                case Shutdown():
                    closing = threading.Thread(target=self.sockets.close)
                    closing.start()
                    assert self.sockets.receive_bytes() is None
                    closing.join()
                    return

    def wait(self) -> int:
        return 3

    def stop(self) -> int:
        with contextlib.suppress(EngineDeadError):
            self.channel.send(Shutdown())
        self.thread.join(10)
        self.channel.close()
        shutil.rmtree(self.directory)
        return 0


@pytest.fixture
def key(tmp_path):
    write_key(tmp_path / "key")
    return read_key(tmp_path / "key")


@pytest.fixture(autouse=True)
def cores(monkeypatch):
    """Those that were started."""
    made: list[FakeCore] = []

    def make(*args):
        made.append(FakeCore(*args))
        return made[-1]

    monkeypatch.setattr(engine_main, "EngineProcess", make)
    yield made
    for core in made:
        core.stop()


class EngineServer(Server):
    """One that wants the model of these tests."""

    def __init__(self, key, **kwargs):
        super().__init__(key, **kwargs)
        wanted = fingerprint(CHECKPOINT, 0)
        self.listener._check = lambda it: "" if it.model == wanted else "another model"

    async def engine(self):
        """The channel of the next engine that is ready."""
        channel = await self.joined.get()
        ready = await channel.receive()
        assert isinstance(ready, EngineReady)
        return channel


def start(key, port, checkpoint=CHECKPOINT, **settings):
    config = EngineConfig(join=f"127.0.0.1:{port}", key="k", role="decode", **settings)
    engine = RemoteEngine(config, checkpoint, key)
    return engine, asyncio.create_task(engine.run())


async def test_it_carries_messages_and_leaves_when_told(key, cores):
    async with EngineServer(key) as server:
        engine, running = start(key, server.listener.port)
        channel = await server.engine()
        assert (channel.request.role, channel.request.model_name) == ("decode", "tiny")
        for i in range(1, 20):
            channel.send(UtilityCall(i, "ping"))
            assert await channel.receive() == UtilityReply(i, "ping")
        engine._on_signal(signal.SIGTERM)
        await channel.leaving.wait()
        channel.send(UtilityCall(20, "ping"))  # what runs may still end
        assert await channel.receive() == UtilityReply(20, "ping")
        channel.close()
        assert await running == 0
    assert not any(isinstance(message, Shutdown) for message in cores[0].got)


@pytest.mark.parametrize("signals", [1, 2])
async def test_it_does_not_wait_for_ever_to_be_let_go(key, signals):
    async with EngineServer(key) as server:
        timeout_s = 0.1 if signals == 1 else 60.0
        engine, running = start(key, server.listener.port, shutdown_timeout_s=timeout_s)
        channel = await server.engine()
        for _ in range(signals):
            engine._on_signal(signal.SIGTERM)
        with pytest.raises(EngineDeadError, match="it was told to stop"):
            await channel.receive()
        assert await running == 0


async def test_when_the_server_ends_it_forgets_and_joins_the_next(key, cores):
    async with EngineServer(key) as server:
        port = server.listener.port
        engine, running = start(key, port)
        first = await server.engine()
        first.send(UtilityCall(1, "ping"))
        await first.receive()
    async with EngineServer(key, port=port) as server:
        second = await server.engine()
        assert second.request.engine_id == first.request.engine_id
        (core,) = cores
        assert core.got[1:] == [
            UtilityCall(0, "slots"),
            AbortRequests([5, 6]),
            UtilityCall(0, "ping"),
        ]
        second.send(UtilityCall(1, "ping"))
        assert await second.receive() == UtilityReply(1, "ping")
        second.die("silent, say")  # the server may lose it, too
        third = await server.engine()
        third.send(UtilityCall(7, "ping"))
        assert await third.receive() == UtilityReply(7, "ping")
        engine._on_signal(signal.SIGTERM)
        await third.leaving.wait()
        third.close()
        assert await running == 0
    assert len(cores) == 1


async def test_the_death_of_the_core_is_its_end(key):
    async with EngineServer(key) as server:
        _, running = start(key, server.listener.port)
        channel = await server.engine()
        channel.send(UtilityCall(1, "die"))
        with pytest.raises(EngineDeadError, match="as it was told"):
            await channel.receive()
        assert await running == 3


async def test_a_stopped_core_has_no_heart_beat(key, monkeypatch):
    monkeypatch.setattr(psutil.Process, "status", lambda self: psutil.STATUS_STOPPED)
    async with EngineServer(key, silence_s=0.3) as server:
        engine, running = start(key, server.listener.port)
        channel = await server.engine()
        with pytest.raises(EngineDeadError, match=r"silent for 0.3 s"):
            await channel.receive()
        engine._on_signal(signal.SIGTERM)
        engine._on_signal(signal.SIGTERM)
        assert await running == 0


async def test_nothing_is_loaded_for_a_server_that_refuses(key, cores):
    other = dataclasses.replace(CHECKPOINT, shape=from_hf_config(tiny_config("qwen3")))
    async with EngineServer(key) as server:
        _, running = start(key, server.listener.port, checkpoint=other)
        with pytest.raises(ConfigError, match="refuses this engine: another model"):
            await running
    assert cores == []


async def test_it_can_be_told_to_stop_while_it_waits_for_a_server(key, cores):
    engine, running = start(key, 9)  # nobody listens there
    while not hasattr(engine, "_leaving"):
        await asyncio.sleep(0)
    engine._on_signal(signal.SIGINT)
    assert await running == 0
    assert cores == []
