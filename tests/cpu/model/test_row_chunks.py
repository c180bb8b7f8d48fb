"""Chunks of rows hold each row once; a stage touches the rows of its chunks and no others."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from twostroke.arrays import Int64s
from twostroke.model.elementwise import float_bits, kernels
from twostroke.model.program import Program
from twostroke.model.row_chunks import CHUNK_ROWS, RowChunks, Stage, chunks_of, chunks_with

WIDTH = 48


def rows_in(chunks: Int64s) -> list[int]:
    return [row for first, end in chunks.tolist() for row in range(first, end)]


@given(st.integers(0, 5000), st.integers(1, 70))
def test_all_rows_are_in_one_chunk_each(num_rows: int, num_threads: int) -> None:
    chunks = chunks_of(num_rows, num_threads)
    assert rows_in(chunks) == list(range(num_rows))
    sizes = chunks[:, 1] - chunks[:, 0]
    assert sizes.max(initial=0) <= CHUNK_ROWS
    assert sizes.max(initial=0) - sizes.min(initial=CHUNK_ROWS) <= 1 or len(sizes) == 0


def test_threads_have_as_many_rows_each() -> None:
    assert chunks_of(1024, 2).tolist()[:3] == [[0, 85], [85, 170], [170, 256]]
    assert len(chunks_of(1024, 2)) == 12
    assert len(chunks_of(65, 64)) == 5, "a weight is not read for every few rows"


@given(st.sets(st.integers(0, 700)), st.integers(1, 4))
def test_wanted_rows_are_in_one_chunk_each(wanted: set[int], num_threads: int) -> None:
    chunks = chunks_with(np.array(sorted(wanted), np.int64), num_threads)
    rows = rows_in(chunks)
    assert len(set(rows)) == len(rows)
    assert wanted <= set(rows)
    assert (chunks[:, 1] - chunks[:, 0]).max(initial=0) <= CHUNK_ROWS


def test_rows_far_apart_are_alone() -> None:
    assert chunks_with(np.array([255, 511, 520]), 1).tolist() == [[255, 256], [511, 521]]


def test_a_stage_is_told_its_rows_and_its_thread(threads: int) -> None:
    kernel = kernels()
    assert kernel is not None
    h, weight = torch.randn(300, WIDTH), torch.randn(WIDTH)
    x, out = torch.empty(300, WIDTH).bfloat16(), torch.zeros(300, WIDTH).bfloat16()
    own = torch.empty(threads, CHUNK_ROWS, WIDTH).bfloat16()
    words = (0, weight.data_ptr(), 0, WIDTH, float_bits(1e-5))

    def stage(y: torch.Tensor, row_bytes: int, thread_bytes: int) -> Stage:
        """Norm of h into y, which is all rows' or a thread's own."""
        return Stage(
            kernel.add_norm,
            0,
            [0, 0, 0, h.data_ptr(), *words[:2], y.data_ptr(), *words[3:]],
            [0, 0, 0, 4 * WIDTH, 0, 0, row_bytes],
            [0, 0, 0, 0, 0, 0, thread_bytes],
        )

    own_stage = stage(own, 0, 2 * CHUNK_ROWS * WIDTH)
    chunks = RowChunks([own_stage, stage(out, 2 * WIDTH, 0)], threads, kernel.thread_num)
    program = Program([chunks.call])
    bounds = np.array([[0, 7], [50, 140], [299, 300]], np.int64)
    chunks.begin(bounds, program.num_threads, timed=True)
    program.run(program.num_threads, 1)
    kernel.run(kernel.add_norm, 300, h.data_ptr(), *words[:2], x.data_ptr(), *words[3:])
    rows = rows_in(bounds)
    others = sorted(set(range(300)) - set(rows))
    assert torch.equal(out[rows], x[rows])
    assert not out[others].any()
    assert chunks.shares().sum() == pytest.approx(1)
    assert (chunks.shares() > 0).all()
    chunks.begin(bounds, program.num_threads, timed=False)
    program.run(program.num_threads, 1)
    assert not chunks.shares().any()
