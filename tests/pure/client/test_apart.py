"""Prefill and decode apart, over real cores: what comes out is what one engine gives."""

import asyncio
import contextlib
import random

import pytest

from tests.pure.client.apart import Deployment, deployed
from tests.pure.client.test_engine import until
from twostroke.errors import EngineDeadError
from twostroke.ledger import Interval
from twostroke.messages import SamplingParams
from twostroke.testing.fake_kv import continuation

MODES = pytest.mark.parametrize("mode", ["pull", "stream"])


async def ask(it: Deployment, prompt: list[int], *, name: str = "r", **fields):
    """The token ids of each sample, and the finish reasons."""
    leave_after = fields.pop("leave_after", None)
    on_close = fields.pop("on_close", None)
    params = SamplingParams(temperature=0.0, **fields)
    tokens = {i: [] for i in range(params.n)}
    reasons = {}
    outputs = it.engine.generate(prompt, params, request_id=name, on_close=on_close)
    async with contextlib.aclosing(outputs) as outs:
        async for out in outs:
            tokens[out.index] += out.token_ids
            if out.finish_reason is not None:
                reasons[out.index] = out.finish_reason
            if leave_after is not None and sum(map(len, tokens.values())) >= leave_after:
                break
    return tokens, reasons


async def drained(it: Deployment) -> None:
    """Nothing is left of any request, on any engine that lives."""
    gone = set(it.engine.gone)
    await until(lambda: all(p.is_empty for i, p in enumerate(it.parts) if i not in gone))
    assert it.engine.num_unfinished == 0
    assert it.engine.dispatcher.num_holds == it.engine.dispatcher.num_waiting == 0


@MODES
async def test_tokens_are_those_of_one_engine(mode):
    records = []
    rng = random.Random(0)
    prompts = [[rng.randrange(1000) for _ in range(rng.randint(2, 60))] for _ in range(30)]
    prompts += [prompts[0][:20] + [i] * 5 for i in range(5)]  # prefixes that are cached
    async with deployed("prefill", "decode", "decode", kv_mode=mode) as it:
        answers = await asyncio.gather(
            *(
                ask(it, prompt, name=f"r{i}", max_tokens=2 + i % 20, on_close=records.extend)
                for i, prompt in enumerate(prompts)
            )
        )
        for i, (prompt, (tokens, reasons)) in enumerate(zip(prompts, answers, strict=True)):
            assert tokens == {0: continuation(prompt, 2 + i % 20)}
            assert reasons == {0: "length"}
        counters = it.engine.dispatcher.counters
        assert counters.decisions == {("handed_over", "always"): len(prompts)}
        assert counters.num_transfers > 0
        assert not counters.retries
        await drained(it)
    for record in records:
        ledger = record.ledger
        assert sum(ledger.spent_ns) == ledger.total_ns
        assert ledger.first_token_ns is not None
        assert ledger.spent_ns[Interval.PREFILL] > 0 or mode == "stream"
        assert ledger.spent_ns[Interval.DECODE] > 0


@MODES
async def test_samples_of_one_prompt(mode):
    async with deployed("prefill", "decode", "decode", kv_mode=mode) as it:
        prompt = list(range(30))
        tokens, _ = await ask(it, prompt, n=3, max_tokens=6)
        assert tokens == dict.fromkeys(range(3), continuation(prompt, 6))
        assert it.engine.stats.generation_tokens >= 18
        await drained(it)


@MODES
async def test_clients_leave_at_any_time(mode):
    rng = random.Random(mode)
    async with deployed("prefill", "prefill", "decode", kv_mode=mode) as it:

        async def one(i: int) -> None:
            prompt = [i % 7] * rng.randint(2, 60)
            task = asyncio.create_task(
                ask(it, prompt, name=f"r{i}", max_tokens=20, leave_after=rng.choice([None, 1, 5]))
            )
            if rng.random() < 0.5:
                for _ in range(rng.randint(0, 40)):
                    await asyncio.sleep(0)
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                tokens, _ = await task
                assert tokens[0] == continuation(prompt, len(tokens[0]))

        await asyncio.gather(*(one(i) for i in range(60)))
        await drained(it)


async def test_a_burst_waits_in_the_router_and_preempts_nobody():
    records = []
    async with deployed("prefill", "decode", fields={"num_blocks": 41}) as it:  # of 160 tokens
        prompts = [[i] * 30 for i in range(16)]
        answers = await asyncio.gather(
            *(
                ask(it, prompt, name=f"r{i}", max_tokens=10, on_close=records.extend)
                for i, prompt in enumerate(prompts)
            )
        )
        for prompt, (tokens, _) in zip(prompts, answers, strict=True):
            assert tokens[0] == continuation(prompt, 10)
        assert it.engine.stats.num_preemptions == 0
        await drained(it)
    held = [record.ledger.spent_ns[Interval.HELD] for record in records]
    assert sum(ns > 0 for ns in held) >= 12


