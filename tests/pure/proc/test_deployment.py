"""Engines join and leave a server: real sockets, engines that only say what the test says."""

import asyncio
import contextlib
import dataclasses
import logging

import msgspec
import numpy as np
import pytest

from tests.pure.proc.test_engine_main import CHECKPOINT
from twostroke import __version__
from twostroke.checkpoint import fingerprint
from twostroke.client.engine import AsyncEngine
from twostroke.config import resolve
from twostroke.errors import ConfigError
from twostroke.keys import read_key, write_key
from twostroke.kv_messages import KvConnect, KvEndpoint, KvLayoutRecord, KvLink
from twostroke.messages import (
    NO_TOKENS,
    AddRequest,
    EngineOutputs,
    EngineReady,
    Finished,
    FinishReason,
    SamplingParams,
    ToEngine,
    decoder_for,
    encode,
)
from twostroke.proc.deployment import Deployment
from twostroke.testing.byte_tokenizer import ByteTokenizer
from twostroke.transport_tcp import JoinRequest, ServerLine

LAYOUT = KvLayoutRecord(
    model="m", dtype="float32", num_layers=2, num_kv_heads=2, head_dim=4, block_size=4, num_blocks=9
)


@pytest.fixture
def key(tmp_path):
    write_key(tmp_path / "key")
    return tmp_path / "key"


@contextlib.asynccontextmanager
async def deployed(key):
    """A server without engines that some may join."""
    settings = {"engines_listen": "127.0.0.1:0", "key": str(key)}
    config, _ = resolve(settings, environ={})
    engine = AsyncEngine(
        [],
        ByteTokenizer(),
        model_name="tiny",
        max_model_len=64,
        eos_token_ids=(),
        max_num_queued_reqs=9,
        roles=(),
        status_interval_s=0,
    )
    engine.start()
    deployment = Deployment(config, CHECKPOINT, engine, read_key(key))
    watching = asyncio.create_task(deployment.watch())
    try:
        yield deployment, engine
    finally:
        watching.cancel()
        await engine.close()
        await deployment.close()


class Joined:
    """An engine's line, on which it says what it is told to."""

    def __init__(self, key, deployment):
        self.line = ServerLine("127.0.0.1", deployment.listener.port, read_key(key))
        self.engine_id = ""

    async def join(self, role, engine_id, **changes):
        request = JoinRequest(
            version=__version__,
            engine_id=engine_id,
            role=role,
            model=fingerprint(CHECKPOINT, 0),
            model_name="tiny",
            kv_transport="shm",
            host="here",
            pid=1,
        )
        self.engine_id = engine_id
        await self.line.join(msgspec.structs.replace(request, **changes))
        return self

    def ready(self, **changes):
        layout = msgspec.structs.replace(LAYOUT, **changes)
        kv = KvEndpoint(engine_id=self.engine_id, transport="shm", addresses=["a"], layout=layout)
        self.say(EngineReady(0, max_model_len=32, num_blocks=9, block_size=4, kv=kv))

    def say(self, message):
        self.line.send(encode(message))

    async def hear(self, kind):
        while True:
            data = await self.line.receive()
            assert data is not None
            if isinstance(message := decoder_for(ToEngine).decode(data), kind):
                return message


def outputs(**fields):
    return EngineOutputs(
        handles=np.empty(0, np.int64), num_tokens=NO_TOKENS, token_ids=NO_TOKENS, **fields
    )


