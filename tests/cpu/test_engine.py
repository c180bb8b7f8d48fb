"""The whole engine in one process, without sockets: core, executor, tiny model.

The promise under test: greedy tokens depend on the prompt alone - not on the batch, the chunk size,
the prefix cache, preemption, or whether two steps are in flight.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.cpu.engine import drive
from twostroke.checkpoint import open_checkpoint
from twostroke.clock import WallClock
from twostroke.config import EngineConfig, SchedulerConfig
from twostroke.core.loop import EngineCore
from twostroke.messages import AddRequest, SamplingParams
from twostroke.worker.attention_emit import HAS_DOTS
from twostroke.worker.executor import ThreadExecutor

MAX_MODEL_LEN = 96
NUM_BLOCKS = 65
BLOCK_SIZE = 8
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def executor(tiny_dir: Path) -> Iterator[ThreadExecutor]:
    config = EngineConfig(
        model=str(tiny_dir),
        device="cpu",
        dtype="float32",
        block_size=BLOCK_SIZE,
        max_num_seqs=8,
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=256,
        num_gpu_blocks_override=NUM_BLOCKS,
    )
    executor = ThreadExecutor(config, open_checkpoint(tiny_dir))
    yield executor
    executor.shutdown()


def run(
    executor: ThreadExecutor,
    requests: list[AddRequest],
    *,
    arrivals: list[int] | None = None,
    aborts: dict[int, int] | None = None,
    **scheduler: object,
) -> tuple[dict[int, list[int]], EngineCore]:
    """Tokens by handle, and the core that made them."""
    config = {
        "block_size": BLOCK_SIZE,
        "num_blocks": NUM_BLOCKS,
        "max_num_seqs": 8,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_batched_tokens": 256,
        "async_scheduling": True,
    }
    core = EngineCore(SchedulerConfig(**(config | scheduler)), WallClock(), check=True)
    run = drive(core, executor, requests, arrivals=arrivals, aborts=aborts)
    return run.tokens, core


def request(handle: int, prompt: list[int], max_tokens: int, **params: object) -> AddRequest:
    return AddRequest(
        handle=handle,
        request_id=f"r{handle}",
        prompt_token_ids=np.array(prompt, np.int32),
        params=SamplingParams(**({"temperature": 0.0} | params)),
        max_tokens=max_tokens,
    )


@st.composite
def mixes(draw: st.DrawFn) -> list[tuple[list[int], int]]:
    """Prompts, some with shared prefixes, and how many tokens each wants."""
    seed = draw(st.integers(0, 3))
    shared = [(seed * 37 + i * 11) % 250 for i in range(40)]
    mix = []
    for _ in range(draw(st.integers(1, 7))):
        prefix = shared[: draw(st.sampled_from([0, 0, 7, 8, 24, 40]))]
        own = draw(st.lists(st.integers(0, 255), min_size=1, max_size=30))
        mix.append((prefix + own, draw(st.integers(1, 25))))
    return mix


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    mix=mixes(),
    data=st.data(),
    budget=st.sampled_from([8, 13, 64, 256]),
    caching=st.booleans(),
    two_in_flight=st.booleans(),
    blocks=st.sampled_from([14, 20, NUM_BLOCKS]),
)
def test_greedy_tokens_depend_on_the_prompt_alone(
    executor: ThreadExecutor,
    mix: list[tuple[list[int], int]],
    data: st.DataObject,
    budget: int,
    caching: bool,
    two_in_flight: bool,
    blocks: int,
) -> None:
    requests = [request(i, prompt, count) for i, (prompt, count) in enumerate(mix)]
    arrivals = data.draw(st.lists(st.integers(0, 12), min_size=len(mix), max_size=len(mix)))
    together, core = run(
        executor,
        requests,
        arrivals=arrivals,
        num_blocks=blocks,
        max_num_batched_tokens=budget,
        enable_prefix_caching=caching,
        async_scheduling=two_in_flight,
    )
    assert core.stats().kv_usage == 0
    for one in requests:
        alone, _ = run(executor, [one], enable_prefix_caching=False, async_scheduling=False)
        assert together[one.handle] == alone[one.handle]
        assert len(alone[one.handle]) == one.max_tokens


def test_preempted_requests_get_the_same_tokens(executor: ThreadExecutor) -> None:
    requests = [request(i, [i] * 20, 40) for i in range(6)]
    tokens, core = run(executor, requests, num_blocks=20)
    assert core.stats().num_preemptions > 0
    for one in requests:
        alone, _ = run(executor, [one])
        assert tokens[one.handle] == alone[one.handle]


@pytest.mark.skipif(not HAS_DOTS, reason="the processor has no AVX512-BF16")
def test_with_kv_in_int8_a_prefix_hit_and_a_preemption_change_no_token(tiny_dir: Path) -> None:
    config = EngineConfig(
        model=str(tiny_dir),
        device="cpu",
        dtype="bfloat16",
        kv_cache_dtype="int8",
        block_size=BLOCK_SIZE,
        max_num_seqs=8,
        max_model_len=MAX_MODEL_LEN,
        num_gpu_blocks_override=NUM_BLOCKS,
    )
    executor = ThreadExecutor(config, open_checkpoint(tiny_dir))
    same = [(5 * i) % 23 for i in range(20)]
    requests = [request(i, [*same, *[i] * 4], 30) for i in range(6)]
    tokens, core = run(executor, requests, num_blocks=20)
    stats = core.stats()
    assert stats.num_preemptions > 0
    assert stats.prefix_cache_hits > 0
    for one in requests:
        alone, _ = run(executor, [one], enable_prefix_caching=False)
        assert tokens[one.handle] == alone[one.handle]
    executor.shutdown()


def test_a_seed_gives_the_same_tokens_whatever_else_runs(executor: ThreadExecutor) -> None:
    seeded = request(0, [5, 6, 7], 30, temperature=1.0, seed=42)
    others = [request(i, [i] * 9, 30, temperature=1.5) for i in range(1, 6)]
    alone, _ = run(executor, [seeded])
    crowded, core = run(executor, [*others, seeded], num_blocks=18, async_scheduling=False)
    assert core.stats().num_preemptions > 0
    assert crowded[0] == alone[0]
    other_seed, _ = run(executor, [request(0, [5, 6, 7], 30, temperature=1.0, seed=43)])
    assert other_seed[0] != alone[0]


def test_an_abort_leaves_the_others_alone(executor: ThreadExecutor) -> None:
    requests = [request(i, [i] * 12, 20) for i in range(4)]
    tokens, _ = run(executor, requests, aborts={3: 1, 9: 2})
    for i in (0, 3):
        alone, _ = run(executor, [requests[i]])
        assert tokens[i] == alone[i]
    assert len(tokens[1]) < 20
