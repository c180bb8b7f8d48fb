"""OpenMP may give fewer threads than it is asked for: then those that there are do all the work."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from twostroke.model.openmp import load_openmp, most_threads

STEPS = """
import json, sys, torch
from pathlib import Path
from tests.cpu.worker.driving import small_config
from tests.cpu.worker.test_whole_steps import inputs_of
from twostroke.checkpoint import open_checkpoint
from twostroke.model.elementwise import CompiledElementwise, TorchElementwise
from twostroke.worker.runner import ModelRunner

torch.set_num_threads(2)
x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
expected = TorchElementwise(torch.bfloat16).silu_multiply(x)
torch.testing.assert_close(CompiledElementwise().silu_multiply(x), expected, atol=0.02, rtol=0.02)

found = []
for threads in (1, 2):
    config = small_config(dtype="bfloat16", cpu_threads=threads)
    runner = ModelRunner(config, open_checkpoint(Path(sys.argv[1])))
    for steps in (runner.whole_steps, None):
        runner.whole_steps = steps
        for counts in ([1], [3, 1, 20], [40, 150, 1, 9]):
            runner.kv_pool.zero_()
            found.append(runner.forward(inputs_of(counts, 0)).clone())
half = len(found) // 2
print(json.dumps([torch.equal(*pair) for pair in zip(found[:half], found[half:], strict=True)]))
print(json.dumps(runner.facts[0]))
"""


@pytest.mark.skipif(load_openmp() is None, reason="torch has no OpenMP with GNU's entry points")
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="fewer than 2 cores")
def test_steps_are_whole_on_the_threads_that_there_are(tiny_dir: Path) -> None:
    environment = os.environ | {"OMP_THREAD_LIMIT": "1"}
    command = [sys.executable, "-c", STEPS, str(tiny_dir)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    are_equal, fact = map(json.loads, done.stdout.splitlines())
    assert are_equal == [True] * 6
    assert fact[1] == "cpu, 1 thread"
    assert "OpenMP gives 1: see OMP_THREAD_LIMIT" in fact[2]


@pytest.mark.skipif(load_openmp() is None, reason="torch has no OpenMP with GNU's entry points")
def test_openmp_gives_all_threads_on_a_busy_machine_too() -> None:
    openmp = load_openmp()
    assert openmp is not None
    openmp.omp_set_dynamic(1)  # as OMP_DYNAMIC does
    assert most_threads() >= 1
    assert openmp.omp_get_dynamic() == 0
