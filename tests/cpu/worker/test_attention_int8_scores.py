"""Scores of prompts from 8 bits: against a softmax in float64 of the same rounded rows."""

import functools
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.cpu.worker.driving import small_config
from tests.cpu.worker.test_attention import Step, make_step, numba_three
from twostroke.checkpoint import open_checkpoint
from twostroke.model.int8_rows import TURNED, hadamard, works
from twostroke.testing.tiny_model import write_tiny_checkpoint
from twostroke.worker.attention import make_attention
from twostroke.worker.attention_emit import HAS_DOTS
from twostroke.worker.attention_numba import NumbaAttention
from twostroke.worker.runner import ModelRunner

pytestmark = pytest.mark.skipif(not HAS_DOTS, reason="the processor has no AVX512-BF16")
WEIGHTS = 4e-3  # weights and outputs are bfloat16
MIX = [(0, 1), (0, 300), (520, 150), (200, 3), (300, 21)]
LARGE, SMALL = (1, 2), (0, 3, 4)  # rows with items that are scored from 8 bits, and those without
SHAPES = {
    "smollm2": {},
    "group-7": {"heads": 7, "kv_heads": 1, "head_dim": 128, "block_size": 32},
    "three-blocks": {"heads": 4, "kv_heads": 2, "head_dim": 192, "block_size": 7},
}


def in_8_bits(pool: Tensor, heads: int, scale: float, threads: int = 3) -> NumbaAttention:
    return NumbaAttention(pool, heads, scale, threads, int8_scores=True)


def one_thread(pool: Tensor, heads: int, scale: float) -> NumbaAttention:
    return in_8_bits(pool, heads, scale, 1)


def rounded(rows: Tensor) -> Tensor:
    """Turned, and then to the nearest of 255 steps."""
    turned = (rows.unflatten(-1, (-1, TURNED)) @ hadamard().double()).flatten(-2)
    step = turned.abs().amax(-1, keepdim=True) / 127
    return (turned / step).round().nan_to_num() * step


class Rounded(Step):
    """A step whose queries and keys are those of 8 bits, for its `dense`."""

    def __init__(self, step: Step) -> None:
        super().__init__(**vars(step))
        self.q = rounded(self.q.double())
        self.pool = self.pool.double()
        self.pool[:, :, 0] = rounded(self.pool[:, :, 0])


def errors(out: Tensor, step: Step, exact: Step) -> list[float]:
    """Largest of each row, relative to the largest of its output."""
    found = []
    for i in range(len(step.num_computed)):
        expected = exact.dense(i)
        found.append(float((out[step.row(i)] - expected).abs().max() / expected.abs().max()))
    return found


@pytest.mark.parametrize("shape", SHAPES)
def test_equals_a_dense_softmax_of_rounded_rows(shape: str) -> None:
    """From query 200 on, for the first items of a prompt have too few keys."""
    step = make_step(MIX, dtype=torch.bfloat16, **SHAPES[shape])
    out = step.run(in_8_bits)
    exact, wide = errors(out, step, Rounded(step)), errors(out, step, step)
    dense = Rounded(step).dense(1)[200:]
    assert (out[step.row(1)][200:] - dense).abs().max() < 2 * WEIGHTS * dense.abs().max()
    assert exact[2] < 2 * WEIGHTS < wide[2] < 0.1


def test_small_items_keep_every_bit() -> None:
    step = make_step(MIX, dtype=torch.bfloat16)
    expected, out = step.run(numba_three), step.run(in_8_bits)
    for i in SMALL:
        assert torch.equal(out[step.row(i)], expected[step.row(i)])
    for i in LARGE:
        assert not torch.equal(out[step.row(i)], expected[step.row(i)])


def test_rows_do_not_depend_on_neighbours_or_threads() -> None:
    step = make_step([*MIX, (0, 129), (700, 1), (17, 600)], dtype=torch.bfloat16)
    out = step.run(in_8_bits)
    assert torch.equal(step.run(one_thread), out)
    for i in range(len(step.num_computed)):
        assert torch.equal(step.alone(i).run(in_8_bits), out[step.row(i)])


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 3e38])
@pytest.mark.parametrize("which", ["q", "k"])
def test_what_is_not_finite_shows_and_harms_no_other(which: str, value: float) -> None:
    """One element of one query or key, in rows of many that are finite."""
    step = make_step([(0, 300), (200, 150), (0, 200)], dtype=torch.bfloat16)
    expected = step.run(in_8_bits).clone()
    token = step.row(1).start + 70
    getattr(step, which)[token, 0, 5] = value
    out = step.run(in_8_bits)
    for i in (0, 2):
        assert torch.equal(out[step.row(i)], expected[step.row(i)])
    hit = out[token : token + 1, 0] if which == "q" else out[token : step.row(1).stop, :3]
    if value != 3e38:  # whose products are finite
        assert not hit.isfinite().any()
    before = slice(step.row(1).start, token)
    assert torch.equal(out[before, 3:], expected[before, 3:])
    if which == "q":
        assert torch.equal(out[token, 1:], expected[token, 1:])


def test_rows_of_zeros_are_no_division_by_zero() -> None:
    step = make_step([(0, 300)], dtype=torch.bfloat16)
    step.q.zero_()
    step.k.zero_()
    out = step.run(in_8_bits)
    torch.testing.assert_close(out.double(), step.dense(0), atol=WEIGHTS, rtol=WEIGHTS)


@pytest.mark.parametrize("hard", ["a large channel", "a large mean", "large scores"])
def test_hard_keys_cost_little(hard: str) -> None:
    """Against the keys as they are: a weight is off by the error of its score."""
    step = make_step([(0, 400)], dtype=torch.bfloat16)
    if hard == "a large channel":
        step.k[:, :, 7] *= 20
    elif hard == "a large mean":
        step.k += 5 * torch.randn(64)
    else:
        step.q *= 8
    (error,) = errors(step.run(in_8_bits), step, step)
    assert error < 0.06


def test_where_it_cannot_be_scores_are_from_16_bits() -> None:
    def kind(head_dim: int, dtype: torch.dtype, *, int8_scores: bool) -> str:
        pool = torch.zeros((2, 1, 2, 1, 16, head_dim), dtype=dtype)
        attention = make_attention(pool, 2, 1.0, int8_scores=int8_scores)
        in_int8 = [attention.scores_in_int8(*it) for it in ((64, 128), (31, 128), (64, 127))]
        assert in_int8 == ["8 bits" in attention.kind, False, False]
        return attention.kind

    words = "scores of prompts in 8 bits"
    assert words in kind(64, torch.bfloat16, int8_scores=True)
    assert words not in kind(64, torch.bfloat16, int8_scores=False)
    assert words not in kind(96, torch.bfloat16, int8_scores=True)
    assert words not in kind(64, torch.float32, int8_scores=True)


@pytest.mark.skipif(not works(), reason="no products in 8 bits on this processor")
def test_a_model_in_int8_has_them(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, head_dim=64, vocab_size=320)
    checkpoint = open_checkpoint(tmp_path)
    start = functools.partial(small_config, dtype="bfloat16")
    for quantization in ("int8", "none"):
        runner = ModelRunner(start(quantization=quantization), checkpoint)
        kernels = next(reason for name, _, reason in runner.facts if name == "Kernels")
        assert ("scores of prompts in 8 bits" in kernels) == (quantization == "int8")
