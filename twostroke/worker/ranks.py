"""What the ranks of a model say to each other goes through torch.distributed.

They meet in memory without a name, whose descriptor they inherit, and talk over the loopback
interface: nothing here can be reached from another machine.
"""

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from twostroke.config import EngineConfig
from twostroke.worker.executor import LostContactError


class TorchGroup:
    """A `model.parallel.Group` of processes: gloo for CPU tensors, nccl for those on a GPU.

    LostContactError comes from any call once another rank is gone.
    """

    def __init__(self, config: EngineConfig, rank: int, rendezvous_fd: int) -> None:
        """Waits for all ranks. `rendezvous_fd` is of a memory file that they share."""
        self.rank = rank
        self.size = config.tensor_parallel_size
        has_gpu = config.device != "cpu" and torch.cuda.is_available()
        self.backend = "cpu:gloo,cuda:nccl" if has_gpu else "gloo"
        with _contact(rank):
            store = dist.FileStore(  # type: ignore[attr-defined]
                f"/proc/self/fd/{rendezvous_fd}", self.size
            )
            dist.init_process_group(self.backend, store=store, rank=rank, world_size=self.size)

    def all_reduce(self, x: Tensor) -> Tensor:
        with _contact(self.rank):
            dist.all_reduce(x)
        return x

    def gather(self, x: Tensor) -> list[Tensor]:
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else []
        with _contact(self.rank):
            dist.gather(x, parts or None, dst=0)
        return parts

    def broadcast(self, x: Tensor) -> Tensor:
        with _contact(self.rank):
            dist.broadcast(x, 0)
        return x

    def minimum(self, value: int) -> int:
        least = torch.tensor([value])
        with _contact(self.rank):
            dist.all_reduce(least, op=dist.ReduceOp.MIN)
        return int(least)


@contextlib.contextmanager
def _contact(rank: int) -> Iterator[None]:
    """A failing collective: our own part of it can hardly fail, so another rank is gone."""
    try:
        yield
    except RuntimeError as error:
        first_line = str(error).partition("\n")[0]
        raise LostContactError(f"rank {rank} lost contact with the others: {first_line}") from error
