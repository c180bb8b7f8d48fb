"""A process whose kernels are made for another processor (NUMBA_CPU_NAME): see test_processors.

    python -m tests.cpu.other_processor DIRECTORY DTYPE QUANTIZATION    runs a tiny model
    python -m tests.cpu.other_processor                                 makes code of aarch64

Prints as JSON what came of it.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

import torch
from llvmlite import binding
from numba import types

from tests.cpu.worker.driving import Driver, Request, small_config
from tests.cpu.worker.test_whole_steps import inputs_of
from twostroke.checkpoint import open_checkpoint
from twostroke.model import compiled, elementwise_kernels, few_rows_quantised, program
from twostroke.model.few_rows_quantised import QuantisedRows
from twostroke.model.quantised import quantise
from twostroke.worker.attention_kernels import compile_attend
from twostroke.worker.runner import ModelRunner

AARCH64 = "aarch64-unknown-linux-gnu"


def run(directory: Path, dtype: str, quantization: str) -> dict[str, Any]:
    """Tokens of three requests, hidden states of a step, the start-up block's line; and products of
    few bits, where the processor has them."""
    config = small_config(dtype=dtype, quantization=quantization)
    runner = ModelRunner(config, open_checkpoint(directory))
    prompts = [[(7 * i + 31 * j) % 256 for j in range(5 + 9 * i)] for i in range(3)]
    tokens = Driver(runner.run).serve([Request(prompt) for prompt in prompts])
    runner.kv_pool.zero_()
    hidden = runner.forward(inputs_of([1, 1, 5], 0)).float().tolist()
    kernels = next(fact for fact in runner.facts if fact[0] == "Kernels")
    products = few_bits_products() if few_rows_quantised.works() else []
    return {"tokens": tokens, "hidden": hidden, "kernels": kernels[1:], "products": products}


def few_bits_products() -> list[list[list[float]]]:
    """Of each number of rows, from the smallest tile on to several, with 4 and with 8 bits."""
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(dims, generator=generator) for dims in ((128, 96), (13, 96)))
    kernels = [QuantisedRows(quantise(weight, bits), None) for bits in (4, 8)]
    return [
        kernel.into(torch.empty(rows, 128), x[:rows]).tolist()
        for kernel in kernels
        for rows in (*range(1, 9), 13)
    ]


def for_aarch64() -> dict[str, Any]:
    """Kernels as LLVM has them before it makes code of this processor: functions of x86's alone
    that they call, how many bytes of aarch64's code they become without those, and the instructions
    of that code which order memory: of a program and of attention, where threads wait for others.

    Nothing must be in the cache, which holds code alone.
    """
    for name in ("add_norm", "rotate", "silu_multiply", "levels"):
        elementwise_kernels.address(name)
    signature = types.void(types.CPointer(types.int64))
    compiled.address_of(program._run, signature, cache="")
    compile_attend(types.uint16)
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    machine = binding.Target.from_triple(AARCH64).create_target_machine()
    named, num_bytes, orders = set(), [], []
    for function in compiled._KEPT:
        text = function.inspect_llvm()
        named |= set(re.findall(r"llvm\.x86\.[\w.]+", text))
        text = re.sub(r".*@llvm\.x86\.sse2\.pause.*\n", "", text)
        text = re.sub(r"(?:tail )?call i8 @llvm\.x86\.atomic\.sub\.cc.*", "add i8 0, 0", text)
        text = re.sub(r'target datalayout = ".*"', f'target datalayout = "{layout(machine)}"', text)
        text = re.sub(r'target triple = ".*"', f'target triple = "{AARCH64}"', text)
        num_bytes.append(len(machine.emit_object(binding.parse_assembly(text))))
        code = machine.emit_assembly(binding.parse_assembly(text))
        orders.append(sorted(set(re.findall(r"\t(ldar|stlr|ldaxr|stlxr)\t", code))))
    return {"x86": sorted(named), "bytes": num_bytes, "orders": orders[-2:]}


def layout(machine: Any) -> str:
    return str(machine.target_data)


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = run(Path(sys.argv[1]), *sys.argv[2:]) if sys.argv[1:] else for_aarch64()
    print(json.dumps(found))
