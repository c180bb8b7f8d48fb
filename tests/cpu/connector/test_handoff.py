"""Tokens of a prompt that one engine computed and another continued: those of one engine alone."""

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cpu.connector.engines import Engine, Processes, hand_over
from tests.cpu.worker.driving import small_config
from twostroke.connector.nixl_agent import INSTALL, PACKAGES
from twostroke.messages import SamplingParams
from twostroke.testing.tiny_model import write_tiny_checkpoint
from twostroke.worker.attention_emit import HAS_DOTS

PROMPT = [(7 * i) % 251 for i in range(53)]


def settings(tp: int = 1, block_size: int = 16, **changes: object):
    return small_config(
        prefill=1,
        decode=1,
        tensor_parallel_size=tp,
        block_size=block_size,
        num_gpu_blocks_override=40,
        **changes,
    )


NewEngine = Callable[..., Engine]


@pytest.fixture
def new_engine() -> Iterator[NewEngine]:
    """Makes engines; closes them also where the test fails, lest others find their threads."""
    with contextlib.ExitStack() as opened:
        yield lambda *arguments: opened.enter_context(contextlib.closing(Engine(*arguments)))


@pytest.fixture(scope="module")
def alone(tiny_dir: Path):
    """What one engine without any of this says."""
    engine = Engine(small_config(), tiny_dir)
    handles = iter(range(1000))
    yield lambda *request: engine.generate(next(handles), *request)
    engine.close()


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        # (tensor-parallel size, block size); the model has 4 heads and 2 KV heads
        ((1, 16), (1, 16)),
        ((2, 16), (1, 16)),
        ((1, 16), (2, 16)),
        ((4, 16), (2, 16)),
        ((2, 16), (4, 16)),
        ((1, 16), (1, 32)),
        ((4, 32), (2, 16)),
    ],
)
def test_layouts_may_differ(
    theirs: tuple, ours: tuple, tiny_dir: Path, alone, new_engine: NewEngine
):
    prefill, decode = (new_engine(settings(*which), tiny_dir) for which in (theirs, ours))
    continued = [*PROMPT, *range(20)]
    for handle, prompt in enumerate((PROMPT, PROMPT, continued, PROMPT[:16], [5])):
        stream = handle == 2
        tokens = hand_over(prefill, decode, handle, prompt, 9, stream=stream)
        assert tokens == alone(prompt, 9)
        received = decode.received[handle]
        assert not received.error
        if handle == 0:
            assert received.num_tokens == len(prompt)
            assert received.num_bytes > 0
    # Of the second prompt and the third, whole blocks were here already.
    held = len(PROMPT) // ours[1] * ours[1]
    assert decode.received[1].num_tokens == len(PROMPT) - held
    assert decode.received[2].num_tokens == len(continued) - held


def test_chunk_by_chunk_with_drafts_and_drawn_tokens(tiny_dir: Path, alone, new_engine: NewEngine):
    chunked = settings(block_size=8, max_num_batched_tokens=16)
    prefill = new_engine(chunked, tiny_dir)
    decode = new_engine(settings(block_size=8, speculative_method="ngram"), tiny_dir)
    drawn = SamplingParams(temperature=1.0, seed=5)
    for handle, params in enumerate((SamplingParams(temperature=0.0), drawn)):
        for stream in (False, True):
            prompt = [(3 * i + handle + 5 * stream) % 17 for i in range(61 + 8 * stream)]
            number = 2 * handle + stream
            before = prefill.num_tickets
            tokens = hand_over(prefill, decode, number, prompt, 12, params, stream=stream)
            assert tokens == alone(prompt, 12, params)
            assert prefill.num_tickets - before == (5 if stream else 1)


def test_ranks_in_processes(tiny_dir: Path, alone, new_engine: NewEngine):
    prefill = new_engine(settings(2), tiny_dir, Processes)
    decode = new_engine(settings(), tiny_dir)
    assert len(prefill.core.state.handoff.endpoint.addresses) == 2
    for engines in ((prefill, decode), (decode, prefill)):
        for handle, stream in ((0, False), (1, True)):
            prompt = [*range(10 + handle), *PROMPT]
            assert hand_over(*engines, handle, prompt, 9, stream=stream) == alone(prompt, 9)
            assert engines[1].received[handle].num_bytes > 0
            for engine in engines:
                engine.finished.clear()


