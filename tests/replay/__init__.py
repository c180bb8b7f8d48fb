"""Replay recorded workloads through our scheduler and compare every decision with vLLM's.

    python -m tests.replay WORKLOADS TRACES

WORKLOADS and TRACES are two directories of .json or .json.xz files with equal names, or two .tar.xz
archives of such. Each workload is driven step by step, with a simulated model and a mock connector,
and each step's record is compared with the recorded one. Prints `N of M equal` and the first
difference of every other; exits 1 if any differs.
"""

from tests.replay.compare import first_difference, load_directory, main
from tests.replay.drive import Replay

__all__ = ["Replay", "first_difference", "load_directory", "main"]
