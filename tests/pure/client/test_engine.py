import asyncio
import contextlib
import logging

import pytest

from tests.pure.client.channel import READY, EchoChannel, ScriptedChannel, outputs
from twostroke.client.engine import AsyncEngine
from twostroke.errors import (
    ContextLengthError,
    EngineDeadError,
    QueueFullError,
    RequestError,
    TwostrokeError,
)
from twostroke.messages import (
    EngineDead,
    EngineProgress,
    EngineReady,
    EngineStats,
    EventKind,
    Finished,
    FinishReason,
    PrefillInfo,
    RequestLogprobs,
    SamplingParams,
    TokenLogprobs,
    UtilityCall,
    UtilityReply,
)
from twostroke.testing.byte_tokenizer import ByteTokenizer

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
PROMPT = list(b"prompt")


@contextlib.asynccontextmanager
async def running(channel, **options):
    engine = AsyncEngine(
        channel,
        ByteTokenizer(),
        model_name="m",
        max_model_len=100,
        eos_token_ids=[257],
        max_num_queued_reqs=options.pop("max_num_queued_reqs", 8),
        **options,
    )
    engine.start()
    try:
        yield engine
    finally:
        await engine.close()
        assert engine.num_unfinished == 0


async def until(condition) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0)


async def collect(engine, params=None, prompt=PROMPT, **options):
    generator = engine.generate(prompt, params or SamplingParams(), request_id="r", **options)
    return [output async for output in generator]


async def test_tokens_stream_as_text():
    channel = ScriptedChannel()
    async with running(channel) as engine:
        generator = engine.generate(PROMPT, SamplingParams(max_tokens=9), request_id="r")
        first = asyncio.ensure_future(anext(generator))
        await until(lambda: channel.added)
        (added,) = channel.added
        assert added.prompt_token_ids.tolist() == PROMPT
        assert (added.max_tokens, added.eos_token_ids, added.request_id) == (9, (257,), "r")
        channel.say(outputs({added.handle: b"He"}, prefills=[PrefillInfo(added.handle, 4)]))
        output = await first
        assert (output.text, output.token_ids, output.cached_tokens) == ("He", [72, 101], 4)
        channel.say(outputs({added.handle: [0xC3]}))  # half a character: a token without text
        output = await anext(generator)
        assert (output.text, output.token_ids) == ("", [0xC3])
        channel.say(outputs({added.handle: [0xA9, 257]}, [(added.handle, STOP)]))
        output = await anext(generator)
        assert (output.text, output.token_ids) == ("é", [0xA9, 257])
        assert (output.finish_reason, output.stop_reason) == ("stop", None)
        with pytest.raises(StopAsyncIteration):
            await anext(generator)
        assert channel.aborted == []


async def test_a_slow_consumer_gets_one_merged_output():
    channel = ScriptedChannel()
    async with running(channel) as engine:
        generator = engine.generate(PROMPT, SamplingParams(logprobs=0), request_id="r")
        first = asyncio.ensure_future(anext(generator))
        await until(lambda: channel.added)
        handle = channel.added[0].handle
        tokens = [TokenLogprobs([i], [-0.5], 1) for i in b"abcd"]
        for i, token in enumerate(b"abcd"):
            entry = RequestLogprobs(handle, [tokens[i]])
            channel.say(outputs({handle: [token]}, logprobs=[entry]))
        assert (await first).text == "a"
        channel.say(outputs({}, [(handle, FinishReason.ABORT)]))
        await until(lambda: engine.num_unfinished == 0)
        output = await anext(generator)
        assert (output.text, output.token_ids, output.finish_reason) == (
            "bcd",
            [98, 99, 100],
            "abort",
        )
        assert output.logprobs == tokens[1:]


async def test_final_only_wakes_once():
    async with running(EchoChannel()) as engine:
        (output,) = await collect(engine, SamplingParams(max_tokens=8), final_only=True)
        assert (output.text, output.finish_reason) == ("promptpr", "length")


