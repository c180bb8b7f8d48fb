"""What is handed back stays what it was; memory for weights, cut from chunks."""

import ctypes
import functools
import mmap
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from twostroke.model import memory
from twostroke.model.memory import HugePages, give_back_freed_memory, unmap_clean_pages

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/smaps")


@linux_only
def test_code_runs_on_when_its_pages_were_let_go() -> None:
    x = torch.arange(12.0).view(3, 4)
    before = x @ x.T
    assert unmap_clean_pages() > 1 << 20
    assert torch.equal(x @ x.T, before)


@linux_only
def test_what_the_dynamic_linker_or_we_have_written_stays(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"a" * (2 * mmap.PAGESIZE))
    with file.open("rb") as opened:
        changed = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
        untouched = mmap.mmap(opened.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
    changed[0] = ord("b")
    address = torch.frombuffer(changed, dtype=torch.uint8).data_ptr()
    _make_read_only(address, 2 * mmap.PAGESIZE)
    unmap_clean_pages()
    assert changed[:2] == b"ba"
    assert untouched[:2] == b"aa"


def test_pages_are_let_go_once_and_nobody_loads_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines in threads of one process load together: one lets go, the others wait for it."""
    begun, all_wait, calls = threading.Event(), threading.Event(), []

    def let_go() -> int:
        calls.append(begun.set())
        assert all_wait.wait(10)
        return 7

    monkeypatch.setattr(memory, "_first_unmapping", functools.cache(let_go))
    with ThreadPoolExecutor(3) as pool:
        loads = [pool.submit(memory.unmap_clean_pages_once) for _ in range(3)]
        assert begun.wait(10)
        assert not any(load.done() for load in loads)
        all_wait.set()
        assert [load.result() for load in loads] == [7, 7, 7]
    assert len(calls) == 1


def _make_read_only(address: int, length: int) -> None:
    """As the dynamic linker does with what it has relocated."""
    mprotect = ctypes.CDLL(None, use_errno=True).mprotect
    mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    assert mprotect(address, length, mmap.PROT_READ) == 0


def test_freed_memory_may_be_given_back_at_any_time() -> None:
    kept = torch.arange(1 << 20)
    del kept
    give_back_freed_memory()
    assert int(torch.arange(1 << 20).sum()) == (1 << 20) * ((1 << 20) - 1) // 2


def test_parts_do_not_overlap_and_outlive_their_maker() -> None:
    pages = HugePages()
    sizes = [1, 64, 1000, HugePages.CHUNK_BYTES - 4096, HugePages.CHUNK_BYTES + 1, 100]
    parts = [pages.empty(size) for size in sizes]
    del pages
    for value, part in enumerate(parts):
        part.fill_(value)
    for value, (size, part) in enumerate(zip(sizes, parts, strict=True)):
        assert part.shape == (size,)
        assert part.data_ptr() % 64 == 0
        assert torch.equal(part.unique(), torch.tensor([value], dtype=torch.uint8))
