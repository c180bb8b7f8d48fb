"""Attention kernels against a dense softmax in float64, over scattered and poisoned pools."""

import sys
from dataclasses import dataclass
from pathlib import Path

import numba
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from twostroke.model.compiled import use_kernel_cache
from twostroke.worker.attention import (
    MAX_GATHERED_TOKENS,
    PagedAttention,
    TorchAttention,
    make_attention,
)
from twostroke.worker.attention_numba import NumbaAttention
from twostroke.worker.attention_plan import ITEM_COLUMNS, MERGE_COLUMNS, SPLIT_KEYS, plan_step

LAYERS = 2
TOLERANCE = {torch.float32: 3e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}


def numba_one(pool, heads, scale):
    return NumbaAttention(pool, heads, scale, num_threads=1)


def numba_three(pool, heads, scale):
    return NumbaAttention(pool, heads, scale, num_threads=3)


KERNELS = [TorchAttention, numba_one, numba_three]


@dataclass
class Step:
    """Rows over a pool that is NaN wherever no row has written."""

    pool: torch.Tensor
    heads: int
    query_start: np.ndarray
    num_computed: np.ndarray
    block_tables: np.ndarray
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    def run(self, kernel, layer: int = 1) -> torch.Tensor:
        attention: PagedAttention = kernel(self.pool, self.heads, self.pool.shape[-1] ** -0.5)
        attention.plan(self.query_start, self.num_computed, self.block_tables)
        out = attention(layer, self.q, self.k, self.v)
        return out.view(self.q.shape)

    def row(self, i: int) -> slice:
        return slice(self.query_start[i], self.query_start[i + 1])

    def dense(self, i: int, layer: int = 1) -> torch.Tensor:
        """Row i in float64, from the pool as it is after a run."""
        q = self.q[self.row(i)].double()
        context = int(self.num_computed[i]) + len(q)
        block_size = self.pool.shape[4]
        positions = np.arange(context)
        blocks = torch.as_tensor(self.block_tables[i, positions // block_size]).long()
        slots = torch.as_tensor(positions % block_size)
        group = self.heads // self.pool.shape[3]
        cached = self.pool[blocks, layer, :, :, slots].double().repeat_interleave(group, dim=2)
        keys, values = cached[:, 0], cached[:, 1]
        scores = torch.einsum("qhd,khd->hqk", q, keys) * self.pool.shape[-1] ** -0.5
        seen = torch.arange(context) <= torch.arange(context - len(q), context)[:, None]
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, values)

    def alone(self, i: int) -> "Step":
        """The same row, in a step of its own."""
        rows = self.row(i)
        return Step(
            self.pool,
            self.heads,
            np.array([0, rows.stop - rows.start], np.int32),
            self.num_computed[i : i + 1],
            self.block_tables[i : i + 1],
            self.q[rows],
            self.k[rows],
            self.v[rows],
        )


def make_step(
    rows: list[tuple[int, int]],
    *,
    heads: int = 9,
    kv_heads: int = 3,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    spread: float = 1.0,
) -> Step:
    """`rows` are (num_computed, queries). Keys and queries are normal with deviation `spread`."""
    generator = torch.Generator().manual_seed(seed)
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * spread).to(dtype)

    num_computed = np.array([computed for computed, _ in rows], np.int32)
    counts = np.array([count for _, count in rows], np.int32)
    used = -(-(num_computed + counts) // block_size)
    free = iter(rng.permutation(int(used.sum()) + 3))
    pool = torch.full(
        (int(used.sum()) + 3, LAYERS, 2, kv_heads, block_size, head_dim), torch.nan, dtype=dtype
    )
    # Entries beyond a row's context are no block at all.
    tables = np.full((len(rows), int(used.max(initial=0)) + 1), 2**31 - 1, np.int32)
    for i, computed in enumerate(num_computed):
        tables[i, : used[i]] = [next(free) for _ in range(used[i])]
        positions = np.arange(computed)
        blocks = torch.as_tensor(tables[i, positions // block_size]).long()
        pool[blocks, :, :, :, torch.as_tensor(positions % block_size)] = normal(
            int(computed), LAYERS, 2, kv_heads, head_dim
        )
    tokens = int(counts.sum())
    fused = normal(tokens, heads + 2 * kv_heads, head_dim)  # as a fused projection leaves them
    q, k, v = fused.split((heads, kv_heads, kv_heads), dim=1)
    query_start = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    return Step(pool, heads, query_start, num_computed, tables, q, k, v)


MIX = [(0, 1), (5, 1), (37, 1), (64, 16), (0, 40), (9, 0), (20, 17), (600, 1), (530, 3), (90, 33)]
SHAPES = {
    "smollm2": {"heads": 9, "kv_heads": 3, "head_dim": 64, "block_size": 16},
    "mha": {"heads": 4, "kv_heads": 4, "head_dim": 32, "block_size": 8},
    "mqa-one-slot": {"heads": 5, "kv_heads": 1, "head_dim": 16, "block_size": 1},
    "group-7": {"heads": 14, "kv_heads": 2, "head_dim": 128, "block_size": 32},
    "odd-dim": {"heads": 8, "kv_heads": 1, "head_dim": 82, "block_size": 7},
    "smallest": {"heads": 2, "kv_heads": 1, "head_dim": 2, "block_size": 3},
    "wide-group": {"heads": 128, "kv_heads": 1, "head_dim": 16, "block_size": 16},
}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_equals_a_dense_softmax(kernel, shape, dtype):
    step = make_step(MIX, dtype=dtype, **SHAPES[shape])
    out = step.run(kernel)
    for i in range(len(MIX)):
        expected = step.dense(i)
        torch.testing.assert_close(
            out[step.row(i)].double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
        )


@settings(max_examples=25, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 150), st.integers(0, 70)), max_size=6),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 9),
    head_dim=st.integers(1, 40).map(lambda n: 2 * n),
    block_size=st.integers(1, 40),
    seed=st.integers(0, 2**16),
)
def test_numba_equals_dense_on_any_mix(rows, kv_heads, group, head_dim, block_size, seed):
    step = make_step(
        rows,
        heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        seed=seed,
    )
    out = step.run(numba_three)
    for i in range(len(rows)):
        torch.testing.assert_close(out[step.row(i)].double(), step.dense(i), atol=3e-6, rtol=3e-6)