async def test_samples_share_a_request():
    channel = EchoChannel()
    async with running(channel) as engine:
        params = SamplingParams(n=3, max_tokens=2, seed=(1 << 63) - 2, prompt_logprobs=1)
        found = await collect(engine, params)
        assert {o.index for o in found if o.finish_reason == "length"} == {0, 1, 2}
        assert [a.params.seed for a in channel.added] == [(1 << 63) - 2, (1 << 63) - 1, -(1 << 63)]
        assert [a.request_id for a in channel.added] == ["r-0", "r-1", "r-2"]
        assert [a.params.prompt_logprobs for a in channel.added] == [1, None, None]
        found = await collect(engine, params, final_only=True)
        assert [(o.index, o.text) for o in found] == [(0, "pr"), (1, "pr"), (2, "pr")]


async def test_requests_without_a_seed_get_different_ones_that_repeat():
    seeds = []
    for _ in range(2):
        channel = EchoChannel()
        async with running(channel, default_seed=7) as engine:
            await collect(engine, SamplingParams(n=2))
            await collect(engine)
            seeds.append([a.params.seed for a in channel.added])
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 3
    assert all(-(1 << 63) <= seed < 1 << 63 for seed in seeds[0])


async def test_a_stop_string_drops_later_tokens_and_aborts_once():
    channel = ScriptedChannel()
    async with running(channel) as engine:
        task = asyncio.create_task(collect(engine, SamplingParams(stop=("END",), logprobs=0)))
        await until(lambda: channel.added)
        handle = channel.added[0].handle
        assert channel.added[0].params.stop == ()
        channel.say(outputs({handle: b"xEN"}))
        entry = RequestLogprobs(handle, [TokenLogprobs([i], [0.0], 1) for i in b"D!!"])
        channel.say(outputs({handle: b"D!!"}, logprobs=[entry]))
        channel.say(outputs({handle: b"more"}))  # the core did not know yet
        channel.say(outputs({}, [(handle, FinishReason.ABORT)]))
        found = await task
        assert "".join(o.text for o in found) == "x"
        assert found[-1].token_ids[-1:] == list(b"D")
        assert len(found[-1].logprobs or []) == 1
        assert (found[-1].finish_reason, found[-1].stop_reason) == ("stop", "END")
        assert channel.aborted == [handle]


async def test_a_stop_string_in_the_last_step_needs_no_abort():
    channel = ScriptedChannel()
    async with running(channel) as engine:
        task = asyncio.create_task(collect(engine, SamplingParams(stop=("b",))))
        await until(lambda: channel.added)
        handle = channel.added[0].handle
        channel.say(outputs({handle: b"abc"}, [(handle, LENGTH)]))
        (output,) = await task
        assert (output.text, output.token_ids, output.stop_reason) == ("a", [97, 98], "b")
        assert channel.aborted == []


async def test_the_token_that_stops_is_text_only_when_asked_for():
    for include, text in ((False, "a"), (True, "a!")):
        channel = ScriptedChannel()
        async with running(channel) as engine:
            params = SamplingParams(stop_token_ids=(33,), include_stop_str_in_output=include)
            task = asyncio.create_task(collect(engine, params))
            await until(lambda c=channel: c.added)
            handle = channel.added[0].handle
            channel.say(outputs({handle: b"a!"}, [Finished(handle, STOP, stop_token_id=33)]))
            (output,) = await task
            assert (output.text, output.token_ids, output.stop_reason) == (text, [97, 33], 33)


