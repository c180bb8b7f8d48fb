"""P and D as real processes: the same tokens as one engine, whatever is killed, stopped or slow."""

import asyncio
import importlib.util
import signal
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.cpu.proc.faults import MAX_TOKENS, MODEL, Runner, Schedule, make_prompts
from tests.cpu.proc.pd_engines import Answer, PdEngines
from twostroke.connector.nixl_agent import PACKAGES
from twostroke.ledger import Interval
from twostroke.router.dispatch import Role
from twostroke.testing.tiny_model import write_tiny_checkpoint

PROMPTS = make_prompts(12)
LONG = PROMPTS[0::4]  # they begin differently
has_nixl = any(importlib.util.find_spec(name) for name in PACKAGES)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("model") / "tiny", **MODEL)


@pytest.fixture(scope="module")
def right(model: Path) -> list[list[int]]:
    """What one engine alone answers to PROMPTS."""
    runner = Runner(PdEngines(model, []), PROMPTS)
    asyncio.run(runner.learn())
    return runner.right


def run(engines: PdEngines, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Start the engines, do the work in one event loop, and leave no process."""

    async def whole() -> None:
        await engines.start()
        await work()
        await engines.check_idle()
        await engines.close()

    try:
        asyncio.run(whole())
    finally:
        engines.stop()


@pytest.mark.parametrize(
    ("mode", "transport"),
    [
        ("pull", "shm"),
        ("stream", "shm"),
        pytest.param(
            "pull",
            "nixl",
            marks=pytest.mark.skipif(not has_nixl, reason="nixl is not installed"),
        ),
    ],
)
def test_tokens_are_those_of_one_engine(
    model: Path, right: list[list[int]], mode: str, transport: str
) -> None:
    """Blocks of 16 are read into blocks of 16 and of 32; the second time prefixes are there."""
    engines = PdEngines(
        model, ["prefill", "decode", "decode"], kv_mode=mode, kv_transport=transport
    )
    coarse = replace(engines.config, block_size=32, num_gpu_blocks_override=200)

    async def whole() -> None:
        await engines.start([engines.config, engines.config, coarse])
        for _ in range(2):
            asked = [engines.ask(prompt, MAX_TOKENS) for prompt in PROMPTS]
            answers = await asyncio.gather(*asked)
            assert [answer.token_ids for answer in answers] == right
            for answer in answers:
                ledger = answer.records[0].ledger
                assert sum(ledger.seconds(it) for it in Interval) == pytest.approx(
                    ledger.total_ns / 1e9
                )
        counters = engines.engine.dispatcher.counters
        assert counters.decisions["handed_over", "always"] == 2 * len(PROMPTS)
        assert not counters.failures
        assert counters.transfer_tokens > 0
        await engines.check_idle()
        await engines.close()

    try:
        asyncio.run(whole())
    finally:
        engines.stop()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


def test_what_an_engine_loses_is_done_elsewhere(model: Path, right: list[list[int]]) -> None:
    """P is killed while it computes, while D reads, and while D decodes; then D itself."""
    engines = PdEngines(model, ["prefill", "decode"])

    async def lose(
        role: Role, prompt: int, when: Callable[[Answer], object], max_tokens: int = MAX_TOKENS
    ) -> Answer:
        answer = Answer()
        asking = asyncio.create_task(engines.ask(LONG[prompt], max_tokens, answer=answer))
        await until(lambda: when(answer))
        (engine,) = engines.with_role(role)
        await engines.kill(engine)
        await asking
        engines.add(role)
        await engines.wait_ready()
        return answer

    async def work() -> None:
        p, _ = engines.engine.dispatcher.fleet
        answer = await lose("prefill", 0, lambda answer: p.num_legs)
        assert answer.token_ids == right[0]
        p, _ = engines.engine.dispatcher.fleet
        answer = await lose("prefill", 1, lambda answer: p.num_holds)
        assert answer.token_ids == right[4]
        counters = engines.engine.dispatcher.counters
        before = dict(counters.retries)
        answer = await lose("prefill", 2, lambda answer: answer.token_ids, 200)
        assert (len(answer.token_ids), answer.finish_reason) == (200, "length")
        assert answer.token_ids[:MAX_TOKENS] == right[8]
        assert counters.retries == before  # D had all that it needed
        answer = await lose("decode", 0, lambda answer: answer.token_ids, 200)
        assert answer.finish_reason == "error"
        assert "engine 1: the engine-core process was killed by signal 9" in answer.error
        answer = await engines.ask(LONG[1], MAX_TOKENS)
        assert answer.token_ids == right[4]
        assert counters.decisions["handed_over", "always"] == 5

    run(engines, work)


def test_stalls_departures_bursts_and_new_roles(model: Path, right: list[list[int]]) -> None:
    engines = PdEngines(
        model, ["prefill", "decode"], handoff_timeout_s=4.0, num_gpu_blocks_override=220
    )

    async def stall() -> None:
        """P stands still: D computes the prompt itself once time is up; then P is of use again."""
        engines.signal(0, signal.SIGSTOP)
        answer = await engines.ask(LONG[0], MAX_TOKENS)
        engines.signal(0, signal.SIGCONT)
        assert answer.token_ids == right[0]
        assert sum(engines.engine.dispatcher.counters.retries.values()) == 1

    async def leave() -> None:
        """The client goes while P computes, while KV moves, while D decodes."""
        p, _ = engines.engine.dispatcher.fleet
        states: list[Callable[[Answer], object]] = [
            lambda answer: p.num_legs,
            lambda answer: p.num_holds,
            lambda answer: answer.token_ids,
        ]
        for number, state in enumerate(states):
            answer, prompt = Answer(), [number, *LONG[0]]
            asking = asyncio.create_task(engines.ask(prompt, 500, answer=answer))
            await until(partial(state, answer))
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            await engines.check_idle()

    async def burst() -> None:
        """Four times what D has room for: all are answered, and their ledgers say who waited."""
        blocks = -(-(len(LONG[0]) + MAX_TOKENS) // 16)
        count = 4 * (219 // blocks + 1)
        asked = [engines.ask([i, i, *LONG[0]], MAX_TOKENS) for i in range(count)]
        answers = await asyncio.gather(*asked)
        assert [answer.finish_reason for answer in answers] == ["length"] * count
        waits = sorted(answer.seconds(Interval.HELD) for answer in answers)
        assert waits[-1] > waits[0]

    async def switch() -> None:
        """P and D change places under load."""
        engine = engines.engine
        asked = [asyncio.create_task(engines.ask(it, MAX_TOKENS)) for it in PROMPTS]
        engine.set_role(0, "both")
        engine.set_role(1, "prefill")
        answers = await asyncio.gather(*asked)
        assert [answer.token_ids for answer in answers] == right
        engine.set_role(0, "decode")
        await until(lambda: [it.role for it in engine.dispatcher.fleet] == ["decode", "prefill"])
        before = engine.dispatcher.counters.num_transfers
        answers = await asyncio.gather(*(engines.ask(it, MAX_TOKENS) for it in PROMPTS))
        assert [answer.token_ids for answer in answers] == right
        assert engine.dispatcher.counters.num_transfers > before

    steps: list[Callable[[], Awaitable[None]]] = [stall, leave, burst, switch]

    async def work() -> None:
        for step in steps:
            await step()
            await engines.check_idle()

    run(engines, work)


def test_random_faults(model: Path, right: list[list[int]]) -> None:
    """A handful of `python -m tests.cpu.proc.faults`."""
    engines = PdEngines(model, ["prefill", "decode"])
    runner = Runner(engines, PROMPTS)
    runner.right = right

    async def work() -> None:
        for seed in range(3):
            await runner.run(Schedule.random(seed, len(PROMPTS)))
        assert runner.outcome.is_good, runner.outcome

    run(engines, work)


def test_the_real_model(smollm2_path: Path) -> None:
    text = "The capital of France is Paris. " * 20
    settings = {"max_model_len": 512, "cpu_threads": 0}
    answers: list[list[list[int]]] = []
    for roles in (["both"], ["prefill", "decode"]):
        alone = len(roles) == 1
        engines = PdEngines(
            smollm2_path,
            roles,
            prefill=0 if alone else 1,
            decode=0 if alone else 1,
            **settings,
        )

        async def work(engines: PdEngines = engines) -> None:
            prompts = [
                engines.engine.tokenizer.encode(text[: 150 * i] + end)
                for i in range(3)
                for end in ("Water boils at", "My name is")
            ]
            got = await asyncio.gather(*(engines.ask(it, 12) for it in prompts))
            answers.append([answer.token_ids for answer in got])

        run(engines, work)
    assert answers[0] == answers[1]
    assert all(len(tokens) == 12 for tokens in answers[0])
