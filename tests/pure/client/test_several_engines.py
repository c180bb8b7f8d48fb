"""One client, several engines: where requests go, and what each engine's end means."""

import asyncio
import contextlib
import random

import pytest

from tests.pure.client.channel import EchoChannel, ScriptedChannel, outputs
from tests.pure.client.test_engine import collect, running, until
from tests.pure.client.test_with_core import CONFIG, READY, expected, letter
from twostroke.client.engine import AsyncEngine
from twostroke.clock import WallClock
from twostroke.core.loop import EngineCore
from twostroke.errors import EngineDeadError, TwostrokeError
from twostroke.messages import (
    EngineDead,
    EngineProgress,
    EngineReady,
    EngineStats,
    FinishReason,
    SamplingParams,
    UtilityReply,
)
from twostroke.testing.byte_tokenizer import ByteTokenizer
from twostroke.testing.fake_engine import InProcessChannel
from twostroke.testing.fake_executor import FakeExecutor

LENGTH = FinishReason.LENGTH


def ready(engine: int) -> EngineReady:
    return EngineReady(engine, max_model_len=100 - engine, num_blocks=65, block_size=16)


async def test_requests_are_spread_and_samples_stay_together():
    channels = [EchoChannel(ready(0)), EchoChannel(ready(1))]
    async with running(channels) as engine:
        for _ in range(3):
            await collect(engine, SamplingParams(n=2, max_tokens=1))
    added = [[a.handle for a in channel.added] for channel in channels]
    assert added == [[1, 2, 5, 6], [3, 4]]


async def test_ready_is_when_all_are_and_progress_adds_up():
    channels, progress = [ScriptedChannel(None), ScriptedChannel(None)], []
    async with running(channels, on_progress=progress.append) as engine:
        channels[0].say(ready(0))
        channels[0].say(EngineProgress("weights", 3, 4))
        channels[1].say(EngineProgress("weights", 1, 4))
        await until(lambda: len(progress) == 2)
        assert progress[1] == EngineProgress("weights", 4, 8)
        assert engine.ready is None
        channels[1].say(ready(1))
        assert (await engine.wait_ready()).max_model_len == engine.max_model_len == 99


async def test_aborts_go_to_the_engine_that_has_the_request():
    channels = [ScriptedChannel(ready(i)) for i in range(3)]
    async with running(channels) as engine:
        tasks = [asyncio.create_task(collect(engine)) for _ in range(3)]
        stopping = SamplingParams(stop=("b",))
        tasks.append(asyncio.create_task(collect(engine, stopping)))
        await until(lambda: sum(len(c.added) for c in channels) == 4)
        (one, stopped), (two,), (_,) = ([a.handle for a in c.added] for c in channels)
        channels[0].say(outputs({stopped: b"abc"}))
        assert (await tasks[3])[0].text == "a"
        tasks[1].cancel()
        with pytest.raises(asyncio.CancelledError):
            await tasks[1]
        assert [c.aborted for c in channels] == [[stopped], [two], []]
        channels[0].say(outputs({one: b"a"}, [(one, LENGTH)]))
        await tasks[0]
        tasks[2].cancel()


async def test_calls_ask_every_engine():
    channels = [ScriptedChannel(ready(0)), ScriptedChannel(ready(1))]
    async with running(channels) as engine:

        async def ask(method: str, replies) -> object:
            asked = [len(channel.sent) for channel in channels]
            task = asyncio.create_task(engine.call(method))
            for channel, num_asked, reply in zip(channels, asked, replies, strict=True):
                await until(lambda c=channel, n=num_asked: len(c.sent) == n + 1)
                fields = {"error": reply} if isinstance(reply, str) else {"result": reply}
                channel.say(UtilityReply(channel.sent[-1].call_id, **fields))
            return await task

        slots = [[{"handle": 1}], [{"handle": 2}]]
        assert await ask("slots", slots) == [
            {"handle": 1, "engine": 0},
            {"handle": 2, "engine": 1},
        ]
        assert await ask("reset_prefix_cache", [True, False]) is False
        with pytest.raises(TwostrokeError, match="broken"):
            await ask("check_integrity", [1, "broken"])


async def test_a_reset_ends_the_affinity_of_engines_that_did_it():
    channels = [EchoChannel(ready(0)), EchoChannel(ready(1))]
    async with running(channels) as engine:
        for _ in range(2):
            await collect(engine, SamplingParams(max_tokens=1), prompt=[7] * 50)
        assert [len(c.added) for c in channels] == [2, 0]
        task = asyncio.create_task(engine.call("reset_prefix_cache"))
        for channel in channels:
            await until(lambda c=channel: len(c.sent) > len(c.added))
            channel.say(UtilityReply(channel.sent[-1].call_id, result=True))
        assert await task is True
        await collect(engine, SamplingParams(max_tokens=1), prompt=[7] * 50)
        assert [len(c.added) for c in channels] == [2, 1]


