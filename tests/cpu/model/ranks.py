"""The ranks of a tensor-parallel group as threads of one process."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")

TIMEOUT_S = 20


class _Table:
    """What the ranks have put down for each other, and a barrier before and after reading it."""

    def __init__(self, size: int) -> None:
        self.values: list[object] = [None] * size
        self.barrier = threading.Barrier(size, timeout=TIMEOUT_S)


class ThreadGroup:
    """A `model.parallel.Group` whose ranks are threads."""

    def __init__(self, rank: int, size: int, table: _Table) -> None:
        self.rank, self.size, self._table = rank, size, table

    def _exchange(self, value: object) -> list:
        self._table.values[self.rank] = value
        self._table.barrier.wait()
        values = list(self._table.values)
        self._table.barrier.wait()
        return values

    def all_reduce(self, x: Tensor) -> Tensor:
        return torch.stack(self._exchange(x)).sum(0)

    def gather(self, x: Tensor) -> list[Tensor]:
        parts = self._exchange(x)
        return parts if self.rank == 0 else []

    def broadcast(self, x: Tensor) -> Tensor:
        return self._exchange(x)[0]

    def minimum(self, value: int) -> int:
        return min(self._exchange(value))


def on_ranks(size: int, run: Callable[[ThreadGroup], T]) -> list[T]:
    """What `run` returns on each rank. If one fails, the others do, too."""
    table = _Table(size)

    def run_rank(rank: int) -> T:
        try:
            return run(ThreadGroup(rank, size, table))
        except BaseException:
            table.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run_rank, range(size)))
