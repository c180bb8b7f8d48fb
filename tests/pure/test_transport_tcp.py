"""Both ends of the line to engines on other hosts, over the loopback interface."""

import asyncio
import contextlib
import os
import socket

import msgspec
import numpy as np
import pytest
import zmq
import zmq.asyncio

from twostroke import __version__
from twostroke.errors import ConfigError, EngineDeadError
from twostroke.keys import read_key, write_key
from twostroke.messages import (
    AbortRequests,
    EngineDead,
    EngineReady,
    Shutdown,
    ToEngine,
    UtilityReply,
    decoder_for,
    encode,
)
from twostroke.transport_tcp import (
    BEAT,
    MAX_MESSAGE_BYTES,
    MESSAGE,
    EngineListener,
    JoinedChannel,
    JoinRequest,
    ServerLine,
    ServerLostError,
    endpoint,
)

REQUEST = JoinRequest(
    version=__version__,
    engine_id="e1",
    role="decode",
    model="m",
    model_name="tiny",
    kv_transport="shm",
    host="here",
    pid=1,
)
READY = EngineReady(engine=0, max_model_len=8, num_blocks=2, block_size=4)


@pytest.fixture
def key(tmp_path):
    write_key(tmp_path / "key")
    return read_key(tmp_path / "key")


class Server:
    """A listener that takes every engine, and the channels of those that joined."""

    def __init__(self, key, silence_s=60.0, port=0):
        self.joined: asyncio.Queue[JoinedChannel] = asyncio.Queue()
        self.listener = EngineListener(
            "127.0.0.1",
            port,
            key,
            check=lambda request: "" if request.model == "m" else f"{request.model} is not m",
            check_ready=lambda channel, ready: "" if ready.block_size == 4 else "blocks differ",
            on_join=self.joined.put_nowait,
            silence_s=silence_s,
        )

    async def __aenter__(self):
        self.listener.start()
        return self

    async def __aexit__(self, *error):
        await self.listener.close()


@contextlib.asynccontextmanager
async def line_to(server, key, request=REQUEST):
    """An engine's line on which it has joined."""
    line = ServerLine("127.0.0.1", server.listener.port, key)
    try:
        await line.join(request)
        yield line
    finally:
        line.close()


def read(data):
    return decoder_for(ToEngine).decode(data)


async def test_messages_go_both_ways_in_order(key):
    async with Server(key) as server, line_to(server, key) as line:
        channel = await server.joined.get()
        assert channel.request == REQUEST
        channel.number = 7
        line.send(encode(READY))
        assert (await channel.receive()).engine == 7
        for i in range(100):
            channel.send(AbortRequests([i]))
            line.send(encode(UtilityReply(i, result=[1, "x"])))
        for i in range(100):
            assert read(await line.receive()) == AbortRequests([i])
            assert await channel.receive() == UtilityReply(i, result=[1, "x"])
        line.beat()
        line.leave()
        await channel.leaving.wait()
        channel.send(Shutdown(1.0))
        channel.close()
        assert read(await line.receive()) == Shutdown(1.0)
        assert await line.receive() is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"version": "0.0.1"}, f"the engine is version 0.0.1 and this server {__version__}"),
        ({"model": "n"}, "n is not m"),
    ],
)
async def test_both_sides_learn_why_an_engine_is_refused(key, changes, reason, caplog):
    async with Server(key) as server:
        with pytest.raises(ConfigError, match=f"refuses this engine: {reason}"):
            async with line_to(server, key, msgspec.structs.replace(REQUEST, **changes)):
                pass
        assert reason in caplog.text
        assert server.joined.empty()
        async with line_to(server, key):
            await server.joined.get()


async def test_a_request_of_another_version_need_not_be_readable(key):
    async with Server(key) as server:
        with pytest.raises(ConfigError, match="the engine is version 99 and"):
            async with line_to(server, key, {"version": "99", "role": 5}):
                pass


async def test_an_engine_can_be_refused_once_it_has_loaded(key):
    async with Server(key) as server, line_to(server, key) as line:
        channel = await server.joined.get()
        line.send(encode(msgspec.structs.replace(READY, block_size=5)))
        with pytest.raises(ConfigError, match="blocks differ"):
            await line.receive()
        with pytest.raises(EngineDeadError, match="blocks differ"):
            await channel.receive()


async def test_with_another_key_nobody_joins(key, tmp_path):
    write_key(tmp_path / "other")
    other = read_key(tmp_path / "other")
    async with Server(key) as server:
        with pytest.raises(ConfigError, match="does not accept our key, or is no twostroke server"):
            async with line_to(server, other):
                pass
        stolen = type(key)(server=key.server, engine=other.engine)  # knows the server's, no more
        with pytest.raises(ConfigError, match="does not accept our key"):
            async with line_to(server, stolen):
                pass
        async with line_to(server, key):
            await server.joined.get()