async def test_prompt_logprobs_come_once_and_complete():
    channel = ScriptedChannel()
    async with running(channel) as engine:
        task = asyncio.create_task(
            collect(engine, SamplingParams(prompt_logprobs=0), prompt=[1, 2, 3])
        )
        await until(lambda: channel.added)
        handle = channel.added[0].handle
        pieces = [TokenLogprobs([i], [-1.0], 1) for i in (2, 3)]
        channel.say(outputs({}, logprobs=[RequestLogprobs(handle, pieces[:1], prompt_start=1)]))
        # a preemption in between: what was sent before comes again
        channel.say(outputs({}, logprobs=[RequestLogprobs(handle, pieces[:1], prompt_start=1)]))
        entry = RequestLogprobs(handle, pieces[1:], prompt_start=2)
        channel.say(outputs({handle: b"a"}, logprobs=[entry]))
        channel.say(outputs({handle: b"b"}, [(handle, LENGTH)]))
        found = await task
        assert [o.prompt_logprobs for o in found] in ([[None, *pieces]], [[None, *pieces], None])


async def test_leaving_in_any_way_aborts_exactly_once():
    channel = ScriptedChannel()
    async with running(channel) as engine:
        params = SamplingParams(n=3)
        # closed between outputs, one sample ended already
        generator = engine.generate(PROMPT, params, request_id="r")
        first = asyncio.ensure_future(anext(generator))
        await until(lambda: len(channel.added) == 3)
        one, two, three = (a.handle for a in channel.added)
        channel.say(outputs({one: b"a"}, [(one, LENGTH)]))
        assert (await first).finish_reason == "length"
        await generator.aclose()
        assert channel.aborted == [two, three]
        # cancelled while waiting; timed out; still unknown to the core
        task = asyncio.create_task(collect(engine))
        await until(lambda: len(channel.added) == 4)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await collect(engine)
        assert channel.aborted == [a.handle for a in channel.added[1:]]

        # a consumer that fails between outputs
        async def fail() -> None:
            async with contextlib.aclosing(engine.generate(PROMPT, params, request_id="r")) as outs:
                async for _ in outs:
                    raise ZeroDivisionError

        task = asyncio.create_task(fail())
        await until(lambda: engine.num_unfinished == 3)
        channel.say(outputs({channel.added[-3].handle: b"a"}))
        with pytest.raises(ZeroDivisionError):
            await task
        assert len(channel.aborted) == len(channel.added) - 1
        assert engine.num_unfinished == 0


async def test_a_full_queue_says_when_to_come_back():
    channel = ScriptedChannel()
    async with running(channel, max_num_queued_reqs=3) as engine:
        task = asyncio.create_task(collect(engine, SamplingParams(n=2)))
        await until(lambda: engine.num_unfinished == 2)
        with pytest.raises(QueueFullError) as caught:
            await collect(engine, SamplingParams(n=2))
        assert 1 <= caught.value.retry_after_s <= 60
        with pytest.raises(RequestError, match="at most 3") as too_many:
            await collect(engine, SamplingParams(n=4))
        assert too_many.value.param == "n"
        assert len(channel.added) == 2
        assert b'admission_rejections_total{engine="0",model_name="m",reason="queue_full"} 1.0' in (
            engine.metrics.render()
        )
        task.cancel()


@pytest.mark.parametrize(
    ("prompt", "params", "words"),
    [
        (100, SamplingParams(), "100 tokens, which leaves no room.*maximum context length is 100"),
        (90, SamplingParams(max_tokens=11), "90 tokens and max_tokens is 11, 101 in all"),
        (90, SamplingParams(max_tokens=None, min_tokens=11), "min_tokens is 11"),
    ],
)
async def test_too_long_is_refused_with_the_numbers(prompt, params, words):
    channel = ScriptedChannel()
    async with running(channel) as engine:
        with pytest.raises(ContextLengthError, match=words):
            await collect(engine, params, prompt=[1] * prompt)
        assert channel.sent == []


