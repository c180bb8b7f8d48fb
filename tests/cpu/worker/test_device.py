"""Choices of device and number format come with their reasons."""

import pytest
import torch

from twostroke.config import EngineConfig
from twostroke.errors import ConfigError
from twostroke.shape import from_hf_config
from twostroke.testing.tiny_model import tiny_config
from twostroke.worker.device import choose_device, choose_dtype, estimate_activations

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("flags", "dtype", "reason"),
    [
        ({"fma", "avx512_bf16"}, "bfloat16", "the CPU has avx512_bf16"),
        ({"avx512_bf16", "amx_bf16"}, "bfloat16", "the CPU has amx_bf16"),
        ({"asimd", "bf16"}, "bfloat16", "the CPU has bf16"),
        ({"avx2"}, "float32", "the CPU has no bfloat16 instructions"),
    ],
)
def test_bfloat16_only_where_the_cpu_computes_in_it(flags: set[str], dtype: str, reason: str):
    name, fact = choose_dtype(EngineConfig(), CPU, frozenset(flags))
    assert (name, fact) == (dtype, ("Number format", dtype, reason))


def test_the_users_number_format_wins():
    name, fact = choose_dtype(EngineConfig(dtype="float16"), CPU, frozenset())
    assert (name, fact[2]) == ("float16", "--dtype")


def test_threads_of_a_cpu():
    before = torch.get_num_threads()
    try:
        device, fact = choose_device(EngineConfig(device="cpu", cpu_threads=1))
        assert device == CPU
        assert torch.get_num_threads() == 1
        assert fact == ("Device", "cpu, 1 threads", "--device, --cpu-threads")
    finally:
        torch.set_num_threads(before)


def test_more_threads_than_the_machine_can_run_are_refused():
    with pytest.raises(ConfigError, match=r"--cpu-threads is 100000; this machine has \d+"):
        choose_device(EngineConfig(device="cpu", cpu_threads=100_000))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_a_gpu_that_is_not_there_is_an_error():
    with pytest.raises(ConfigError, match=r"no usable GPU.*--device cpu"):
        choose_device(EngineConfig(device="cuda"))


def test_activations_grow_with_tokens_seats_and_experts():
    def estimate(architecture: str = "llama", **config: int) -> int:
        shape = from_hf_config(tiny_config(architecture))
        return estimate_activations(EngineConfig(**config), shape, itemsize=2)

    assert estimate(max_num_batched_tokens=4096) > estimate() > 0
    assert estimate(max_num_seqs=128) - estimate(max_num_seqs=64) == 64 * 4 * 4 * 259
    assert estimate("qwen3_moe") > estimate()
