"""The commands that start a layout, on twostroke and on vLLM."""

import shlex

from twostroke.plan.layout import Layout, Pool
from twostroke.plan.question import Question


def commands(question: Question, layout: Layout) -> list[str]:
    """Shell lines, each starting one kind of engine; comments say how many and where."""
    return [*_twostroke(question, layout), *_vllm(question, layout)]


def _flags(question: Question, pool: Pool) -> str:
    it = question.engines
    flags = [
        f"--tensor-parallel-size {pool.tensor_parallel_size}",
        f"--max-num-batched-tokens {pool.max_num_batched_tokens}",
        f"--max-num-seqs {pool.max_num_seqs}",
        f"--max-model-len {question.longest_tokens}",
        f"--gpu-memory-utilization {it.gpu_memory_utilization:g}",
    ]
    return " ".join(flags)


def _twostroke(question: Question, layout: Layout) -> list[str]:
    model = shlex.quote(question.model)
    if layout.prefill is None or layout.decode is None:
        pool = layout.pools[0]
        flags = _flags(question, pool)
        return [f"twostroke serve {model} --data-parallel-size {pool.count} {flags}"]
    prefill, decode = layout.prefill, layout.decode
    if layout.num_gpus <= question.gpu.devices_per_node and _alike(prefill, decode):
        roles = f"--prefill {prefill.count} --decode {decode.count}"
        return [f"twostroke serve {model} {roles} {_flags(question, decode)}"]
    join = "--join HOST:PORT --key KEY"
    return [
        f"twostroke serve {model} --engines-listen HOST:PORT --key KEY",
        f"twostroke engine {model} --role prefill {join} {_flags(question, prefill)}"
        f"   # x {prefill.count}",
        f"twostroke engine {model} --role decode {join} {_flags(question, decode)}"
        f"   # x {decode.count}",
    ]


def _alike(prefill: Pool, decode: Pool) -> bool:
    return prefill.tensor_parallel_size == decode.tensor_parallel_size


def _vllm(question: Question, layout: Layout) -> list[str]:
    model = shlex.quote(question.model)
    if layout.prefill is None or layout.decode is None:
        pool = layout.pools[0]
        flags = _flags(question, pool)
        return [f"vllm serve {model} --data-parallel-size {pool.count} {flags}"]
    lines = []
    for pool, role in ((layout.prefill, "kv_producer"), (layout.decode, "kv_consumer")):
        transfer = f'\'{{"kv_connector":"NixlConnector","kv_role":"{role}"}}\''
        lines.append(
            f"vllm serve {model} {_flags(question, pool)} --kv-transfer-config {transfer}"
            f"   # x {pool.count}, behind a proxy"
        )
    return lines
