"""What the model runs on, in which number format, on how many threads, and how much it works in.

Every choice comes as a fact (name, value, reason) for the start-up block.
"""

import os
from pathlib import Path

import torch

from twostroke.checkpoint import Checkpoint
from twostroke.config import EngineConfig
from twostroke.errors import ConfigError
from twostroke.model import few_rows_quantised, int8_rows
from twostroke.model.openmp import most_threads
from twostroke.model.registry import is_in_few_bits
from twostroke.shape import ModelShape, num_parameters
from twostroke.worker.pool import Fact

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# CPU flags with which a bfloat16 matrix product beats a float32 one (x86; x86; ARM).
_BF16_FLAGS = ("amx_bf16", "avx512_bf16", "bf16")


def choose_device(config: EngineConfig, rank: int = 0) -> tuple[torch.device, Fact]:
    """The device of a rank, with torch's threads set on a CPU. ConfigError when it is not there."""
    num_ranks = config.tensor_parallel_size
    has_gpu = torch.cuda.is_available()
    if config.device == "cuda" and not has_gpu:
        raise ConfigError(
            "--device is cuda, but torch finds no usable GPU", hint="use --device cpu"
        )
    if has_gpu and config.device != "cpu":
        if num_ranks > torch.cuda.device_count():
            raise ConfigError(
                f"--tensor-parallel-size is {num_ranks}, but there are "
                f"{torch.cuda.device_count()} GPUs",
                hint="lower it, or use --device cpu",
            )
        if num_ranks > 1:
            torch.cuda.set_device(rank)
        reason = "a GPU is there" if config.device == "auto" else "--device"
        name = f"cuda ({torch.cuda.get_device_name()})"
        return torch.device("cuda", torch.cuda.current_device()), ("Device", name, reason)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    engines = len(config.local_roles)
    total = config.cpu_threads or max(1, (cores or 1) // engines)
    if total > (most := os.cpu_count() or 1):
        raise ConfigError(
            f"--cpu-threads is {total}; this machine has {most} logical cores",
            hint="leave it out to use all that are given to us",
        )
    threads = max(1, min(total // num_ranks, most_threads()))
    torch.set_num_threads(threads)
    reason = "no GPU" if config.device == "auto" else "--device"
    if config.cpu_threads:
        reason += ", --cpu-threads"
    elif engines > 1:
        reason += f", {cores} cores among {engines} engines"
    else:
        reason += f", all {total} cores given to us"
    if threads < total // num_ranks:
        reason += f"; OpenMP gives {threads}: see OMP_THREAD_LIMIT"
    name = f"cpu, {threads} thread{'s' if threads > 1 else ''}"
    if num_ranks > 1:
        name += f" on each of {num_ranks} ranks"
    return torch.device("cpu"), ("Device", name, reason)


def take_gpus(config: EngineConfig, engine: int) -> None:
    """With several engines, let this process and its children see only those of `engine`.

    Call it before CUDA is used. Raises ConfigError when there are too few; does nothing without
    any, where `choose_device` decides.
    """
    count = 0 if config.device == "cpu" else torch.cuda.device_count()
    engines = len(config.local_roles)
    if count == 0 or engines == 1:
        return
    each = config.tensor_parallel_size
    if (wanted := engines * each) > count:
        raise ConfigError(
            f"{engines} engines with --tensor-parallel-size {each} need {wanted} GPUs; "
            f"torch finds {count}",
            hint="start fewer, or use --device cpu",
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(i) for i in range(count)]
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names[engine * each : (engine + 1) * each])


def choose_dtype(
    config: EngineConfig,
    device: torch.device,
    checkpoint: Checkpoint | None = None,
    cpu_flags: frozenset[str] | None = None,
) -> tuple[str, Fact]:
    """Number format of weights, activations and KV, as a key of DTYPES.

    `checkpoint` is what is to run in it; `cpu_flags` are /proc/cpuinfo's unless given.
    """
    if config.dtype != "auto":
        return config.dtype, ("Number format", config.dtype, "--dtype")
    if device.type == "cpu":
        if found := _multiplies_bf16(cpu_flags):
            name, reason = "bfloat16", f"the CPU has {found}"
        elif checkpoint is not None and (why := _why_no_bf16_needed(config, checkpoint)):
            name, reason = "bfloat16", why
        else:
            name, reason = "float32", "the CPU has no bfloat16 instructions"
        return name, ("Number format", name, reason)
    major, minor = torch.cuda.get_device_capability(device)
    name = "bfloat16" if major >= 8 else "float16"
    return name, ("Number format", name, f"the GPU has compute capability {major}.{minor}")


def _multiplies_bf16(cpu_flags: frozenset[str] | None = None) -> str:
    """The flag of the CPU's bfloat16 products; empty where it has none."""
    flags = _cpu_flags() if cpu_flags is None else cpu_flags
    return next((flag for flag in _BF16_FLAGS if flag in flags), "")


def keeps_whole(shape: ModelShape, dtype: torch.dtype, room_bytes: float) -> bool:
    """Whether weights of few bits are kept in `dtype` too, which many rows are faster with.

    On a CPU without products of bfloat16 they are not: those of few bits are the faster for any
    number of rows (a step of 256 tokens of SmolLM2-135M on AVX2: 243 ms; in float32, 346).
    """
    return _multiplies_bf16() != "" and num_parameters(shape) * dtype.itemsize <= room_bytes


def _why_no_bf16_needed(config: EngineConfig, checkpoint: Checkpoint) -> str:
    """Why a model in bfloat16 runs well on a CPU that cannot multiply it; empty: it does not."""
    if config.tensor_parallel_size > 1 or config.speculative_method == "draft_model":
        return ""
    if config.quantization == "int8":
        return "products in 8 bits need no bfloat16 instructions" if int8_rows.works() else ""
    if config.quantization == "none" or not few_rows_quantised.works():
        return ""
    is_in_few = config.quantization == "int4" or is_in_few_bits(checkpoint)
    return "weights of few bits are multiplied as they are" if is_in_few else ""


def _cpu_flags() -> frozenset[str]:
    """This CPU's, or those of the one that kernels are made for (see `compiled.CPU_FEATURES`)."""
    told = os.environ.get("NUMBA_CPU_FEATURES")
    if told is not None:  # in LLVM's names
        names = told.replace("-", "_").replace("avx512", "avx512_").split(",")
        return frozenset(name.removeprefix("+") for name in names)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def estimate_activations(config: EngineConfig, shape: ModelShape, itemsize: int) -> int:
    """Bytes that a full step works in, generously: the largest layer's tensors and the logits.

    Counted per token: the residual stream and two normed copies, q, k, v and the attention's
    output, gate, up and their product; in a MoE layer those of each chosen expert, with a copy of
    its input and output. Per sampled position, of which a seat has one and those of its drafts:
    float32 logits, and three more of their size while sampling.
    """
    attention = (2 * shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    feed_forward = 3 * shape.intermediate_size
    if shape.num_experts:
        expert = 3 * shape.moe_intermediate_size + 2 * shape.hidden_size
        feed_forward = max(feed_forward, shape.num_experts_per_token * expert)
    per_token = (3 * shape.hidden_size + attention + feed_forward) * itemsize
    per_position = 4 * 4 * shape.vocab_size
    drafts = 0 if config.speculative_method == "none" else config.num_speculative_tokens
    sampled = min(config.max_num_seqs * (1 + drafts), config.max_num_batched_tokens)
    return config.max_num_batched_tokens * per_token + sampled * per_position


def check_quantization(config: EngineConfig, device: torch.device, dtype: torch.dtype) -> None:
    """What is asked for by name must be possible; `auto` takes what is."""
    if config.quantization not in ("int8", "int4"):
        return
    why = ""
    if device.type != "cpu" or dtype != torch.bfloat16:
        why = f"the model runs in {str(dtype).removeprefix('torch.')} on {device.type}"
    elif config.tensor_parallel_size > 1:
        why = f"--tensor-parallel-size is {config.tensor_parallel_size}"
    elif config.quantization == "int8" and not int8_rows.works():
        why = "this processor has no AVX512-VNNI"
    elif not few_rows_quantised.works():
        why = "this processor has neither AVX512-VNNI nor AVX2"
    if why:
        needed = "AVX512-VNNI" + ("" if config.quantization == "int8" else " or AVX2")
        raise ConfigError(
            f"--quantization is {config.quantization}, but {why}; "
            f"it needs bfloat16 on one rank of a CPU with {needed}",
            hint="leave it out",
        )
