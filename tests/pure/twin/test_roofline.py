"""Step times from first principles: against measured kernels, in their limits, and in bulk."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostroke.cost import StepColumns, StepWork
from twostroke.errors import ConfigError
from twostroke.kv.sizing import KvLayout
from twostroke.shape import ModelShape, num_parameters
from twostroke.twin.hardware import GPUS
from twostroke.twin.roofline import Parallel, Roofline, Software, kv_budget

QWEN_30B = ModelShape(
    architecture="qwen3_moe",
    vocab_size=151_936,
    hidden_size=2048,
    intermediate_size=6144,
    num_layers=48,
    num_heads=32,
    num_kv_heads=4,
    head_dim=128,
    max_position_embeddings=40_960,
    num_experts=128,
    num_experts_per_token=8,
    moe_intermediate_size=768,
)
LLAMA_8B = ModelShape(
    architecture="llama",
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_position_embeddings=131_072,
)
TP8 = Parallel(tensor_parallel_size=8)


def prefill(count: int, tokens: int, prefix: int = 0) -> StepWork:
    n = count * (tokens - prefix)
    return StepWork(n, count, count, count * prefix, n * (prefix + (tokens - prefix) / 2))


def decode(rows: int, context: int) -> StepWork:
    return StepWork(rows, rows, rows, rows * context, rows * (context + 0.5))


@pytest.mark.parametrize(
    ("gpu", "parallel", "work", "aic_ms"),
    [  # aiconfigurator-core 0.12, vLLM tables
        ("H100", TP8, prefill(8, 8192), 416),
        ("H100", TP8, prefill(1, 8192), 62.8),
        ("H100", TP8, prefill(1, 32768), 278),
        ("H100", TP8, decode(288, 8704), 28.1),
        ("H100", TP8, decode(1, 8704), 3.45),
        ("H100", Parallel(), prefill(1, 8192), 153),
        ("H100", Parallel(), decode(64, 8704), 39.4),
        ("H200", TP8, decode(288, 8704), 21.9),
        ("B200", TP8, decode(288, 8704), 15.4),
        ("A100", Parallel(), prefill(1, 8192), 498),
    ],
)
def test_measured_kernels(gpu: str, parallel: Parallel, work: StepWork, aic_ms: float) -> None:
    seconds = Roofline(QWEN_30B, GPUS[gpu], parallel).step_s(work)
    assert seconds * 1e3 == pytest.approx(aic_ms, rel=0.15)


def test_a_short_suffix_is_the_worst_case() -> None:
    """1,024 tokens on a prefix of 7,168 (AIC: 16.2 ms): kernels too small to fill eight GPUs."""
    seconds = Roofline(QWEN_30B, GPUS["H100"], TP8).step_s(prefill(1, 8192, prefix=7168))
    assert seconds * 1e3 == pytest.approx(16.2, rel=0.25)


def test_a_single_decode_reads_the_active_weights() -> None:
    """At one token memory decides: the weights that it touches, over what bandwidth is reached."""
    gpu = GPUS["H100"]
    parts = Roofline(LLAMA_8B, gpu).parts(decode(1, 0))
    table = LLAMA_8B.vocab_size * LLAMA_8B.hidden_size
    layers_s = 2 * (num_parameters(LLAMA_8B) - 2 * table) / gpu.memory_bytes_per_s / 0.94
    assert parts.dense == pytest.approx(layers_s, rel=0.01)
    assert parts.head == pytest.approx(2 * table / gpu.memory_bytes_per_s / 0.94, rel=0.01)


def test_experts_touched_grow_with_the_batch_and_end_at_all() -> None:
    cost = Roofline(QWEN_30B, GPUS["H100"])
    one, two, many, more = (cost.parts(decode(n, 0)).experts for n in (1, 2, 1000, 1100))
    assert two == pytest.approx(2 * one, rel=0.04)  # 8 of 128: little overlap yet
    assert 14 * one < many < 20 * one  # 16 times the experts, and some arithmetic
    assert more - many < 0.1 * many


def test_parts_sum_to_the_step() -> None:
    cost = Roofline(QWEN_30B, GPUS["A100"], TP8, software=Software(kernel_share=0.7, step_s=1e-3))
    work = decode(64, 4000)
    assert sum(cost.parts(work)) == pytest.approx(cost.step_s(work))


def test_a_slow_host_hides_the_device() -> None:
    slow = Roofline(LLAMA_8B, GPUS["H100"], software=Software(layer_s=1e-3, row_s=1e-4))
    assert slow.step_s(decode(1, 100)) == pytest.approx(32e-3 + 1e-4)
    fast = Roofline(LLAMA_8B, GPUS["H100"])
    assert slow.step_s(prefill(4, 8192)) == pytest.approx(fast.step_s(prefill(4, 8192)) + 4e-4)


def test_heads_are_replicated_beyond_the_kv_heads() -> None:
    """TP8 of 4 KV heads reads twice its share of KV."""
    four = Roofline(QWEN_30B, GPUS["H100"], Parallel(tensor_parallel_size=4))
    eight = Roofline(QWEN_30B, GPUS["H100"], TP8)
    context = StepWork(0, 0, 0, 1e6, 0)
    assert eight.parts(context).attention == four.parts(context).attention


def test_a_group_that_shares_experts_exchanges_tokens() -> None:
    alone = Roofline(QWEN_30B, GPUS["H100"])
    pair = Roofline(QWEN_30B, GPUS["H100"], Parallel(data_parallel_size=2, expert_parallel=True))
    work = decode(64, 1000)
    assert alone.parts(work).exchange == 0
    assert pair.parts(work).exchange > 0
    assert pair.parts(work).experts < alone.parts(work).experts  # half of them each
    dense = Roofline(LLAMA_8B, GPUS["H100"], Parallel(data_parallel_size=2))
    assert dense.step_s(work) == Roofline(LLAMA_8B, GPUS["H100"]).step_s(work)


def test_float8_reads_half_and_computes_twice() -> None:
    gpu = dataclasses.replace(GPUS["H100"], layer_s=0.0)
    full, half = Roofline(LLAMA_8B, gpu), Roofline(LLAMA_8B, gpu, dtype="float8")
    for work in (decode(1, 0), prefill(1, 2048)):
        assert half.parts(work).dense == pytest.approx(full.parts(work).dense / 2)


@given(st.integers(1, 40_000), st.integers(1, 600), st.integers(0, 10**6), st.sampled_from([1, 8]))
def test_more_work_takes_more_time(tokens: int, rows: int, context: int, tp: int) -> None:
    rows = min(rows, tokens)
    cost = Roofline(QWEN_30B, GPUS["H100"], Parallel(tensor_parallel_size=tp))
    seconds = cost.step_s(StepWork(tokens, rows, rows, context, context))
    assert 0 < seconds <= cost.step_s(StepWork(tokens + 1, rows, rows, context + 1, context + 1))


@given(
    st.integers(1, 600),
    st.integers(0, 10**7),
    st.sampled_from([QWEN_30B, LLAMA_8B]),
    st.sampled_from([Software(), Software(kernel_share=0.7, layer_s=4e-4, row_s=1e-5)]),
)
def test_many_steps_cost_what_each_costs(
    rows: int, context: int, shape: ModelShape, software: Software
) -> None:
    """To the last bit: the twin advances by either."""
    cost = Roofline(shape, GPUS["H100"], TP8, software=software)
    each = []
    for step in range(20):
        before = context + step * rows
        each.append(cost.step_s(StepWork(rows, rows, rows, before, before + rows / 2)))
    assert cost.step_s_many(StepColumns.of_decodes(rows, context, 20)).tolist() == each


def test_kv_budget_of_a_card_whose_pool_is_known() -> None:
    """vLLM 0.19 on an RTX 4090 with Llama-3.1-8B: 41,408 tokens."""
    budget = kv_budget(LLAMA_8B, GPUS["RTX 4090"], max_num_batched_tokens=2048, max_num_seqs=128)
    assert budget.num_tokens == pytest.approx(41_408, rel=0.05)
    assert budget.weights_bytes == pytest.approx(2 * num_parameters(LLAMA_8B), rel=0.001)


def test_kv_budget_counts_replicated_heads() -> None:
    """H100 TP8: the pool of 24 KiB a token and rank, beside an eighth of the weights."""
    budget = kv_budget(QWEN_30B, GPUS["H100"], TP8)
    layout = KvLayout(num_layers=48, num_kv_heads=4, head_dim=128, tensor_parallel_size=8)
    assert budget.num_blocks == budget.kv_bytes // layout.block_bytes
    assert budget.num_tokens == pytest.approx(64.9e9 / 24_576, rel=0.06)  # AISimulate's 64.9 GB


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="no room for KV"):
        kv_budget(QWEN_30B, GPUS["RTX 4090"])
    with pytest.raises(ConfigError, match="span nodes"):
        Roofline(LLAMA_8B, GPUS["RTX 4090"], Parallel(tensor_parallel_size=16))
    with pytest.raises(ConfigError, match="at least 1"):
        Parallel(tensor_parallel_size=0)
