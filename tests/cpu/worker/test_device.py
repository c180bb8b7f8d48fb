"""Choices of device and number format come with their reasons."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cpu.model.test_gguf import Quant, write_gguf
from twostroke.checkpoint import Checkpoint, open_checkpoint
from twostroke.config import EngineConfig
from twostroke.errors import ConfigError
from twostroke.model import int8_rows
from twostroke.model.few_rows_quantised import works
from twostroke.shape import from_hf_config
from twostroke.testing.tiny_model import tiny_config, write_tiny_checkpoint
from twostroke.worker.device import choose_device, choose_dtype, estimate_activations, take_gpus

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
    name, fact = choose_dtype(EngineConfig(), CPU, None, frozenset(flags))
    assert (name, fact) == (dtype, ("Number format", dtype, reason))


@pytest.mark.skipif(not works(), reason="the processor has neither AVX512-VNNI nor AVX2")
def test_weights_that_stay_in_few_bits_need_no_bfloat16_products(tmp_path: Path):
    write_tiny_checkpoint(tmp_path, vocab_size=320)  # whole blocks of outputs
    flags = frozenset({"avx2"})
    whole = open_checkpoint(tmp_path)
    stored = open_checkpoint(write_gguf(tmp_path / "q4_1.gguf", tmp_path, Quant.Q4_1))
    other = open_checkpoint(write_gguf(tmp_path / "f16.gguf", tmp_path, Quant.F16))

    def chosen(checkpoint: Checkpoint, **settings: Any) -> str:
        return choose_dtype(EngineConfig(**settings), CPU, checkpoint, flags)[0]

    assert chosen(stored) == chosen(whole, quantization="int4") == "bfloat16"
    assert chosen(whole) == chosen(other) == "float32"
    assert chosen(stored, quantization="none") == "float32"
    assert chosen(stored, tensor_parallel_size=2) == "float32"
    _, fact = choose_dtype(EngineConfig(), CPU, stored, flags)
    assert fact[2] == "weights of few bits are multiplied as they are"


def test_products_in_8_bits_need_no_bfloat16_products(tmp_path: Path):
    write_tiny_checkpoint(tmp_path)
    checkpoint, config = open_checkpoint(tmp_path), EngineConfig(quantization="int8")
    dtype, fact = choose_dtype(config, CPU, checkpoint, frozenset({"avx512_vnni"}))
    assert dtype == ("bfloat16" if int8_rows.works() else "float32")
    assert ("8 bits" in fact[2]) == int8_rows.works()
    alone = EngineConfig(quantization="int8", tensor_parallel_size=2)
    assert choose_dtype(alone, CPU, checkpoint, frozenset({"avx512_vnni"}))[0] == "float32"


def test_the_users_number_format_wins():
    name, fact = choose_dtype(EngineConfig(dtype="float16"), CPU, None, frozenset())
    assert (name, fact[2]) == ("float16", "--dtype")


def test_threads_of_a_cpu():
    before = torch.get_num_threads()
    try:
        device, fact = choose_device(EngineConfig(device="cpu", cpu_threads=1))
        assert device == CPU
        assert torch.get_num_threads() == 1
        assert fact == ("Device", "cpu, 1 thread", "--device, --cpu-threads")
    finally:
        torch.set_num_threads(before)


def test_more_threads_than_the_machine_can_run_are_refused():
    with pytest.raises(ConfigError, match=r"--cpu-threads is 100000; this machine has \d+"):
        choose_device(EngineConfig(device="cpu", cpu_threads=100_000))


def test_engines_share_the_cores(monkeypatch: pytest.MonkeyPatch):
    before = torch.get_num_threads()
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(6), raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 6)
    try:
        for engines, threads, name in ((2, 3, "3 threads"), (4, 1, "1 thread"), (8, 1, "1 thread")):
            config = EngineConfig(device="cpu", data_parallel_size=engines)
            _, fact = choose_device(config)
            assert torch.get_num_threads() == threads
            reason = f"--device, 6 cores among {engines} engines"
            assert fact == ("Device", f"cpu, {name}", reason)
        _, fact = choose_device(EngineConfig(device="cpu", prefill=1, decode=2))
        assert fact == ("Device", "cpu, 2 threads", "--device, 6 cores among 3 engines")
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("visible", "seen"),
    [("", ["0", "1"]), ("4,7", ["4", "7"]), ("GPU-a,GPU-b", ["GPU-a", "GPU-b"])],
)
def test_each_engine_has_gpus_of_its_own(
    monkeypatch: pytest.MonkeyPatch, visible: str, seen: list[str]
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for engine in range(2):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        take_gpus(EngineConfig(data_parallel_size=2), engine)
        assert os.environ["CUDA_VISIBLE_DEVICES"] == seen[engine]


def test_gpus_are_left_alone_or_too_few(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    take_gpus(EngineConfig(), 0)
    take_gpus(EngineConfig(join="h:1", key="k", role="decode"), 0)
    take_gpus(EngineConfig(data_parallel_size=2, device="cpu"), 1)
    with pytest.raises(ConfigError, match=r"2 engines .* need 2 GPUs; torch finds 1"):
        take_gpus(EngineConfig(data_parallel_size=2), 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    take_gpus(EngineConfig(data_parallel_size=2), 1)
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


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