@MODES
async def test_a_load_that_fails_is_computed_by_d(mode):
    async with deployed("prefill", "decode", kv_mode=mode) as it:
        it.parts[1].reader.breaks = True
        prompt = list(range(40))
        tokens, _ = await ask(it, prompt, max_tokens=8)
        assert tokens[0] == continuation(prompt, 8)
        assert it.engine.dispatcher.counters.recomputes.total() == 1
        text = it.engine.metrics.render().decode()
        assert 'twostroke:handoff_recomputes_total{model_name="m",reason=' in text
        await drained(it)


async def test_a_load_that_hangs_ends_in_time():
    async with deployed("prefill", "decode", handoff_timeout_s=0.2, lease_s=0.1) as it:
        it.parts[1].reader.stalls = True
        prompt = list(range(40))
        tokens, _ = await ask(it, prompt, max_tokens=8)
        assert tokens[0] == continuation(prompt, 8)
        assert it.engine.dispatcher.counters.recomputes.total() == 1
        await drained(it)


@MODES
async def test_p_dies_and_others_take_over(mode):
    async with deployed("prefill", "prefill", "decode", kv_mode=mode) as it:
        prompts = [[i] * 50 for i in range(12)]
        tasks = [asyncio.create_task(ask(it, p, max_tokens=8)) for p in prompts]
        await until(lambda: it.parts[0].channel.sent)
        for _ in range(4):
            await asyncio.sleep(0)
        it.kill(0)
        for prompt, (tokens, _) in zip(prompts, await asyncio.gather(*tasks), strict=True):
            assert tokens[0] == continuation(prompt, 8)
        assert list(it.engine.gone) == [0]
        assert it.engine.dead is None
        await drained(it)
        it.kill(1)
        await until(lambda: len(it.engine.gone) == 2)
        tokens, _ = await ask(it, prompts[0], max_tokens=8)
        assert tokens[0] == continuation(prompts[0], 8)


async def test_d_dies_and_comes_back():
    async with deployed("prefill", "decode") as it:
        prompt = list(range(30))
        task = asyncio.create_task(ask(it, prompt, max_tokens=60))
        await until(lambda: it.engine.stats.generation_tokens > 5)
        it.kill(1)
        with pytest.raises(EngineDeadError, match="engine 1: killed"):
            await task
        with pytest.raises(EngineDeadError, match="engine 1: killed"):
            await ask(it, prompt, max_tokens=8)
        assert it.engine.dead is not None
        assert it.join("decode") == 1  # in its place
        tokens, _ = await ask(it, prompt, max_tokens=8)
        assert tokens[0] == continuation(prompt, 8)
        assert it.engine.dead is None
        assert it.engine.gone == {}


async def test_an_engine_joins_and_is_used():
    async with deployed("decode") as it:
        prompt = list(range(30))
        assert (await ask(it, prompt, max_tokens=4))[0][0] == continuation(prompt, 4)
        assert it.join("prefill") == 1
        await until(lambda: it.engine.engines[1]["state"] == "ready")
        prompt = prompt[::-1]
        assert (await ask(it, prompt, max_tokens=4))[0][0] == continuation(prompt, 4)
        assert it.engine.dispatcher.counters.decisions == {
            ("whole", "no_prefill_engine"): 1,
            ("handed_over", "always"): 1,
        }
        await drained(it)


async def test_a_role_is_switched_while_requests_run():
    async with deployed("prefill", "decode", "decode") as it:
        prompts = [[i] * 20 for i in range(12)]
        tasks = [asyncio.create_task(ask(it, p, max_tokens=20)) for p in prompts]
        await until(lambda: it.engine.stats.generation_tokens > 30)
        it.engine.set_role(2, "prefill")
        for prompt, (tokens, _) in zip(prompts, await asyncio.gather(*tasks), strict=True):
            assert tokens[0] == continuation(prompt, 20)
        await until(lambda: it.engine.engines[2]["role"] == "prefill")
        tasks = [asyncio.create_task(ask(it, p, max_tokens=20)) for p in prompts]
        await asyncio.gather(*tasks)
        assert any(getattr(m, "kv_send", None) for m in it.parts[2].channel.sent)
        await drained(it)


async def test_the_next_turn_finds_what_was_generated():
    async with deployed("prefill", "decode", "decode") as it:
        prompt = list(range(30))
        tokens, _ = await ask(it, prompt, max_tokens=20)
        routing = it.engine.dispatcher.routing
        turn = [*prompt, *tokens[0], 7, 8, 9]
        cached = [routing.cached_tokens(i, routing.keys_of(turn)) for i in (1, 2)]
        assert sorted(cached) == [0, 48]
        (home,) = (i for i, n in zip((1, 2), cached, strict=True) if n)
        more, _ = await ask(it, turn, max_tokens=5)
        assert more[0] == continuation(turn, 5)
        assert sum(hasattr(m, "prompt_token_ids") for m in it.parts[home].channel.sent) == 2