async def test_a_longer_max_model_len_is_proposed_only_within_the_models_own():
    async with running(EchoChannel(EngineReady(0, 50, num_blocks=99, block_size=16))) as engine:
        await engine.wait_ready()
        with pytest.raises(ContextLengthError, match="restart with --max-model-len 70"):
            await collect(engine, SamplingParams(max_tokens=10), prompt=[1] * 60)
        with pytest.raises(ContextLengthError, match="take another model"):
            await collect(engine, SamplingParams(max_tokens=41), prompt=[1] * 60)


async def test_the_kv_pool_bounds_a_request_too():
    channel = EchoChannel(EngineReady(0, max_model_len=100, num_blocks=3, block_size=16))
    async with running(channel) as engine:
        await collect(engine, SamplingParams(max_tokens=None))
        assert channel.added[0].max_tokens == 32 - len(PROMPT)
        with pytest.raises(ContextLengthError, match="KV pool holds 32 tokens"):
            await collect(engine, SamplingParams(max_tokens=27))


async def test_what_the_vocabulary_lacks_is_refused():
    async with running(ScriptedChannel()) as engine:
        for prompt in ([258], [-1], [1 << 40], []):
            with pytest.raises(RequestError) as caught:
                await collect(engine, prompt=prompt)
            assert caught.value.param == "prompt"
        with pytest.raises(RequestError) as caught:
            await collect(engine, cache_salt="\ud800")
        assert caught.value.param == "cache_salt"


async def test_death_ends_everything_that_waits():
    for death in (EngineDead("boom"), EngineDeadError("the process exited")):
        channel = ScriptedChannel()
        async with running(channel) as engine:
            tasks = [asyncio.create_task(collect(engine)) for _ in range(3)]
            tasks.append(asyncio.create_task(engine.call("slots")))
            await until(lambda c=channel: len(c.sent) == 4)
            channel.say(death)
            for task in tasks:
                with pytest.raises(EngineDeadError, match=r"boom|exited"):
                    await task
            assert engine.dead is not None
            with pytest.raises(EngineDeadError):
                await collect(engine)
            with pytest.raises(EngineDeadError):
                await engine.wait_ready()
            assert channel.aborted == []


async def test_what_arrived_before_the_death_is_still_delivered():
    channel = ScriptedChannel()
    async with running(channel) as engine:
        generator = engine.generate(PROMPT, SamplingParams(), request_id="r")
        first = asyncio.ensure_future(anext(generator))
        await until(lambda: channel.added)
        channel.say(outputs({channel.added[0].handle: b"a"}))
        channel.say(EngineDead("boom"))
        assert (await first).text == "a"
        with pytest.raises(EngineDeadError):
            await anext(generator)


async def test_requests_wait_for_the_engine_to_load():
    channel, progress = EchoChannel(ready=None), []
    async with running(channel, on_progress=progress.append) as engine:
        task = asyncio.create_task(collect(engine))
        channel.say(EngineProgress("weights", 1, 2))
        await until(lambda: progress)
        assert (channel.added, engine.ready) == ([], None)
        channel.say(READY)
        assert len("".join(o.text for o in await task)) == 16
        assert engine.ready == READY
        assert progress == [EngineProgress("weights", 1, 2)]


async def test_utility_calls_are_answered_by_number():
    channel = ScriptedChannel()
    async with running(channel) as engine:
        calls = [asyncio.create_task(engine.call(name, 1)) for name in ("slots", "bad")]
        await until(lambda: len(channel.sent) == 2)
        first, second = channel.sent
        assert isinstance(first, UtilityCall)
        assert isinstance(second, UtilityCall)
        assert (first.method, first.args) == ("slots", [1])
        channel.say(UtilityReply(second.call_id, error="no method 'bad'"))
        channel.say(UtilityReply(first.call_id, result=[{"a": 1}]))
        channel.say(UtilityReply(99, result=1))
        assert await calls[0] == [{"a": 1, "engine": 0}]
        with pytest.raises(TwostrokeError, match="no method"):
            await calls[1]


