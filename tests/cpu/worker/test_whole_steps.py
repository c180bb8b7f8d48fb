"""A step as one program gives the bits of the same step layer by layer."""

import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.cpu.model.test_gguf import Quant, write_gguf
from tests.cpu.worker.driving import Driver, Request, small_config
from twostroke.checkpoint import open_checkpoint
from twostroke.errors import ConfigError
from twostroke.model import few_rows_quantised, int8_rows
from twostroke.model.elementwise import kernels
from twostroke.model.few_rows_quantised import MAX_QUANTISED_ROWS, works
from twostroke.model.step_ends import address
from twostroke.testing.tiny_model import write_tiny_checkpoint
from twostroke.worker import loading
from twostroke.worker.device import check_quantization
from twostroke.worker.inputs import StepInputs
from twostroke.worker.runner import ModelRunner
from twostroke.worker.whole_steps import whole_steps


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    write_tiny_checkpoint(path, request.param, num_hidden_layers=3, vocab_size=320)
    return path


def make_runner(directory: Path, threads: int, **settings: str) -> ModelRunner:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        config = small_config(dtype="bfloat16", cpu_threads=threads, **settings)
        return ModelRunner(config, open_checkpoint(directory))
    finally:
        torch.set_num_threads(before)


def inputs_of(counts: list[int], seed: int) -> StepInputs:
    """Rows of `counts` tokens, each behind 5 computed ones, in blocks of their own."""
    rng, total = np.random.default_rng(seed), sum(counts)
    starts = np.concatenate(([0], np.cumsum(counts)))
    offsets = np.arange(total) - np.repeat(starts[:-1], counts)
    return StepInputs(
        token_ids=rng.integers(0, 256, total),
        positions=offsets + 5,
        query_start=starts.astype(np.int32),
        num_computed=np.full(len(counts), 5, np.int32),
        block_tables=np.arange(1, 1 + 24 * len(counts), dtype=np.int32).reshape(-1, 24),
    )


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("threads", [1, 2])
def test_every_bit_is_that_of_the_layers(directory: Path, threads: int, quantization: str) -> None:
    if threads > len(os.sched_getaffinity(0)):
        pytest.skip(f"fewer than {threads} cores")
    if quantization != "none" and not works():
        pytest.skip("no kernel for 8 bits on this processor")
    runner = make_runner(directory, threads, quantization=quantization)
    weights = next(reason for name, _, reason in runner.facts if name == "Weights")
    assert ("12 of 12 matrices in 8 bits (W8A8)" in weights) == (quantization == "int8")
    if runner.whole_steps is None:
        pytest.skip("no kernel for few rows on this processor")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for seed, counts in enumerate(
            ([1], [1, 1, 1], [3, 1, 20], [64], [7, 0, 1], [65], [40, 150, 1, 9], [7, 70])
        ):
            step, pools = inputs_of(counts, seed), []
            together = []
            for whole in (runner.whole_steps, None):
                runner.whole_steps = whole
                runner.kv_pool.zero_()
                together.append(runner.forward(step).clone())
                pools.append(runner.kv_pool.clone())
            runner.whole_steps = whole_steps(runner.model, runner.attention)
            assert torch.equal(*together), f"rows of {counts}"
            assert torch.equal(*pools), f"KV of rows of {counts}"
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2])
def test_hidden_states_that_are_wanted_are_those_of_all(directory: Path, threads: int) -> None:
    if threads > len(os.sched_getaffinity(0)):
        pytest.skip(f"fewer than {threads} cores")
    runner = make_runner(directory, threads)
    if runner.whole_steps is None:
        pytest.skip("no kernel for few rows on this processor")
    step = inputs_of([1, 130, 1, 150, 1], 0)
    every = runner.forward(step).clone()
    for wanted in ([0, 130, 131, 281, 282], [282], [], [5, 60, 100], list(range(283))):
        rows = np.array(wanted, np.int64)
        runner.attention.plan(step.query_start, step.num_computed, step.block_tables)
        runner.kv_pool.zero_()
        found = runner.whole_steps.forward(step.token_ids, step.positions, wanted=rows).hidden
        assert torch.equal(found[wanted], every[wanted])


