"""The client on top of the real core, with an executor that needs no model."""

import asyncio
import contextlib
import random

import pytest

from twostroke.client.engine import AsyncEngine
from twostroke.clock import WallClock
from twostroke.config import SchedulerConfig
from twostroke.core.loop import EngineCore
from twostroke.errors import EngineDeadError
from twostroke.messages import AbortRequests, EngineReady, SamplingParams
from twostroke.testing.byte_tokenizer import ByteTokenizer
from twostroke.testing.fake_engine import InProcessChannel
from twostroke.testing.fake_executor import FakeExecutor

CONFIG = SchedulerConfig(
    num_blocks=40, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=128
)
READY = EngineReady(0, CONFIG.max_model_len, CONFIG.num_blocks, CONFIG.block_size)


def letter(request_id: str, position: int) -> int:
    return ord("a") + (position * 7 + len(request_id)) % 26


@contextlib.asynccontextmanager
async def running():
    core = EngineCore(CONFIG, WallClock(), check=True)
    channel = InProcessChannel(core, FakeExecutor(token=letter), READY)
    engine = AsyncEngine(
        channel,
        ByteTokenizer(),
        model_name="m",
        max_model_len=128,
        eos_token_ids=[257],
        max_num_queued_reqs=1000,
    )
    engine.start()
    try:
        yield engine, channel
    finally:
        await engine.close()
        channel.close()


def expected(request_id: str, num_prompt: int, num_tokens: int) -> str:
    return "".join(chr(letter(request_id, num_prompt + i)) for i in range(num_tokens))


async def test_streams_and_ledgers_of_a_batch():
    records = []
    async with running() as (engine, _):

        async def one(i: int) -> str:
            prompt, name = [1] * (i * 5 + 1), f"r{i:02}"
            params = SamplingParams(max_tokens=i + 1)
            outs = engine.generate(prompt, params, request_id=name, on_close=records.extend)
            return "".join([out.text async for out in outs])

        texts = await asyncio.gather(*map(one, range(20)))
        assert texts == [expected(f"r{i:02}", i * 5 + 1, i + 1) for i in range(20)]
        assert await engine.call("slots") == []
        assert engine.stats.num_running == engine.stats.num_waiting == 0
        assert engine.stats.generation_tokens == sum(range(1, 21))
    assert len(records) == 20
    for record in records:
        ledger = record.ledger
        assert sum(ledger.spent_ns) == ledger.total_ns
        assert ledger.first_token_ns is not None
        assert record.finish_reason == "length"


async def test_a_stop_string_ends_a_request_in_the_core():
    text = expected("r0", 5, 30)
    async with running() as (engine, channel):
        params = SamplingParams(max_tokens=100, stop=(text[10:13],))
        outs = [o async for o in engine.generate([1] * 5, params, request_id="r0", final_only=True)]
        assert (outs[0].text, outs[0].finish_reason) == (text[:10], "stop")
        assert await engine.call("slots") == []
        assert [type(m) for m in channel.sent].count(AbortRequests) == 1


async def test_random_requests_with_random_aborts_leave_nothing():
    rng = random.Random(0)
    async with running() as (engine, channel):

        async def one(i: int) -> str:
            num_prompt, name = rng.randint(1, 60), f"r{i:03}"
            params = SamplingParams(max_tokens=rng.randint(1, 60), n=rng.choice([1, 1, 3]))
            leave_after = rng.choice([None, 0, 1, 5])
            texts = dict.fromkeys(range(params.n), "")
            generator = engine.generate([i % 200] * num_prompt, params, request_id=name)
            async with contextlib.aclosing(generator) as outs:
                taken = 0
                async for out in outs:
                    texts[out.index] += out.text
                    taken += 1
                    if leave_after is not None and taken > leave_after:
                        break
            for index, text in texts.items():
                core_id = name if params.n == 1 else f"{name}-{index}"
                assert text == expected(core_id, num_prompt, len(text))
            return name

        tasks = [asyncio.create_task(one(i)) for i in range(200)]
        for task in rng.sample(tasks, 30):
            for _ in range(rng.randint(0, 3)):
                await asyncio.sleep(0)
            task.cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(d) for d in done} <= {str, asyncio.CancelledError}
        assert engine.num_unfinished == 0
        assert await engine.call("slots") == []
        await engine.call("check_integrity")
        aborted = [h for m in channel.sent if isinstance(m, AbortRequests) for h in m.handles]
        assert len(aborted) == len(set(aborted))


async def test_a_killed_engine_ends_its_requests():
    async with running() as (engine, channel):
        generator = engine.generate([1], SamplingParams(max_tokens=100), request_id="r")
        await anext(generator)
        channel.kill("out of memory")
        with pytest.raises(EngineDeadError, match="out of memory"):
            async for _ in generator:
                pass
