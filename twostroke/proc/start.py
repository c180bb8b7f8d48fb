"""The first moment of `twostroke serve`: engine-core processes begin to import torch, which takes
longest, while this one still imports what it needs to find the model.

So nothing is imported here that takes time.
"""

import gc
import os
import subprocess
import sys
from collections.abc import Sequence

from twostroke.config import EngineConfig, Explained

# A step forks and joins the model's threads hundreds of times. With libgomp's default a waiting
# thread spins for milliseconds, and when anything else runs on the machine (this process, for one)
# it spins away the time slice that the other thread needs. So it spins for some 20 us, then sleeps.
# One-row steps of SmolLM2 on 2 cores, alone / beside a busy process: 22 / 27 ms with a spin count
# of 200, 16 / 40 ms with 2,000, 17 / 135 ms with 20,000.
#
# oneDNN keeps the code that it compiled for each number of rows and each weight's shape: 1,024 of
# them by default, of half a MiB each, and prompts come in all lengths. 128 cost 1 ms now and then.
#
# glibc can ask for pages of 2 MiB for what it hands out. On them SmolLM2's 96 MB of weights in 4
# and 8 bits come from memory at 28 GB/s to one thread, on small ones at 23 (Zen 4 under KVM). It
# asks for the pages of its first heap only, so that has to serve all threads, those that load
# weights too: the products of a one-row step in bfloat16 then take 8.1 ms instead of 10.6.
#
# The user's settings win.
CHILD_ENVIRONMENT = {
    "GOMP_SPINCOUNT": "2000",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1:glibc.malloc.arena_max=1",
}

IMPORT_TORCH = "import-torch"  # the argument that has a core process do so while it waits


def serve(config: EngineConfig, explained: Sequence[Explained]) -> int:
    """Start the engines' processes, then serve (see `launch.serve`)."""
    gc.disable()  # what a start makes lives for ever: looking for garbage takes a tenth of it
    begun = [start_core(config, engine) for engine in range(len(config.local_roles))]
    try:
        from twostroke.proc import launch

        return launch.serve(config, explained, begun)
    finally:
        for process in begun:
            end_core(process)


def start_core(config: EngineConfig, engine: int) -> "subprocess.Popen[bytes]":
    """An engine-core process, which waits for the rest of its settings on its standard input."""
    in_worker_processes = config.worker_process or config.tensor_parallel_size > 1
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "twostroke.proc.core_main"),
            *(() if in_worker_processes else (IMPORT_TORCH,)),
        ],
        stdin=subprocess.PIPE,
        bufsize=0,
        env=CHILD_ENVIRONMENT | os.environ,
    )
    if cores := cores_of(config, engine):
        os.sched_setaffinity(process.pid, cores)
    return process


def end_core(process: "subprocess.Popen[bytes]") -> None:
    """End a process that was given nothing to do; one that has ended stays as it is."""
    if process.poll() is None:
        process.kill()
        process.wait()
    if process.stdin is not None:
        process.stdin.close()


def cores_of(config: EngineConfig, engine: int) -> set[int]:
    """The CPU cores that an engine is kept to; empty: all that are given to us.

    With --cpu-threads, each engine has so many for itself, as long as there are enough. Otherwise
    they share all, and each runs its part of the threads.
    """
    count = config.cpu_threads
    if not count or not hasattr(os, "sched_getaffinity"):
        return set()
    cores = sorted(os.sched_getaffinity(0))
    if count * len(config.local_roles) > len(cores):
        return set()
    return set(cores[engine * count : (engine + 1) * count])