@pytest.mark.parametrize("kernel", KERNELS)
def test_writes_the_steps_tokens_and_nothing_else(kernel):
    step = make_step(MIX)
    before = step.pool.clone()
    step.run(kernel, layer=1)
    written = torch.zeros(step.pool.shape, dtype=torch.bool)
    for i, (computed, count) in enumerate(MIX):
        positions = np.arange(computed, computed + count)
        blocks = torch.as_tensor(step.block_tables[i, positions // 16]).long()
        written[blocks, 1, :, :, torch.as_tensor(positions % 16)] = True
        cached = step.pool[blocks, 1, :, :, torch.as_tensor(positions % 16)]
        assert torch.equal(cached[:, 0], step.k[step.row(i)])
        assert torch.equal(cached[:, 1], step.v[step.row(i)])
    rest = torch.where(written, 0.0, step.pool)
    assert torch.equal(rest.nan_to_num(7.0), torch.where(written, 0.0, before).nan_to_num(7.0))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    "chunks", [(150,), (1,) * 20 + (130,), (64, 64, 22), (149, 1), (7, 100, 43)]
)
def test_chunks_of_a_prompt_do_not_matter(kernel, chunks):
    whole = make_step([(0, 150)])
    expected = whole.run(kernel)
    parts = make_step([(0, 150)])
    attention = kernel(parts.pool, parts.heads, 64**-0.5)
    done, outs = 0, []
    for count in chunks:
        rows = slice(done, done + count)
        attention.plan(np.array([0, count]), np.array([done]), parts.block_tables)
        outs.append(attention(1, parts.q[rows], parts.k[rows], parts.v[rows]))
        done += count
    torch.testing.assert_close(torch.cat(outs).view(expected.shape), expected, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_numba_rows_do_not_depend_on_neighbours_or_threads(dtype):
    mixed = make_step(MIX, dtype=dtype)
    out = mixed.run(numba_three)
    assert torch.equal(mixed.run(numba_one), out)
    for i in range(len(MIX)):
        assert torch.equal(mixed.alone(i).run(numba_three), out[mixed.row(i)])


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_row_that_is_not_finite_harms_no_other(kernel):
    step = make_step([(30, 1), (40, 1), (10, 30), (20, 20)])
    expected = step.run(kernel).clone()
    step.q[step.row(1)] = torch.nan
    step.k[step.row(2)] = torch.inf
    out = step.run(kernel)
    assert not out[step.row(1)].isfinite().any()
    for i in (0, 3):
        assert torch.equal(out[step.row(i)], expected[step.row(i)])


@pytest.mark.parametrize("kernel", KERNELS)
def test_scores_in_the_thousands_do_not_overflow(kernel):
    step = make_step([(100, 1), (100, 20), (0, 30)], spread=30.0)
    out = step.run(kernel)
    for i in range(3):
        torch.testing.assert_close(out[step.row(i)].double(), step.dense(i), atol=0.05, rtol=1e-3)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_plan_keeps_no_hold_on_its_arguments(kernel):
    step = make_step(MIX)
    expected = step.run(kernel)
    attention = kernel(step.pool, step.heads, 64**-0.5)
    arrays = [step.query_start.copy(), step.num_computed.copy(), step.block_tables.copy()]
    attention.plan(*arrays)
    for array in arrays:
        array[:] = 0
    assert torch.equal(attention(1, step.q, step.k, step.v).view(expected.shape), expected)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_step_without_tokens(kernel):
    assert make_step([(5, 0), (0, 0)]).run(kernel).shape == (0, 9, 64)
    assert make_step([]).run(kernel).shape == (0, 9, 64)


def test_torch_batches_decode_rows_of_very_different_lengths():
    lengths = [3, MAX_GATHERED_TOKENS // 16, 40, 45, 1, 900]
    step = make_step([(n, 1) for n in lengths], heads=2, kv_heads=1, head_dim=8)
    out = step.run(TorchAttention)
    for i in range(len(lengths)):
        torch.testing.assert_close(out[step.row(i)].double(), step.dense(i), atol=3e-6, rtol=3e-6)


@pytest.mark.parametrize("kernel", KERNELS)
def test_pools_of_a_wrong_shape_are_refused(kernel):
    with pytest.raises(ValueError, match=r"contiguous \[block, layer, 2,"):
        kernel(torch.zeros(4, 2, 3, 1, 16, 8), 1, 1.0)
    with pytest.raises(ValueError, match="contiguous"):
        kernel(torch.zeros(4, 2, 2, 1, 16, 8).transpose(4, 5), 1, 1.0)
    with pytest.raises(ValueError, match="5 heads do not divide over 2 KV heads"):
        kernel(torch.zeros(4, 2, 2, 2, 16, 8), 5, 1.0)


def test_numba_refuses_what_it_would_read_wrongly():
    step = make_step([(0, 4)])
    attention = numba_one(step.pool, 9, 0.125)
    attention.plan(step.query_start, step.num_computed, step.block_tables)
    with pytest.raises(ValueError, match=r"q is \(3, 9, 64\)"):
        attention(1, step.q[:3], step.k, step.v)
    with pytest.raises(ValueError, match=r"k is .*bfloat16; planned"):
        attention(1, step.q, step.k.bfloat16(), step.v)
    with pytest.raises(ValueError, match="strides"):
        attention(1, step.q, step.k, step.v.transpose(1, 2).contiguous().transpose(1, 2))


def test_a_cpu_gets_compiled_kernels_and_torch_without_numba(monkeypatch, caplog):
    pool = torch.zeros(2, 1, 2, 1, 16, 8)
    assert isinstance(make_attention(pool, 2, 1.0), NumbaAttention)
    monkeypatch.setitem(sys.modules, "twostroke.worker.attention_numba", None)
    assert isinstance(make_attention(pool, 2, 1.0), TorchAttention)
    assert "plain torch" in caplog.text


def test_kernels_are_kept_in_the_users_cache(monkeypatch, tmp_path):
    directory = Path(numba.config.CACHE_DIR)
    make_step([(0, 1)]).run(numba_one)
    assert list(directory.rglob("*attend*.nbc"))
    blocker = tmp_path / "file"
    blocker.write_text("")
    monkeypatch.setenv("TWOSTROKE_CACHE", str(blocker))
    assert use_kernel_cache(__file__) == ""
    assert Path(numba.config.CACHE_DIR) == directory


def share(step: Step, rows: list[int], num_blocks: int) -> None:
    """Give `rows` the first row's first blocks."""
    step.block_tables[rows, :num_blocks] = step.block_tables[rows[0], :num_blocks]


def key_reads(step: Step, kv_heads: int = 3) -> int:
    """Keys that one layer's items walk over, one head."""
    rows = (step.query_start, step.num_computed, step.block_tables, step.pool.shape[4])
    heads, none = (kv_heads, step.heads // kv_heads), np.empty(0, np.int32)
    nothing = np.empty((0, 0), np.int32)
    num_items, num_merges, num_members, _ = plan_step(*rows, *heads, nothing, nothing, none, none)
    items = np.empty((num_items, ITEM_COLUMNS), np.int32)
    merges = np.empty((num_merges, MERGE_COLUMNS), np.int32)
    members, bases = np.empty(num_members, np.int32), np.empty(len(rows[1]) * kv_heads, np.int32)
    plan_step(*rows, *heads, items, merges, members, bases)
    return int((items[:, 5] - items[:, 4]).sum()) // kv_heads


def test_a_shared_prefix_is_read_once_a_step():
    step = make_step([(600, 1)] * 70)
    apart = key_reads(step)
    share(step, list(range(70)), 600 // 16)
    # 4 whole parts for 64 rows, again for the other 6, and what is left of each row.
    assert key_reads(step) == 2 * 4 * SPLIT_KEYS + 70 * (601 - 4 * SPLIT_KEYS)
    assert apart == 70 * 601


SHARING = [(300, 1), (40, 3), (290, 1), (700, 1), (128, 1), (127, 1), (300, 1), (513, 1), (5, 0)]


@pytest.mark.parametrize("kernel", [numba_one, numba_three])
@pytest.mark.parametrize("block_size", [16, 24, 128])
def test_sharing_changes_no_bit(kernel, block_size, monkeypatch):
    """Some share one part, some more, one differs in the middle, and a chunk lies in between."""
    step = make_step(SHARING, block_size=block_size, dtype=torch.bfloat16)
    share(step, [0, 2, 3, 4, 5, 6, 7], 127 // block_size)
    share(step, [0, 3, 6, 7], 280 // block_size)
    step.block_tables[6, 4 if block_size < 100 else 1] = step.block_tables[2, -2 % 3]
    assert key_reads(step) < sum(c + n for c, n in SHARING) or block_size == 128
    # What a kernel leaves unwritten must show, whatever lies in fresh memory.
    monkeypatch.setattr(np, "empty", lambda shape, dtype: np.full(shape, 77, dtype))
    together = step.run(kernel)
    for i in range(len(SHARING)):
        assert torch.equal(step.alone(i).run(kernel), together[step.row(i)]), f"row {i}"