async def test_stats_add_up_and_metrics_name_the_engine_that_served():
    channels = [EchoChannel(ready(0)), EchoChannel(ready(1))]
    async with running(channels) as engine:
        for i, channel in enumerate(channels):
            channel.say(outputs({}, stats=EngineStats(num_running=1 + i, generation_tokens=5)))
        await until(lambda: engine.stats.num_running == 3)
        assert engine.stats.generation_tokens == 10
        for max_tokens in (1, 2, 3):
            await collect(engine, SamplingParams(max_tokens=max_tokens))
        text = engine.metrics.render().decode()
        for i, tokens in enumerate((4, 2)):
            labels = f'{{engine="{i}",model_name="m"}}'
            assert f"twostroke:request_generation_tokens_sum{labels} {tokens}.0" in text
            assert f"twostroke:num_requests_running{labels} {i + 1}.0" in text


async def test_one_engine_dies_and_requests_of_the_other_finish():
    channels = [ScriptedChannel(ready(0)), ScriptedChannel(ready(1))]
    async with running(channels) as engine:
        tasks = [asyncio.create_task(collect(engine)) for _ in range(2)]
        await until(lambda: all(c.added for c in channels))
        call = asyncio.create_task(engine.call("slots"))
        await until(lambda: all(len(c.sent) == 2 for c in channels))
        channels[1].say(EngineDead("boom"))
        for lost in (tasks[1], call):
            with pytest.raises(EngineDeadError, match=r"engine 1: the engine stopped: boom"):
                await lost
        assert engine.dead is not None
        for refused in (collect(engine), engine.call("slots"), engine.wait_ready()):
            with pytest.raises(EngineDeadError, match="engine 1"):
                await refused
        handle = channels[0].added[0].handle
        channels[0].say(outputs({handle: b"ok"}, [(handle, LENGTH)]))
        assert (await tasks[0])[0].text == "ok"


async def test_random_requests_with_random_aborts_over_real_cores():
    rng = random.Random(1)
    cores = [EngineCore(CONFIG, WallClock(), check=True) for _ in range(3)]
    channels = [InProcessChannel(core, FakeExecutor(token=letter), READY) for core in cores]
    engine = AsyncEngine(
        channels,
        ByteTokenizer(),
        model_name="m",
        max_model_len=128,
        eos_token_ids=[257],
        max_num_queued_reqs=1000,
    )
    engine.start()

    async def one(i: int) -> None:
        prompt, name = [i % 5] * rng.randint(1, 60), f"r{i:03}"
        params = SamplingParams(max_tokens=rng.randint(1, 40))
        leave_after, text = rng.choice([None, 0, 3]), ""
        generator = engine.generate(prompt, params, request_id=name)
        async with contextlib.aclosing(generator) as outs:
            async for out in outs:
                text += out.text
                if leave_after is not None and len(text) > leave_after:
                    break
        assert text == expected(name, len(prompt), len(text))

    await asyncio.gather(*(one(i) for i in range(100)))
    assert await engine.call("slots") == []
    await engine.call("check_integrity")
    assert engine.num_unfinished == 0
    assert [engine.dispatcher.routing.load(i) for i in range(3)] == [0, 0, 0]
    assert all(core.stats().generation_tokens > 0 for core in cores)
    await engine.close()
    for channel in channels:
        channel.close()


class Deaf(ScriptedChannel):
    """An engine that is gone before anybody has said so: nothing can be sent."""

    is_gone = False

    def send(self, message) -> None:
        if self.is_gone:
            raise EngineDeadError("the engine is not connected")
        super().send(message)


async def test_what_cannot_be_sent_fails_and_leaves_nothing():
    channels = [Deaf(ready(0)), ScriptedChannel(ready(1))]
    async with running(channels) as engine:
        task = asyncio.create_task(collect(engine))
        await until(lambda: channels[0].added)
        channels[0].is_gone = True
        task.cancel()  # its abort cannot be sent, which is no error
        with pytest.raises(asyncio.CancelledError):
            await task
        results = await asyncio.gather(
            *(collect(engine, final_only=True) for _ in range(2)),
            _answer(channels[1]),
            return_exceptions=True,
        )
        assert [type(result) for result in results[:2]] == [list, EngineDeadError]
        assert engine.num_unfinished == 0
        assert [engine.dispatcher.routing.load(i) for i in range(2)] == [0, 0]


async def _answer(channel: ScriptedChannel) -> None:
    await until(lambda: channel.added)
    handle = channel.added[0].handle
    channel.say(outputs({handle: b"ok"}, [(handle, LENGTH)]))
