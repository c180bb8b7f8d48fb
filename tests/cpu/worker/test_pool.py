"""Sizing of the KV pool: the limit that decides, in numbers and in words."""

import os
from pathlib import Path

import psutil
import pytest
import torch

from twostroke.config import EngineConfig
from twostroke.connector.layout import record_of
from twostroke.errors import ConfigError
from twostroke.kv.sizing import KvLayout
from twostroke.worker import pool
from twostroke.worker.pool import GIB, Memory, PoolSize

# SmolLM2-135M: 22.5 KiB of KV a token, 360 KiB a block.
SMOLLM2 = KvLayout(num_layers=30, num_kv_heads=3, head_dim=64)


def size(memory_gib: float, device: str = "cpu", model_max_len: int = 8192, **config) -> PoolSize:
    memory = Memory(int(memory_gib * GIB), "19.8 GiB free")
    return pool.size_pool(
        EngineConfig(**config), SMOLLM2, memory, model_max_len=model_max_len, device=device
    )


def fact(result: PoolSize, name: str) -> tuple[str, str]:
    (found,) = [(value, reason) for key, value, reason in result.facts if key == name]
    return found


def test_a_cpu_pool_is_capped_and_says_how_to_raise_it():
    result = size(19.8)
    assert result.num_blocks == 4 * GIB // (360 << 10)
    assert fact(result, "KV pool") == (
        "4.0 GiB, 11,650 blocks of 16 = 186,384 tokens",
        "4 GiB cap on a CPU; 19.8 GiB free; --kv-cache-memory-bytes raises it",
    )
    assert fact(result, "Model length") == ("8,192 tokens", "the model's own")


def test_a_gpu_pool_takes_what_is_left_but_no_more_than_its_seats_can_use():
    assert size(5, "cuda").num_blocks == 5 * GIB // (360 << 10)
    result = size(100, "cuda", max_num_seqs=64)
    assert result.num_blocks == 64 * 512 + 1
    assert "all that 64 requests of 8,192 tokens can use" in fact(result, "KV pool")[1]


def test_what_the_user_says_wins():
    assert size(1, num_gpu_blocks_override=700, kv_cache_memory_bytes=GIB).num_blocks == 700
    assert size(1, kv_cache_memory_bytes=6 * GIB).num_blocks == 6 * GIB // (360 << 10)


def test_the_models_length_is_lowered_until_one_request_fits():
    result = size(1, num_gpu_blocks_override=65)
    assert result.max_model_len == 1024
    value, reason = fact(result, "Model length")
    assert value == "1,024 tokens"
    assert "8,192" in reason


def test_a_length_that_was_asked_for_must_fit():
    assert size(1, num_gpu_blocks_override=65, max_model_len=1024).max_model_len == 1024
    with pytest.raises(ConfigError, match=r"1,025.*holds 1,024 tokens.*lower --max-model-len"):
        size(1, num_gpu_blocks_override=65, max_model_len=1025)
    with pytest.raises(ConfigError, match=r"9,000.*at most 8,192"):
        size(1, max_model_len=9000)


@pytest.mark.parametrize("memory_gib", [0.0, -3.0, 0.0005])
def test_no_room_for_a_block_is_an_error(memory_gib: float):
    with pytest.raises(ConfigError, match=r"--num-gpu-blocks-override is 1; .*at least 2"):
        size(19.8, num_gpu_blocks_override=1)
    with pytest.raises(ConfigError, match=r"a block takes 360 KiB.*--kv-cache-memory-bytes"):
        size(memory_gib)


def test_memory_left_on_a_device():
    cpu = pool.cpu_memory(0.5, 4 * GIB, weight_bytes=GIB, activation_bytes=GIB // 2)
    assert cpu.budget_bytes == GIB // 2
    assert cpu.reason == "50% of 4.0 GiB free, less 1.0 GiB weights and 512 MiB activations"
    gpu = pool.gpu_memory(0.9, 60 * GIB, 80 * GIB, activation_bytes=2 * GIB)
    assert gpu.budget_bytes == pytest.approx(50 * GIB, abs=2)
    assert "less 20.0 GiB in use" in gpu.reason


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize("in_container", [False, True])
def test_a_control_groups_limit_counts(tmp_path: Path, in_container: bool):
    write(tmp_path / "proc/self/cgroup", "0::/batch/job\n")
    group = tmp_path / "sys/fs/cgroup" / ("" if in_container else "batch")
    write(group / "memory.max", f"{100 << 20}\n")
    write(group / "memory.current", f"{60 << 20}\n")
    write(group / "memory.stat", f"anon 1\ninactive_file {10 << 20}\n")
    if not in_container:
        write(group / "job/memory.max", "max\n")
    assert pool.available_memory(tmp_path) == 50 << 20


def test_a_version_1_limit_counts(tmp_path: Path):
    write(tmp_path / "proc/self/cgroup", "3:cpu:/\n2:memory,hugetlb:/job\n")
    group = tmp_path / "sys/fs/cgroup/memory/job"
    write(group / "memory.limit_in_bytes", f"{100 << 20}\n")
    write(group / "memory.usage_in_bytes", f"{120 << 20}\n")
    assert pool.available_memory(tmp_path) == 0


def test_without_a_limit_the_hosts_memory_counts(tmp_path: Path):
    assert pool.available_memory(tmp_path) > 0


def test_the_pool_is_zeroed_block_major_and_lazily_touched():
    layout = KvLayout(num_layers=2, num_kv_heads=3, head_dim=8, block_size=4)
    kv_pool = pool.allocate_pool(5, layout, torch.bfloat16, torch.device("cpu"))
    assert kv_pool.shape == (5, 2, 2, 3, 4, 8)
    assert kv_pool.is_contiguous()
    assert kv_pool.data_ptr() % 64 == 0
    assert not kv_pool.any()
    before = psutil.Process().memory_info().rss
    large = KvLayout(num_layers=64, num_kv_heads=64, head_dim=128)
    untouched = pool.allocate_pool(100, large, torch.bfloat16, torch.device("cpu"))
    assert untouched.nbytes > 3 * GIB
    assert psutil.Process().memory_info().rss - before < GIB


def test_more_than_the_system_gives_is_an_error():
    layout = KvLayout(num_layers=1000, num_kv_heads=1000, head_dim=1000)
    with pytest.raises(ConfigError, match="cannot allocate"):
        pool.allocate_pool(10**9, layout, torch.bfloat16, torch.device("cpu"))


def test_a_pool_that_others_can_read_is_the_same_in_a_memory_file():
    layout = KvLayout(num_layers=2, num_kv_heads=3, head_dim=8, block_size=4)
    record = record_of(layout, 5, "model")
    kv_pool, memory = pool.allocate_readable_pool(
        record, layout, torch.bfloat16, torch.device("cpu")
    )
    assert kv_pool.shape == (5, 2, 2, 3, 4, 8)
    assert kv_pool.is_contiguous()
    assert not kv_pool.any()
    assert (memory.address, memory.pool_bytes) == (kv_pool.data_ptr(), kv_pool.nbytes)
    assert memory.leases.shape == (5, 16)
    assert not memory.leases.any()
    kv_pool[1] = 1
    assert os.pread(memory.fd, 2, kv_pool.nbytes // 5) == b"\x80\x3f"  # 1 in bfloat16
    os.close(memory.fd)
    too_large = record_of(KvLayout(num_layers=1000, num_kv_heads=1000, head_dim=1000), 10**9, "m")
    with pytest.raises(ConfigError, match="cannot allocate"):
        pool.allocate_readable_pool(too_large, layout, torch.bfloat16, torch.device("cpu"))
