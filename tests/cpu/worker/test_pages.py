"""Memory that a KV pool has before it is written."""

import resource
import sys

import pytest
import torch

from twostroke.kv.sizing import KvLayout
from twostroke.worker import pages, pool
from twostroke.worker.pages import PIECE_BYTES, PagesAhead

LAYOUT = KvLayout(num_layers=8, num_kv_heads=8, head_dim=128)  # 512 KiB a block

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux is asked for memory")


def make_pool(num_blocks: int) -> torch.Tensor:
    return pool.allocate_pool(num_blocks, LAYOUT, torch.bfloat16, torch.device("cpu"))


def faults_of_writing(blocks: torch.Tensor) -> int:
    view = blocks.view(torch.int16).view(-1).numpy()
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    view[:: 4096 // 2] += 1
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


@linux
def test_the_next_blocks_have_memory_and_those_behind_do_not():
    kv_pool = make_pool(128)
    kv_pool[:4] = 1.0
    ahead = PagesAhead(kv_pool, ahead_bytes=8 << 20)
    pieces = 0
    while ahead.fetch(3):
        pieces += 1
    assert pieces in (4, 5), "8 MiB, and what is left of the piece that the blocks in use end in"
    assert faults_of_writing(kv_pool[4:20]) <= 2, "of asking, perhaps"
    assert (kv_pool[:4] == 1.0).all(), "what was there is as it was"
    assert faults_of_writing(kv_pool[40:72]) >= 16 << 20 >> 21, "a large page each, or more"


@linux
def test_only_what_is_new_is_asked_for_up_to_the_end_of_the_pool():
    ahead = PagesAhead(make_pool(16), ahead_bytes=4 << 20)
    assert sum(iter(lambda: ahead.fetch(0), False)) <= 3
    assert not ahead.fetch(0)
    assert ahead.fetch(8), "a block of the next piece is used now"
    while ahead.fetch(15):
        pass
    assert not ahead.fetch(15)


def test_a_system_that_refuses_is_not_asked_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pages, "_MADV_POPULATE_WRITE", -1)
    ahead = PagesAhead(make_pool(64), ahead_bytes=4 * PIECE_BYTES)
    assert sum(iter(lambda: ahead.fetch(0), False)) <= 1
