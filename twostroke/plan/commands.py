"""The commands that start a layout, on twostroke and on vLLM (flags of 0.22 and of 0.32)."""

import shlex

from twostroke.plan.layout import Layout, Pool
from twostroke.plan.question import Question
from twostroke.plan.room import room_of

# Where models known by a short name are found; a path or an id stays as it is.
HUB = {
    "llama-2-7b": "meta-llama/Llama-2-7b-hf",
    "llama-2-70b": "meta-llama/Llama-2-70b-hf",
    "llama-3.1-8b": "meta-llama/Llama-3.1-8B",
    "llama-3.1-70b": "meta-llama/Llama-3.1-70B",
    "llama-3.1-405b": "meta-llama/Llama-3.1-405B",
    "llama-3.2-1b": "meta-llama/Llama-3.2-1B",
    "llama-3.2-3b": "meta-llama/Llama-3.2-3B",
    "llama-3.3-70b": "meta-llama/Llama-3.3-70B-Instruct",
    "smollm2-135m": "HuggingFaceTB/SmolLM2-135M",
    "smollm2-360m": "HuggingFaceTB/SmolLM2-360M",
    "smollm2-1.7b": "HuggingFaceTB/SmolLM2-1.7B",
    "qwen2.5-7b": "Qwen/Qwen2.5-7B",
    "qwen2.5-14b": "Qwen/Qwen2.5-14B",
    "qwen2.5-32b": "Qwen/Qwen2.5-32B",
    "qwen2.5-72b": "Qwen/Qwen2.5-72B",
    "qwen3-0.6b": "Qwen/Qwen3-0.6B",
    "qwen3-1.7b": "Qwen/Qwen3-1.7B",
    "qwen3-4b": "Qwen/Qwen3-4B",
    "qwen3-8b": "Qwen/Qwen3-8B",
    "qwen3-14b": "Qwen/Qwen3-14B",
    "qwen3-32b": "Qwen/Qwen3-32B",
    "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B",
    "qwen3-coder-30b-a3b": "Qwen/Qwen3-Coder-30B-A3B-Instruct",
    "qwen3-235b-a22b": "Qwen/Qwen3-235B-A22B",
    "qwen3-coder-480b-a35b": "Qwen/Qwen3-Coder-480B-A35B-Instruct",
}


_VLLM_DTYPES = frozenset({"bfloat16", "float16", "float8"})  # of weights and KV, as pairs


def commands(question: Question, layout: Layout) -> list[str]:
    """Shell lines, each starting one kind of engine; a comment before it says how many of them."""
    model = shlex.quote(HUB.get(question.model.lower(), question.model))
    return [*_twostroke(question, layout, model), *_vllm(question, layout, model)]


def _flags(question: Question, pool: Pool, seats: int | None = None) -> str:
    it = question.engines
    flags = [
        f"--tensor-parallel-size {pool.tensor_parallel_size}",
        f"--max-num-batched-tokens {pool.max_num_batched_tokens}",
        f"--max-num-seqs {seats or pool.max_num_seqs}",
        f"--max-model-len {question.longest_tokens}",
        f"--gpu-memory-utilization {it.gpu_memory_utilization:g}",
    ]
    if it.block_size != 16:
        flags.append(f"--block-size {it.block_size}")
    if it.dtype in ("float32", "bfloat16", "float16"):
        flags.append(f"--dtype {it.dtype}")
    return " ".join(flags)


def _is_plain(dtype: str, kv_dtype: str) -> bool:
    """KV is of the model's own type, and that is one that needs no quantisation."""
    return dtype == kv_dtype and dtype in ("float32", "bfloat16", "float16")


def _twostroke(question: Question, layout: Layout, model: str) -> list[str]:
    it = question.engines
    if not _is_plain(it.dtype, it.kv_dtype):
        return [f"# twostroke has no {it.dtype} weights with KV in {it.kv_dtype} on a GPU"]
    if layout.prefill is None or layout.decode is None:
        pool = layout.pools[0]
        flags = _flags(question, pool)
        return [f"twostroke serve {model} --data-parallel-size {pool.count} {flags}"]
    prefill, decode = layout.prefill, layout.decode
    mode = "" if it.kv_mode == "pull" else f" --kv-mode {it.kv_mode}"
    if layout.num_gpus <= question.gpu.devices_per_node and _alike(prefill, decode):
        roles = f"--prefill {prefill.count} --decode {decode.count}{mode}"
        return [f"twostroke serve {model} {roles} {_flags(question, decode)}"]
    join = "--join HOST:PORT --key KEY"
    return [
        "# once; copy the file KEY to every host",
        "twostroke key KEY",
        f"twostroke serve {model} --engines-listen HOST:PORT --key KEY{mode}",
        f"# {prefill.count} of these, and {decode.count} of those that decode",
        f"twostroke engine {model} --role prefill {join} {_flags(question, prefill)}",
        f"twostroke engine {model} --role decode {join} {_flags(question, decode)}",
    ]


def _alike(prefill: Pool, decode: Pool) -> bool:
    return prefill.tensor_parallel_size == decode.tensor_parallel_size


def _vllm(question: Question, layout: Layout, model: str) -> list[str]:
    it = question.engines
    if not _is_plain(it.dtype, it.kv_dtype) and not {it.dtype, it.kv_dtype} <= _VLLM_DTYPES:
        return [f"# vLLM has no {it.dtype} weights with KV in {it.kv_dtype}"]
    eight_bit = " --quantization fp8" if it.dtype == "float8" else ""
    eight_bit += " --kv-cache-dtype fp8" if it.kv_dtype == "float8" else ""
    if layout.prefill is None or layout.decode is None:
        pool = layout.pools[0]
        flags = _flags(question, pool) + eight_bit
        return [f"vllm serve {model} --data-parallel-size {pool.count} {flags}"]
    lines = []
    room = room_of(question, layout)
    for pool, role in ((layout.prefill, "kv_producer"), (layout.decode, "kv_consumer")):
        transfer = f'\'{{"kv_connector":"NixlConnector","kv_role":"{role}"}}\''
        seats = room.advised_seats if pool is layout.decode else None
        lines += [
            f"# {pool.count} of these, behind a proxy that hands requests over",
            f"VLLM_NIXL_SIDE_CHANNEL_HOST=ADDRESS vllm serve {model} "
            f"{_flags(question, pool, seats)}{eight_bit} --kv-transfer-config {transfer}",
        ]
    return lines
