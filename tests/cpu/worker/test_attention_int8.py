"""Attention over a pool of int8, against a dense softmax in float64 over what the pool holds."""

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from twostroke.errors import ConfigError
from twostroke.worker import attention_numba
from twostroke.worker.attention import TorchAttention, make_attention, why_no_int8
from twostroke.worker.attention_emit import HAS_DOTS
from twostroke.worker.attention_int8 import MAX_HEAD_DIM
from twostroke.worker.attention_numba import NumbaAttention

TOLERANCE = 1e-2  # of the largest output: queries, weights and outputs are bfloat16
MIX = [(0, 1), (5, 1), (37, 1), (64, 16), (0, 40), (9, 0), (20, 17), (600, 1), (530, 3), (90, 33)]
pytestmark = pytest.mark.skipif(not HAS_DOTS, reason="the processor has no AVX512-BF16")


@dataclass
class Rows:
    """Rows of (num_computed, queries), whose contexts are written by the kernel itself."""

    rows: list[tuple[int, int]]
    heads: int = 9
    kv_heads: int = 3
    head_dim: int = 64
    block_size: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        self.computed, self.counts = np.array(self.rows, np.int32).reshape(-1, 2).T
        used = -(-(self.computed + self.counts) // self.block_size)
        free = iter(np.random.default_rng(self.seed).permutation(int(used.sum()) + 2))
        self.tables = np.full((len(self.rows), int(used.max(initial=0)) + 1), 2**31 - 1, np.int32)
        for row, count in enumerate(used):
            self.tables[row, :count] = [next(free) for _ in range(count)]
        shape = (int(used.sum()) + 2, 2, 2, self.kv_heads, self.block_size, self.head_dim + 4)
        self.pool = torch.full(shape, -1, dtype=torch.int8)  # a scale of four bytes -1 is NaN
        self.q, self.k, self.v = (
            [self._normal(c + n, heads) for c, n in self.rows]
            for heads in (self.heads, self.kv_heads, self.kv_heads)
        )

    def _normal(self, tokens: int, heads: int) -> torch.Tensor:
        return torch.randn(tokens, heads, self.head_dim).bfloat16()

    def attention(self, threads: int = 1) -> NumbaAttention:
        return NumbaAttention(self.pool, self.heads, self.head_dim**-0.5, threads)

    def write_contexts(self) -> None:
        self._attend(
            self.attention(), list(range(len(self.rows))), 0 * self.computed, self.computed
        )

    def run(self, threads: int = 1, rows: list[int] | None = None) -> list[torch.Tensor]:
        """Each row's output [queries, heads, head_dim]; only these rows' are in the step."""
        rows = list(range(len(self.rows))) if rows is None else rows
        return self._attend(self.attention(threads), rows, self.computed, self.counts)

    def _attend(self, attention, rows, computed, counts) -> list[torch.Tensor]:
        q, k, v = (
            torch.cat([it[i][computed[i] : computed[i] + counts[i]] for i in rows])
            for it in (self.q, self.k, self.v)
        )
        starts = np.concatenate(([0], np.cumsum(counts[rows]))).astype(np.int32)
        attention.plan(starts, computed[rows], self.tables[rows])
        out = attention(1, q, k, v).view(-1, self.heads, self.head_dim)
        return [out[a:b] for a, b in itertools.pairwise(starts)]

    def held(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Numbers [context, 2, kv heads, D] and scales [context, 2, kv heads, 1] in the pool."""
        positions = np.arange(self.computed[row] + self.counts[row])
        blocks = self.tables[row, positions // self.block_size]
        held = self.pool[blocks, 1, :, :, positions % self.block_size]
        numbers, scales = held.split((self.head_dim, 4), dim=-1)
        return numbers.double(), scales.clone(memory_format=torch.contiguous_format).view(
            torch.float32
        ).double()

    def dense(self, row: int) -> torch.Tensor:
        numbers, scales = self.held(row)
        kv = (numbers * scales).repeat_interleave(self.heads // self.kv_heads, dim=2)
        q = self.q[row][self.computed[row] :].double()
        scores = torch.einsum("qhd,khd->hqk", q, kv[:, 0]) * self.head_dim**-0.5
        seen = torch.arange(len(kv)) <= torch.arange(self.computed[row], len(kv))[:, None]
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, kv[:, 1])


def assert_dense(step: Rows, outs: list[torch.Tensor]) -> None:
    for row, out in enumerate(outs):
        expected = step.dense(row)
        tolerance = TOLERANCE * max(1.0, float(expected.abs().max())) if len(out) else 0
        torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=0)


@settings(max_examples=25, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 200), st.integers(0, 70)), min_size=1, max_size=5),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 9),
    head_dim=st.integers(1, 50).map(lambda n: 2 * n),
    block_size=st.integers(1, 40),
    seed=st.integers(0, 2**16),
)
def test_equals_dense_on_any_mix(rows, kv_heads, group, head_dim, block_size, seed):
    step = Rows(rows, kv_heads * group, kv_heads, head_dim, block_size, seed)
    step.write_contexts()
    assert_dense(step, step.run(threads=3))


def test_what_is_written_is_the_nearest_of_255_steps():
    step = Rows(MIX)
    step.write_contexts()
    step.run()
    for row in range(len(MIX)):
        numbers, scales = step.held(row)
        given = torch.stack([step.k[row], step.v[row]], dim=1).double()
        largest = given.abs().amax(-1, keepdim=True)
        torch.testing.assert_close(scales, largest / 127, rtol=1e-6, atol=0)
        assert ((numbers * scales - given).abs() <= 0.5001 * scales).all()
        assert (numbers.abs().amax(-1) == 127).all()


def test_rows_of_zeros_stay_zeros():
    step = Rows([(0, 1), (0, 40)])
    for tensor in (*step.k, *step.v):
        tensor.zero_()
    for out in step.run():
        assert torch.equal(out, torch.zeros_like(out))


@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_what_is_not_finite_shows_and_harms_no_other(which):
    step = Rows([(30, 1), (40, 1), (10, 30), (20, 20)])
    step.write_contexts()
    expected = step.run()
    for row, value in ((1, torch.nan), (2, torch.inf)):
        getattr(step, which)[row][step.computed[row] :] = value
    outs = step.run()
    assert not outs[1].isfinite().any()
    assert not outs[2].isfinite().all()
    for row in (0, 3):
        assert torch.equal(outs[row], expected[row])


def test_rows_do_not_depend_on_neighbours_or_threads():
    step = Rows(MIX)
    step.write_contexts()
    together = step.run(threads=3)
    for row in range(len(MIX)):
        assert torch.equal(step.run(rows=[row])[0], together[row])


def test_sharing_changes_no_bit():
    step = Rows([(300, 1), (290, 1), (700, 1), (300, 1)])
    step.write_contexts()
    step.tables[1:, :16] = step.tables[0, :16]
    together = step.run(threads=3)
    for row in range(4):
        assert torch.equal(step.run(rows=[row])[0], together[row])
    assert_dense(step, together)


def test_where_it_cannot_be_it_is_refused(monkeypatch):
    cpu = torch.device("cpu")
    assert why_no_int8(cpu, torch.bfloat16, 64) == ""
    assert "runs in float32 on cpu" in why_no_int8(cpu, torch.float32)
    assert "runs in bfloat16 on cuda" in why_no_int8(torch.device("cuda"), torch.bfloat16)
    assert f"at most {MAX_HEAD_DIM}" in why_no_int8(cpu, torch.bfloat16, 1024)
    pool = torch.zeros((2, 1, 2, 1, 16, 68), dtype=torch.int8)
    with pytest.raises(ValueError, match="int8"):
        TorchAttention(pool, 1, 1.0)
    monkeypatch.setattr(attention_numba, "HAS_DOTS", False)
    with pytest.raises(ConfigError, match="AVX512-BF16"):
        make_attention(pool, 1, 1.0)