async def test_an_error_in_one_request_is_its_own(monkeypatch, caplog):
    channel = ScriptedChannel()
    async with running(channel) as engine:
        tasks = [asyncio.create_task(collect(engine)) for _ in range(3)]
        await until(lambda: len(channel.added) == 3)
        one, two, three = (a.handle for a in channel.added)
        sample = engine._samples[two]
        monkeypatch.setattr(sample._detokenizer, "push", lambda ids: 1 / 0)
        ends = [Finished(one, LENGTH), Finished(three, FinishReason.ERROR, error="logits: NaN")]
        with caplog.at_level(logging.CRITICAL, "twostroke"):
            channel.say(outputs({one: b"a", two: b"b"}, ends))
            found = [(await task)[-1] for task in tasks]
        assert [o.finish_reason for o in found] == ["length", "error", "error"]
        assert found[2].error == "logits: NaN"
        assert channel.aborted == [two]


async def test_ledger_metrics_and_log_line_of_a_request(caplog):
    channel = ScriptedChannel()
    records = []
    async with running(channel) as engine:
        with caplog.at_level(logging.INFO, "twostroke"):
            task = asyncio.create_task(collect(engine, arrival_s=0.0, on_close=records.extend))
            await until(lambda: channel.added)
            handle, now = channel.added[0].handle, engine._clock.now()
            kinds = (EventKind.QUEUED, EventKind.SCHEDULED, EventKind.FIRST_TOKEN)
            events = [(handle, kind, now + i) for i, kind in enumerate(kinds, 1)]
            channel.say(outputs({handle: b"a"}, events=events, time_s=now + 3))
            events = [
                (handle, EventKind.PREEMPTED, now + 4),
                (handle, EventKind.SCHEDULED, now + 5),
            ]
            channel.say(outputs({handle: b"b"}, events=events, time_s=now + 7))
            stats = EngineStats(generation_tokens=3)
            channel.say(outputs({handle: b"c"}, [(handle, LENGTH)], stats=stats, time_s=now + 8))
            await task
    (record,) = records
    ledger = record.ledger
    assert sum(ledger.spent_ns) == ledger.total_ns
    seconds = [round(ns / 1e9) for ns in ledger.spent_ns]
    assert seconds == [round(now), 2, 1, 0, 0, 0, 2, 3, 0]
    assert (record.output_tokens, record.finish_reason, ledger.num_preemptions) == (3, "length", 1)
    assert caplog.records[0].message.startswith("r: length, 6 + 3 tokens, first token")
    text = engine.metrics.render().decode()
    assert (
        'twostroke:request_success_total{engine="0",finished_reason="length",model_name="m"} 1.0'
        in text
    )
    assert 'twostroke:inter_token_latency_seconds_count{engine="0",model_name="m"} 2.0' in text
    assert 'twostroke:generation_tokens_total{engine="0",model_name="m"} 3.0' in text


async def test_the_status_line_is_logged_while_something_runs(caplog):
    channel = ScriptedChannel()
    with caplog.at_level(logging.INFO, "twostroke"):
        async with running(channel, status_interval_s=0.001) as engine:
            channel.say(outputs({}, stats=EngineStats(num_running=1)))
            await until(lambda: caplog.records)
            channel.say(outputs({}, stats=EngineStats()))
            await until(lambda: engine.stats.num_running == 0)
    assert "running 1" in caplog.records[0].message


async def test_a_wide_step_lets_other_tasks_run():
    channel = ScriptedChannel()
    async with running(channel, max_num_queued_reqs=700) as engine:
        tasks = [asyncio.create_task(collect(engine, final_only=True)) for _ in range(600)]
        await until(lambda: len(channel.added) == 600)
        handles = [a.handle for a in channel.added]
        tasks[599].cancel()
        channel.say(outputs(dict.fromkeys(handles, b"a"), [(h, LENGTH) for h in handles]))
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(found[0].text == "a" for found in done[:599])
        assert isinstance(done[599], asyncio.CancelledError)