async def test_noise_from_strangers_does_no_harm(key):
    """Garbage, half handshakes, a plain ZMQ client, announced giants, and hundreds of them."""
    async with Server(key) as server:
        address = ("127.0.0.1", server.listener.port)
        noises = [
            b"GET / HTTP/1.1\r\n\r\n",
            os.urandom(5000),
            b"\xff" + bytes(8) + b"\x7f",  # the start of ZMQ's greeting, and silence
            # a whole greeting for CURVE, then a command that announces 2^62 bytes
            b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE" + bytes(48) + b"\x06\x40" + bytes(7),
        ]
        sockets = []
        for i in range(300):
            sockets.append(socket.create_connection(address))
            with contextlib.suppress(OSError):
                sockets[-1].sendall(noises[i % len(noises)])
        with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as plain:
            plain.linger = 0
            plain.connect(endpoint(*address))
            await plain.send_multipart([MESSAGE, encode(READY)])
            async with line_to(server, key) as line:
                channel = await server.joined.get()
                line.send(encode(READY))
                assert (await channel.receive()).num_blocks == 2
        for it in sockets:
            it.close()
        assert server.joined.empty()


@pytest.mark.parametrize(
    ("frames", "why"),
    [
        ([MESSAGE, b"\xc1"], "something that is not a message"),
        ([MESSAGE, encode(Shutdown())], "something that is not a message"),
        ([MESSAGE], "it sent 1 frames where 2 are due"),
        ([b"nonsense", b""], "a message of kind b'nonsense'"),
        ([MESSAGE, bytes(MAX_MESSAGE_BYTES + 1)], "its connection is gone"),
        ([MESSAGE, encode(EngineDead("out of memory"))], "out of memory"),
    ],
)
async def test_an_engine_that_talks_nonsense_is_dead_and_the_others_live(key, frames, why):
    async with Server(key, silence_s=2.0) as server, line_to(server, key) as line:
        first = await server.joined.get()
        async with line_to(server, key, msgspec.structs.replace(REQUEST, engine_id="e2")) as other:
            second = await server.joined.get()
            await line._socket.send_multipart(frames)
            with pytest.raises(EngineDeadError, match=why):
                await first.receive()
            with pytest.raises(EngineDeadError, match=why):
                first.send(Shutdown())
            with pytest.raises(EngineDeadError, match=why):  # and stays dead
                await first.receive()
            other.beat()
            other.send(encode(UtilityReply(1)))
            assert await second.receive() == UtilityReply(1)


async def test_silence_is_death_and_who_returns_is_a_stranger_until_it_joins_again(key):
    async with Server(key, silence_s=0.2) as server, line_to(server, key) as line:
        channel = await server.joined.get()
        with pytest.raises(
            EngineDeadError, match=r"engine e1 \(decode, process 1 on here\): .*0.2 s"
        ):
            await channel.receive()
        line.send(encode(READY))
        with pytest.raises(ServerLostError, match="does not know this engine"):
            await line.receive()
        await line.join(REQUEST)
        assert await server.joined.get() is not channel


async def test_an_engine_that_joins_twice_is_one_engine(key):
    async with Server(key) as server, line_to(server, key) as first:
        channel = await server.joined.get()
        await first.join(REQUEST)  # its question is answered again
        assert server.joined.empty()
        async with line_to(server, key) as second:
            with pytest.raises(EngineDeadError, match="joined again over a new connection"):
                await channel.receive()
            with pytest.raises(ServerLostError):
                await first.receive()
            (await server.joined.get()).send(Shutdown())
            assert read(await second.receive()) == Shutdown()


async def test_an_engine_whose_process_ends_is_noticed(key):
    async with Server(key, silence_s=2.0) as server:
        async with line_to(server, key):
            channel = await server.joined.get()
        with pytest.raises(EngineDeadError, match="its connection is gone"):
            await channel.receive()


async def test_a_server_that_restarts_knows_nobody(key):
    async with Server(key) as server:
        port = server.listener.port
        line = ServerLine("127.0.0.1", port, key)
        joining = asyncio.create_task(line.join(REQUEST))
        await joining
    assert await line.receive() is None  # it said farewell
    async with Server(key, port=port) as server:
        line.beat()
        with pytest.raises(ServerLostError, match="does not know"):
            await line.receive()
        await line.join(REQUEST)
        await server.joined.get()
        line.close()
        line.close()


async def test_an_engine_waits_for_its_server_and_not_for_a_silent_one(key):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    line = ServerLine("127.0.0.1", port, key)
    joining = asyncio.create_task(line.join(REQUEST))
    async with Server(key, port=port, silence_s=0.2):
        await joining
    assert await line.receive() is None
    with pytest.raises(ServerLostError, match=r"silent for 0.2 s"):
        await line.receive()
    line.close()


async def test_an_address_that_cannot_be_had(key):
    async with Server(key) as server:
        port = server.listener.port
        with pytest.raises(ConfigError, match=f"cannot join at 127.0.0.1:{port}: Address already"):
            Server(key, port=port)
    assert endpoint("::1", 5) == "tcp://[::1]:5"


async def test_array_messages_survive_the_way(key):
    from twostroke.messages import AddRequest, SamplingParams

    request = AddRequest(
        handle=1,
        request_id="r",
        prompt_token_ids=np.arange(100_000, dtype=np.int32),
        params=SamplingParams(),
        max_tokens=1,
    )
    async with Server(key) as server, line_to(server, key) as line:
        (await server.joined.get()).send(request)
        got = read(await line.receive())
        assert np.array_equal(got.prompt_token_ids, request.prompt_token_ids)
    assert BEAT == b"beat"