async def test_who_reads_from_whom_is_told(key):
    async with deployed(key) as (deployment, engine):
        p = await Joined(key, deployment).join("prefill", "p")
        d = await Joined(key, deployment).join("decode", "d")
        p.ready()
        d.ready(block_size=2)  # may differ
        assert (await d.hear(KvConnect)).endpoint.engine_id == "p"
        d.say(outputs(kv_links=[KvLink(engine_id="p", message_s=2e-6, bytes_per_s=3e9)]))
        await engine.wait_ready()
        facts = {name: (value, reason) for name, value, reason in await deployment.facts()}
        assert facts["Engines"] == ("0: prefill, 1: decode", "--join")
        assert facts["Engine 1 reads from 0"] == (
            "3.00 GB/s, 0 us and 2.0 us a message",
            "measured",
        )
        assert facts["Engines may join"][0] == f"127.0.0.1:{deployment.listener.port}"
        p.line.close()
        d.line.close()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": "other", "model_name": "x"}, "its model x is not tiny as it is here"),
        ({"kv_transport": "nixl"}, "reads KV over nixl, and the engines here over shm; start both"),
    ],
)
async def test_engines_that_do_not_fit_are_refused(key, changes, reason):
    async with deployed(key) as (deployment, engine):
        joined = Joined(key, deployment)
        with pytest.raises(ConfigError, match=reason):
            await joined.join("decode", "d", **changes)
        joined.line.close()
        assert engine.engines == []


async def test_engines_whose_kv_differs_are_refused_once_they_have_loaded(key):
    async with deployed(key) as (deployment, _):
        p = await Joined(key, deployment).join("prefill", "p")
        p.ready()
        d = await Joined(key, deployment).join("decode", "d")
        d.ready(dtype="bfloat16")
        with pytest.raises(ConfigError, match="KV has dtype bfloat16, and float32 in engine 0"):
            await d.hear(KvConnect)
        plain = await Joined(key, deployment).join("decode", "e")
        plain.say(EngineReady(0, max_model_len=32, num_blocks=9, block_size=4))
        with pytest.raises(ConfigError, match="cannot be read by others"):
            await plain.hear(KvConnect)
        for it in (p, d, plain):
            it.line.close()


async def test_one_that_leaves_finishes_what_it_has_and_gets_nothing_new(key, caplog):
    caplog.set_level(logging.INFO)
    async with deployed(key) as (deployment, engine):
        first = await Joined(key, deployment).join("both", "a")
        first.ready()
        await engine.wait_ready()

        async def ask(name):
            params = SamplingParams(max_tokens=1)
            return [it async for it in engine.generate([1, 2, 3], params, request_id=name)]

        asked = asyncio.create_task(ask("r1"))
        running = await first.hear(AddRequest)
        second = await Joined(key, deployment).join("both", "b")
        second.ready()
        while len(engine.engines) < 2 or engine.engines[1]["state"] != "ready":
            await engine.wait_change()
        first.line.leave()
        while not engine.dispatcher.fleet[0].is_leaving:
            await asyncio.sleep(0.01)
        others = [asyncio.create_task(ask(f"s{i}")) for i in range(3)]
        handles = [(await second.hear(AddRequest)).handle for _ in others]
        second.say(outputs(finished=[Finished(it, FinishReason.LENGTH) for it in handles]))
        await asyncio.gather(*others)
        first.say(outputs(finished=[Finished(running.handle, FinishReason.LENGTH)]))
        assert (await asked)[-1].finish_reason == "length"
        assert await first.line.receive() is None  # farewell
        while 0 not in engine.gone:
            await engine.wait_change()
        assert "it has left" in engine.gone[0]
        assert engine.dead is None
        first.line.close()
        second.line.close()
    assert "engine 0 wants to leave" in caplog.text


async def test_a_server_that_engines_may_join_outlives_them_all(key):
    async with deployed(key) as (deployment, engine):
        for name in ("a", "b"):
            joined = await Joined(key, deployment).join("both", name)
            joined.ready()
            while engine.dead is not None or engine.ready is None:
                await engine.wait_change()
            joined.line.leave()
            assert await joined.line.receive() is None
            while engine.dead is None:
                await engine.wait_change()
            joined.line.close()


def test_the_checkpoint_decides_what_fits():
    assert fingerprint(CHECKPOINT, 0) != fingerprint(CHECKPOINT, 1)  # dummy weights of two seeds
    longer = dataclasses.replace(CHECKPOINT.shape, vocab_size=300)
    assert fingerprint(dataclasses.replace(CHECKPOINT, shape=longer), 0) != fingerprint(
        CHECKPOINT, 0
    )