@pytest.mark.skipif(
    not any(importlib.util.find_spec(name) for name in PACKAGES),
    reason=f"NIXL is not installed: {INSTALL}",
)
@pytest.mark.parametrize("wire", ["tcp,shm,self", "tcp,self"])
def test_over_nixl(
    wire: str, tiny_dir: Path, alone, monkeypatch: pytest.MonkeyPatch, new_engine: NewEngine
):
    monkeypatch.setenv("UCX_TLS", wire)
    prefill, decode = (new_engine(settings(kv_transport="nixl"), tiny_dir) for _ in range(2))
    assert decode.core.state.handoff.endpoint.transport == "nixl"
    for handle, stream in enumerate((False, True)):
        prompt = [*range(handle + 20), *PROMPT]
        assert hand_over(prefill, decode, handle, prompt, 9, stream=stream) == alone(prompt, 9)
        assert decode.received[handle].num_bytes > 0


def test_the_default_model_over_three_ranks_and_one(smollm2_path: Path, new_engine: NewEngine):
    """It has 9 heads and 3 KV heads."""
    config = {"max_model_len": 128, "num_gpu_blocks_override": 20, "block_size": 16}
    three, one = (
        new_engine(
            small_config(prefill=1, decode=1, tensor_parallel_size=size, **config), smollm2_path
        )
        for size in (3, 1)
    )
    for handle, engines in enumerate(((three, one), (one, three))):
        prompt = [(11 * i + handle) % 40_000 for i in range(70)]
        tokens = hand_over(*engines, handle, prompt, 8)
        assert tokens == one.generate(9 + handle, prompt, 8)


@pytest.mark.skipif(not HAS_DOTS, reason="the processor has no AVX512-BF16")
@pytest.mark.parametrize(("theirs", "ours"), [((1, 16), (1, 16)), ((2, 16), (1, 8))])
def test_kv_in_int8(theirs: tuple, ours: tuple, tiny_dir: Path, new_engine: NewEngine):
    """With its scales, so the tokens are those of one engine with the same kind of KV.

    In bfloat16 two ranks add up otherwise than one, so no answer here has a near tie.
    """
    kind = {"dtype": "bfloat16", "kv_cache_dtype": "int8"}
    one = new_engine(small_config(**kind), tiny_dir)
    prefill, decode = (new_engine(settings(*which, **kind), tiny_dir) for which in (theirs, ours))
    for handle, stream in ((0, False), (1, True)):
        prompt = [*range(5 + handle), *PROMPT]
        expected = one.generate(handle, prompt, 9)
        assert hand_over(prefill, decode, handle, prompt, 9, stream=stream) == expected
        assert decode.received[handle].num_bytes > 0


@pytest.mark.skipif(not HAS_DOTS, reason="the processor has no AVX512-BF16")
def test_another_type_of_kv_is_refused(tiny_dir: Path, new_engine: NewEngine):
    prefill = new_engine(settings(dtype="bfloat16", kv_cache_dtype="int8"), tiny_dir)
    decode = new_engine(settings(dtype="bfloat16"), tiny_dir)
    assert hand_over(prefill, decode, 0, PROMPT, 5) == []
    assert "types of KV differ: int8 there, bfloat16 here" in decode.finished[0].error


def test_other_weights_are_refused(tiny_dir: Path, tmp_path: Path, new_engine: NewEngine):
    other = write_tiny_checkpoint(tmp_path / "other", seed=1)
    prefill, decode = new_engine(settings(), other), new_engine(settings(), tiny_dir)
    assert hand_over(prefill, decode, 0, PROMPT, 5) == []
    assert "models or weights differ" in decode.finished[0].error
    assert "models or weights differ" in decode.received[0].error
