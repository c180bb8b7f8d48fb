"""How large the KV pool becomes, why, and its memory.

The pool gets what memory is left, but no more than its seats can use; every limit that decided is
put into words for the start-up block. Block 0 is the null block and never used, so N blocks hold
(N - 1) * block_size tokens.
"""

import contextlib
import math
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import torch
from torch import Tensor

from twostroke.config import EngineConfig
from twostroke.connector.base import KvMemory
from twostroke.errors import ConfigError
from twostroke.kv.sizing import KvLayout
from twostroke.kv_messages import KvLayoutRecord
from twostroke.model.parallel import Shard
from twostroke.shape import ModelShape
from twostroke.worker import handoff

Fact = tuple[str, str, str]  # name, value, reason

GIB = 1 << 30
CPU_POOL_CAP_BYTES = 4 * GIB


@dataclass(frozen=True)
class Memory:
    """What is left for the pool once weights and activations have theirs, and how it came about."""

    budget_bytes: int
    reason: str


@dataclass(frozen=True)
class PoolSize:
    """Blocks of the pool (with the null block), and the longest request that it is used for."""

    num_blocks: int
    max_model_len: int
    facts: list[Fact]


def wanted_length(config: EngineConfig, model_max_len: int) -> int:
    """Tokens of the longest request, if memory allows. ConfigError beyond the model's own."""
    wanted_len = config.max_model_len or model_max_len
    if wanted_len > model_max_len:
        raise ConfigError(
            f"--max-model-len is {wanted_len:,}; the model was made for at most {model_max_len:,}",
            hint="lower it, or leave it out",
        )
    return wanted_len


def size_pool(
    config: EngineConfig, layout: KvLayout, memory: Memory, *, model_max_len: int, device: str
) -> PoolSize:
    """Choose the pool's size and the model's length.

    A length that the user asked for must fit (ConfigError); the model's own is lowered until one
    request of that length fits.
    """
    wanted_len = wanted_length(config, model_max_len)
    num_blocks, reason = _num_blocks(config, layout, memory, wanted_len, device)
    num_tokens = max(0, num_blocks - 1) * layout.block_size
    pool = f"{bytes_text(num_blocks * layout.block_bytes)}, {num_blocks:,} blocks"
    pool += f" of {layout.block_size} = {num_tokens:,} tokens"
    if num_tokens == 0:
        if config.num_gpu_blocks_override:
            raise ConfigError(
                f"--num-gpu-blocks-override is {num_blocks}; it must be at least 2, because "
                "block 0 is never used"
            )
        raise ConfigError(
            f"no KV block fits: a block takes {bytes_text(layout.block_bytes)}, and 2 are the "
            f"least; {reason}",
            hint=_more_memory_hint(device),
        )
    length_reason = "--max-model-len" if config.max_model_len else "the model's own"
    if num_tokens < wanted_len:
        if config.max_model_len:
            raise ConfigError(
                f"--max-model-len is {wanted_len:,}, but the KV pool holds {num_tokens:,} tokens "
                f"({reason})",
                hint=f"lower --max-model-len to {num_tokens} or {_more_memory_hint(device)}",
            )
        length_reason = f"the model's own is {wanted_len:,}; the KV pool holds no more"
        wanted_len = num_tokens
    facts = [("KV pool", pool, reason), ("Model length", f"{wanted_len:,} tokens", length_reason)]
    return PoolSize(num_blocks, wanted_len, facts)


def _num_blocks(
    config: EngineConfig, layout: KvLayout, memory: Memory, max_model_len: int, device: str
) -> tuple[int, str]:
    if config.num_gpu_blocks_override:
        return config.num_gpu_blocks_override, "--num-gpu-blocks-override"
    if config.kv_cache_memory_bytes:
        return layout.blocks_in(config.kv_cache_memory_bytes), "--kv-cache-memory-bytes"
    usable = config.max_num_seqs * layout.blocks_for(max_model_len) + 1
    by_memory = layout.blocks_in(max(0, memory.budget_bytes))
    limits = [
        (by_memory, memory.reason),
        (usable, f"all that {config.max_num_seqs} requests of {max_model_len:,} tokens can use"),
    ]
    if device == "cpu":
        cap = f"4 GiB cap on a CPU; {memory.reason}; --kv-cache-memory-bytes raises it"
        share = CPU_POOL_CAP_BYTES // layout.tensor_parallel_size  # all ranks are on one machine
        limits.append((layout.blocks_in(share), cap))
    return min(limits)


def _more_memory_hint(device: str) -> str:
    if device == "cpu":
        return "give more with --kv-cache-memory-bytes"
    return "give more with --gpu-memory-utilization"


