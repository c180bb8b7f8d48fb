"""P and D as real processes: the same tokens as one engine, whatever is killed, stopped or slow."""

import asyncio
import importlib.util
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tests.cpu.proc.faults import MAX_TOKENS, MODEL, Runner, Schedule, make_prompts
from tests.cpu.proc.pd_engines import Answer, PdEngines
from twostroke.connector.nixl_agent import PACKAGES
from twostroke.ledger import Interval
from twostroke.router.dispatch import Role
from twostroke.testing.tiny_model import write_tiny_checkpoint

PROMPTS = make_prompts(12)
LONG = PROMPTS[0::4]  # they begin differently
NUM_BLOCKS = 220
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


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    """The event loop that `started` belongs to."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def started(model: Path, loop: asyncio.Runner) -> Iterator[PdEngines]:
    """A P and a D for most tests here."""
    engines = PdEngines(
        model, ["prefill", "decode"], handoff_timeout_s=4.0, num_gpu_blocks_override=NUM_BLOCKS
    )
    try:
        loop.run(engines.start())
        yield engines
        loop.run(engines.close())
    finally:
        engines.stop()


@pytest.fixture
def engines(started: PdEngines, loop: asyncio.Runner) -> Iterator[PdEngines]:
    """Them as they began: P is 0, D is 1. Afterwards nothing may be left of the test."""
    loop.run(started.mend())
    yield started
    loop.run(started.check_idle())


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


@pytest.mark.parametrize(
    "transport",
    [
        "shm",
        pytest.param(
            "nixl", marks=pytest.mark.skipif(not has_nixl, reason="NIXL is not installed")
        ),
    ],
)
def test_tokens_are_those_of_one_engine(
    model: Path, right: list[list[int]], transport: str
) -> None:
    """Blocks of 16 are read into blocks of 16 and of 32, pulled and streamed, with prefix hits."""
    engines = PdEngines(
        model, ["prefill", "decode", "decode"], kv_transport=transport, handoff_timeout_s=100.0
    )
    coarse = replace(engines.config, block_size=32, num_gpu_blocks_override=200)

    async def work() -> None:
        await engines.start([engines.config, engines.config, coarse])
        dispatcher = engines.engine.dispatcher
        for mode in ("pull", "stream"):
            dispatcher.settings = replace(dispatcher.settings, kv_mode=mode)
            for _ in range(2):
                answers = await asyncio.gather(*(engines.ask(it, MAX_TOKENS) for it in PROMPTS))
                assert [answer.token_ids for answer in answers] == right
                for answer in answers:
                    ledger = answer.records[0].ledger
                    parts = sum(ledger.seconds(interval) for interval in Interval)
                    assert parts == pytest.approx(ledger.total_ns / 1e9)
            await engines.engine.call("reset_prefix_cache")
        counters = dispatcher.counters
        assert counters.decisions == {("handed_over", "always"): 4 * len(PROMPTS)}
        assert not counters.failures
        assert counters.transfer_tokens > 2 * sum(map(len, LONG))
        await engines.check_idle()
        await engines.close()

    try:
        asyncio.run(work())
    finally:
        engines.stop()


def test_what_an_engine_loses_is_done_elsewhere(
    engines: PdEngines, loop: asyncio.Runner, right: list[list[int]]
) -> None:
    """P is killed while it computes, while D reads, and while D decodes; then D itself."""

    async def lose(
        role: Role, prompt: int, when: Callable[[Answer], object], max_tokens: int = MAX_TOKENS
    ) -> Answer:
        answer = Answer()
        asking = asyncio.create_task(engines.ask(LONG[prompt], max_tokens, answer=answer))
        await until(lambda: when(answer))
        (engine,) = engines.with_role(role)
        await engines.kill(engine)
        await asking
        await engines.mend()
        return answer

    async def work() -> None:
        dispatcher = engines.engine.dispatcher
        fleet, counters = dispatcher.fleet, dispatcher.counters
        before = counters.decisions["handed_over", "always"]
        answer = await lose("prefill", 0, lambda answer: fleet[0].num_legs)
        assert answer.token_ids == right[0]
        answer = await lose("prefill", 1, lambda answer: fleet[0].num_holds)
        assert answer.token_ids == right[4]
        retries = dict(counters.retries)
        answer = await lose("prefill", 2, lambda answer: answer.token_ids, 200)
        assert (len(answer.token_ids), answer.finish_reason) == (200, "length")
        assert answer.token_ids[:MAX_TOKENS] == right[8]
        assert counters.retries == retries  # D had all that it needed
        answer = await lose("decode", 0, lambda answer: answer.token_ids, 200)
        assert answer.finish_reason == "error"
        assert "engine 1: the engine-core process was killed by signal 9" in answer.error
        answer = await engines.ask(LONG[1], MAX_TOKENS)
        assert answer.token_ids == right[4]
        assert counters.decisions["handed_over", "always"] == before + 5

    loop.run(work())


def test_a_prefill_engine_that_stands_still(
    engines: PdEngines, loop: asyncio.Runner, right: list[list[int]]
) -> None:
    """D computes the prompt itself once time is up; then P is of use again."""

    async def work() -> None:
        retries = engines.engine.dispatcher.counters.retries
        before = retries["late"]
        engines.signal(0, signal.SIGSTOP)
        answer = await engines.ask(LONG[0], MAX_TOKENS)
        engines.signal(0, signal.SIGCONT)
        assert answer.token_ids == right[0]
        assert retries["late"] == before + 1
        await engines.check_idle()
        answer = await engines.ask(LONG[1], MAX_TOKENS)
        assert answer.token_ids == right[4]
        assert retries["late"] == before + 1

    loop.run(work())


def test_the_client_goes_in_each_state(engines: PdEngines, loop: asyncio.Runner) -> None:
    """While P computes, while KV moves, while D decodes."""
    fleet = engines.engine.dispatcher.fleet
    states: list[Callable[[Answer], object]] = [
        lambda answer: fleet[0].num_legs,
        lambda answer: fleet[0].num_holds,
        lambda answer: answer.token_ids,
    ]

    async def work() -> None:
        for number, state in enumerate(states):
            answer = Answer()
            asking = asyncio.create_task(engines.ask([number, *LONG[0]], 500, answer=answer))
            await until(partial(state, answer))
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            await engines.check_idle()

    loop.run(work())


def test_a_burst_beyond_what_d_holds(engines: PdEngines, loop: asyncio.Runner) -> None:
    """Four times as much: all are answered, and their ledgers say who waited."""
    blocks = -(-(len(LONG[0]) + MAX_TOKENS) // 16)
    count = 4 * ((NUM_BLOCKS - 1) // blocks + 1)

    async def work() -> None:
        asked = [engines.ask([i, i, *LONG[0]], MAX_TOKENS) for i in range(count)]
        answers = await asyncio.gather(*asked)
        assert [answer.finish_reason for answer in answers] == ["length"] * count
        waits = sorted(answer.seconds(Interval.HELD) for answer in answers)
        assert waits[-1] > waits[0]

    loop.run(work())


def test_p_and_d_change_places_under_load(
    engines: PdEngines, loop: asyncio.Runner, right: list[list[int]]
) -> None:
    async def work() -> None:
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
        engine.set_role(0, "both")
        engine.set_role(1, "decode")
        engine.set_role(0, "prefill")

    loop.run(work())


def test_random_faults(engines: PdEngines, loop: asyncio.Runner, right: list[list[int]]) -> None:
    """A handful of `python -m tests.cpu.proc.faults`."""
    runner = Runner(engines, PROMPTS)
    runner.right = right

    async def work() -> None:
        for seed in range(3):
            await runner.run(Schedule.random(seed, len(PROMPTS)))
        assert runner.outcome.is_good, runner.outcome

    loop.run(work())


def test_the_real_model(smollm2_path: Path) -> None:
    text = "The capital of France is Paris. " * 20
    answers: list[list[list[int]]] = []
    for roles in (["both"], ["prefill", "decode"]):
        count = len(roles) - 1
        engines = PdEngines(
            smollm2_path, roles, prefill=count, decode=count, max_model_len=512, cpu_threads=0
        )

        async def work(engines: PdEngines = engines) -> None:
            await engines.start()
            prompts = [
                engines.engine.tokenizer.encode(text[: 150 * i] + end)
                for i in range(3)
                for end in ("Water boils at", "My name is")
            ]
            got = await asyncio.gather(*(engines.ask(it, 12) for it in prompts))
            answers.append([answer.token_ids for answer in got])
            await engines.check_idle()
            await engines.close()

        try:
            asyncio.run(work())
        finally:
            engines.stop()
    assert answers[0] == answers[1]
    assert all(len(tokens) == 12 for tokens in answers[0])
