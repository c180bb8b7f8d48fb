"""The fence between lease words and data is there in the code of processors that need one."""

import re

import pytest
from llvmlite import binding

from twostroke.connector.memory_order import fence


@pytest.mark.parametrize(
    ("triple", "expected"),
    [("aarch64-unknown-linux-gnu", ["dmb ish"]), ("x86_64-unknown-linux-gnu", [])],
)
def test_it_is_an_instruction_where_the_processor_reorders(
    triple: str, expected: list[str]
) -> None:
    (text,) = fence.inspect_llvm().values()
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    machine = binding.Target.from_triple(triple).create_target_machine()
    text = re.sub(r'target datalayout = ".*"', f'target datalayout = "{machine.target_data}"', text)
    text = re.sub(r'target triple = ".*"', f'target triple = "{triple}"', text)
    code = machine.emit_assembly(binding.parse_assembly(text))
    assert re.findall(r"\t(dmb|[ml]fence)\s*(.*)", code) == [
        tuple(instruction.split()) for instruction in expected
    ]