@pytest.mark.parametrize("threads", [1, 2])
def test_few_bits_are_what_the_layers_give_but_for_roundings(directory: Path, threads: int) -> None:
    if threads > len(os.sched_getaffinity(0)):
        pytest.skip(f"fewer than {threads} cores")
    if not works():
        pytest.skip("no kernel for few bits on this processor")
    runner = make_runner(directory, threads, quantization="int4")
    if runner.whole_steps is None:
        pytest.skip("no kernel for few rows on this processor")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        step = inputs_of([1, 1, MAX_QUANTISED_ROWS - 2], 0)
        program, found = runner.whole_steps, []
        for whole in (program, program, None):
            runner.whole_steps = whole
            runner.kv_pool.zero_()
            found.append((runner.forward(step).clone(), runner.kv_pool.clone()))
        (hidden, kv), again, (expected, expected_kv) = found
        assert torch.equal(hidden, again[0])
        torch.testing.assert_close(hidden, expected, atol=0.05, rtol=0.05)
        torch.testing.assert_close(kv, expected_kv, atol=0.05, rtol=0.05)
        runner.whole_steps = program
        alone = StepInputs(
            token_ids=step.token_ids[1:2],
            positions=step.positions[1:2],
            query_start=np.array([0, 1], np.int32),
            num_computed=step.num_computed[1:2],
            block_tables=step.block_tables[1:2],
        )
        runner.kv_pool.zero_()
        assert torch.equal(runner.forward(alone)[0], hidden[1]), "neighbours change nothing"
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_logits_of_the_program_are_those_of_the_model(directory: Path, quantization: str) -> None:
    if quantization != "none" and not works():
        pytest.skip("no kernel for 8 bits on this processor")
    runner = make_runner(directory, 1, quantization=quantization)
    if runner.whole_steps is None:
        pytest.skip("no kernel for few rows on this processor")
    for counts in ([1], [1, 2], [9, 1]):
        step = inputs_of(counts, 0)
        plan = (step.query_start, step.num_computed, step.block_tables)
        runner.attention.plan(*plan)
        output = runner.whole_steps.forward(step.token_ids, step.positions, with_logits=True)
        if output.logits is None:
            pytest.skip("the LM head has no kernel")
        assert output.best is not None
        assert torch.equal(output.logits, runner.model.logits(output.hidden))
        assert output.best.tolist() == output.logits.argmax(-1).tolist()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 0),  # all are equal: the first
        ({3: 2.0, 1500: 2.0}, 3),
        ({2047: -1.0, 7: 1e-42}, 7),
        ({9: float("nan"), 4: 5.0}, -1),
        ({9: -float("nan"), 4: 5.0}, -1),
        ({9: float("inf")}, -1),
        (dict.fromkeys(range(2050), -3.0) | {2049: -2.0}, 2049),
        (dict.fromkeys(range(2050), -float("inf")), -1),
    ],
)
def test_the_best_is_the_first_of_the_largest_if_that_is_a_number(
    changes: dict[int, float], expected: int
) -> None:
    logits, best = np.zeros((2, 2050), np.float32), np.zeros(2, np.int32)
    for place, value in changes.items():
        logits[1, place] = value
    kernel = kernels()
    assert kernel is not None
    kernel.run(address("best"), 2, logits.ctypes.data, best.ctypes.data, 2050)
    assert best.tolist() == [0, expected]


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_tokens_do_not_depend_on_how_steps_are_cut(directory: Path, quantization: str) -> None:
    """Many tokens in a step run layer by layer, few as a program: the text is the same."""
    if quantization != "none" and not works():
        pytest.skip("no kernel for 8 bits on this processor")
    runner = make_runner(directory, 1, quantization=quantization)
    rng = random.Random(0)
    prompt = [rng.randrange(256) for _ in range(70)]
    outputs = [
        Driver(runner.run, seed=seed).serve([Request(list(prompt), 8)], chunk=chunk)
        for seed, chunk in enumerate((1000, 9))
    ]
    assert outputs[0] == outputs[1]


def test_what_has_no_kernels_runs_layer_by_layer(directory: Path, tmp_path: Path) -> None:
    assert ModelRunner(small_config(), open_checkpoint(directory)).whole_steps is None  # float32
    write_tiny_checkpoint(tmp_path, "qwen3_moe")
    config = small_config(dtype="bfloat16")
    assert ModelRunner(config, open_checkpoint(tmp_path)).whole_steps is None


def test_a_quantization_that_cannot_be_is_refused(directory: Path) -> None:
    config = small_config(quantization="int4")
    with pytest.raises(ConfigError, match="int4, but the model runs in float32 on cpu"):
        ModelRunner(config, open_checkpoint(directory))


def test_int8_needs_one_rank_and_a_processor_that_multiplies_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cpu, config = torch.device("cpu"), small_config(quantization="int8", tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="int8, but --tensor-parallel-size is 2; it needs"):
        check_quantization(config, cpu, torch.bfloat16)
    monkeypatch.setattr(int8_rows, "works", lambda: False)
    with pytest.raises(ConfigError, match="int8, but this processor has no AVX512-VNNI"):
        check_quantization(small_config(quantization="int8"), cpu, torch.bfloat16)
    monkeypatch.setattr(few_rows_quantised, "works", lambda: False)
    with pytest.raises(ConfigError, match="int4, but this processor has neither AVX512-VNNI nor"):
        check_quantization(small_config(quantization="int4"), cpu, torch.bfloat16)


def test_with_little_memory_weights_are_kept_in_few_bits_only(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not works():
        pytest.skip("no kernel for few bits on this processor")
    stored = write_gguf(tmp_path / "model.gguf", directory, Quant.Q8_0)
    both = make_runner(stored, 1)
    monkeypatch.setattr(loading, "MAX_WHOLE_SHARE", 0.0)
    few = make_runner(stored, 1)
    assert few.model.weight_bytes < both.model.weight_bytes
    one, many = inputs_of([1, 1], 0), inputs_of([64, 40], 1)
    assert torch.equal(both.forward(one).clone(), few.forward(one))
    torch.testing.assert_close(both.forward(many), few.forward(many), atol=0.2, rtol=0.2)
