"""Sums of a step to a batch of equal requests; and, where the package is there, its answers."""

import importlib.util

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostroke.cost import StepColumns, StepWork
from twostroke.errors import ConfigError
from twostroke.twin.aic import AicStepCost, Batch, batch_of
from twostroke.twin.models import find_shape
from twostroke.twin.roofline import Parallel

needs_package = pytest.mark.skipif(
    importlib.util.find_spec("aiconfigurator_core") is None,
    reason="aiconfigurator-core is not installed (extra aic)",
)


def work_of(batch: Batch) -> StepWork:
    p, m, c, d, e = batch
    tokens = p * m + d
    attended = p * m * (c + m / 2) + d * (e + 0.5)
    return StepWork(tokens, p + d, p + d, p * c + d * e, attended)


@given(
    st.integers(1, 4096),
    st.integers(0, 8192),
    st.integers(0, 256),
    st.integers(1, 8192),
)
def test_a_chunk_and_decodes_are_told_apart(m: int, c: int, d: int, e: int) -> None:
    """One chunk of at least 16 tokens among decodes is found again from the sums."""
    batch = Batch(1, m + 15, c, d, e if d else 0)
    assert batch_of(work_of(batch)) == batch


@given(st.integers(1, 32), st.integers(16, 2048), st.integers(0, 64), st.integers(1, 4096))
def test_whole_prompts_are_told_apart(p: int, m: int, d: int, e: int) -> None:
    """Prompts of one step that begin at 0 have no context, however many there are."""
    found = batch_of(work_of(Batch(p, m, 0, d, e)))
    assert found.chunks <= p
    assert found.chunks * found.chunk_tokens == pytest.approx(p * m, rel=0.01)


def test_decodes() -> None:
    assert batch_of(StepWork(64, 64, 64, 64 * 1000, 64 * 1000.5)) == Batch(0, 0, 0, 64, 1000)


@given(
    st.integers(1, 10_000),
    st.integers(1, 300),
    st.integers(0, 10**6),
    st.floats(0, 10**9),
)
def test_any_sums_make_a_batch(n: int, rows: int, context: int, attended: float) -> None:
    """Nothing negative, and all tokens accounted for, whatever it is asked."""
    rows = min(n, rows)
    batch = batch_of(StepWork(n, rows, rows, context, attended))
    assert min(batch) >= 0
    assert batch.chunks + batch.decodes == rows
    if batch.chunks:
        total = batch.chunks * batch.chunk_tokens + batch.decodes
        assert total == pytest.approx(n, abs=batch.chunks)


@needs_package
def test_answers_of_the_package() -> None:
    """8k of prefill and 288 decodes on 8.7k: what its own calls for whole batches say."""
    tp8 = Parallel(tensor_parallel_size=8)
    cost = AicStepCost(find_shape("qwen3-30b-a3b"), "H100", tp8)
    prefill = cost.step_s(StepWork(8192, 1, 1, 0, 8192**2 / 2))
    assert prefill * 1e3 == pytest.approx(62.8, rel=0.01)
    context = 288 * 8704
    decode = cost.step_s(StepWork(288, 288, 288, context, context + 144))
    assert decode * 1e3 == pytest.approx(28.1, rel=0.02)
    works = StepColumns.of_decodes(288, context, 5)
    each = [
        cost.step_s(StepWork(288, 288, 288, context + 288 * i, context + 288 * i + 144))
        for i in range(5)
    ]
    assert cost.step_s_many(works).tolist() == each


@needs_package
def test_a_group_waits_for_the_one_with_most_to_do() -> None:
    pair = Parallel(data_parallel_size=2, expert_parallel=True)
    cost = AicStepCost(find_shape("qwen3-30b-a3b"), "H100", pair)
    decode = StepWork(32, 32, 32, 32 * 1000, 32 * 1000.5)
    longer = StepWork(32, 32, 32, 32 * 8000, 32 * 8000.5)
    nothing = StepWork(0, 0, 0, 0, 0)
    assert cost.group_step_s([decode, decode]) == cost.step_s(decode)
    assert cost.group_step_s([decode, longer]) == cost.step_s(longer)
    assert cost.group_step_s([decode, nothing]) < cost.step_s(decode)


@needs_package
def test_what_it_has_no_tables_for() -> None:
    with pytest.raises(ConfigError, match="use the roofline"):
        AicStepCost(find_shape("qwen3-30b-a3b"), "A100", Parallel(tensor_parallel_size=8))


def test_without_the_package_or_the_gpu() -> None:
    with pytest.raises(ConfigError, match=r"twostroke\[aic\]|no kernels of RTX 4090"):
        AicStepCost(find_shape("qwen3-30b-a3b"), "RTX 4090")