def parallel_facts(shape: ModelShape, shard: Shard) -> list[Fact]:
    """What of the model a rank has, when there are several."""
    if shard.size == 1:
        return []
    heads = f"{shard.num_heads} of {shape.num_heads} heads"
    kv_heads = f"{shard.num_kv_heads} of {shape.num_kv_heads} KV heads"
    reason = f"--tensor-parallel-size; each has {heads} and {kv_heads}"
    if shape.num_experts:
        reason += f", and its share of {shape.num_experts} experts"
    return [("Tensor parallel", f"{shard.size} ranks", reason)]


def cpu_memory(
    utilization: float, available_bytes: int, *, weight_bytes: int, activation_bytes: int
) -> Memory:
    """What is left on a CPU, where `available_bytes` were free before the weights were read."""
    share = int(available_bytes * utilization)
    reason = f"{bytes_text(available_bytes)} free"
    if share - weight_bytes - activation_bytes < CPU_POOL_CAP_BYTES:
        reason = (
            f"{utilization:.0%} of {reason}, less {bytes_text(weight_bytes)} weights "
            f"and {bytes_text(activation_bytes)} activations"
        )
    return Memory(share - weight_bytes - activation_bytes, reason)


def gpu_memory(
    utilization: float, free_bytes: int, total_bytes: int, *, activation_bytes: int
) -> Memory:
    """What is left on a GPU, of which `free_bytes` are free after the weights were loaded."""
    used = total_bytes - free_bytes
    reason = (
        f"{utilization:.0%} of {bytes_text(total_bytes)}, less {bytes_text(used)} in use "
        f"and {bytes_text(activation_bytes)} activations"
    )
    return Memory(int(total_bytes * utilization) - used - activation_bytes, reason)


def available_memory(root: Path = Path("/")) -> int:
    """Bytes a process may still take: the host's, or less if its control group has a limit."""
    available: int = psutil.virtual_memory().available
    for limit_bytes, used_bytes in _cgroup_limits(root):
        available = min(available, max(0, limit_bytes - used_bytes))
    return available


def _cgroup_limits(root: Path) -> list[tuple[int, int]]:
    """(limit, in use) of our control group and all above it, version 1 or 2."""
    limits = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        group = base / path.lstrip("/")
        # Inside a container the path may be the host's, and our own group the mount's root.
        for directory in (group, *group.parents):
            limit, used = _read(directory / names[0]).strip(), _read(directory / names[1]).strip()
            if limit.isdigit() and used.isdigit():
                entries = _read(directory / "memory.stat").splitlines()
                reclaimable = int(dict(entry.split() for entry in entries).get(names[2], 0))
                limits.append((int(limit), int(used) - reclaimable))
            if directory == base:
                break
    return limits


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def allocate_pool(
    num_blocks: int, layout: KvLayout, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """The pool, zeroed: [block, layer, 2, kv_head, slot, head_dim].

    On a CPU pages come from the system as blocks are first written. Raises ConfigError when the
    device refuses that much.
    """
    shape = (num_blocks, *layout.block_shape)
    num_bytes = math.prod(shape) * dtype.itemsize
    with _or_config_error(num_bytes):
        if device.type == "cpu":
            return _lazy_zeros(num_bytes).view(dtype).view(shape)
        return torch.zeros(shape, dtype=dtype, device=device)


def allocate_readable_pool(
    record: KvLayoutRecord, layout: KvLayout, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, KvMemory]:
    """As `allocate_pool`, in memory that other engines can read.

    On a CPU that is shared memory, which most systems have in small pages only: attention takes
    about 3 % longer than in the large pages that a pool of our own gets.
    """
    shape = (record.num_blocks, *layout.block_shape)
    with _or_config_error(math.prod(shape) * dtype.itemsize):
        memory, pool = handoff.allocate_memory(record, device)
    return pool.view(dtype).view(shape), memory


@contextlib.contextmanager
def _or_config_error(num_bytes: int) -> Iterator[None]:
    """Say what a refusal by the device means."""
    try:
        yield
    except (OSError, OverflowError, torch.OutOfMemoryError) as error:
        raise ConfigError(
            f"cannot allocate {bytes_text(num_bytes)} for the KV pool: {error}",
            hint="lower --num-gpu-blocks-override, --kv-cache-memory-bytes or "
            "--gpu-memory-utilization",
        ) from error


def _lazy_zeros(num_bytes: int) -> Tensor:
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)  # attention walks blocks at random: fewer TLB misses
    return torch.from_numpy(np.frombuffer(memory, np.uint8))


def bytes_text(num_bytes: int) -> str:
    """A size for people: 4.0 GiB, 257 MiB, 3 KiB."""
    if num_bytes >= GIB:
        return f"{num_bytes / GIB:.1f} GiB"
    if num_bytes >= 1 << 20:
        return f"{num_bytes / (1 << 20):.0f} MiB"
    return f"{num_bytes / (1 << 10):.0f} KiB"
