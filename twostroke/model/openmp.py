"""torch's own threads, for compiled code that is not torch's.

A second pool of threads would get in the way of the first: either one's threads spin for
milliseconds while the other's work.
"""

import ctypes
import sys
from pathlib import Path
from typing import Any

import torch


def load_openmp() -> ctypes.CDLL | None:
    """The OpenMP runtime that torch has loaded, when it has GNU's entry points (Linux).

    `GOMP_parallel(function, argument, threads, flags)` runs a C function with that argument on
    every thread, and returns when all have; for how they wait for each other, see `barrier`.
    """
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    paths = {line.split(maxsplit=5)[-1] for line in maps.splitlines() if "omp" in line}
    folder = str(Path(torch.__file__).parent.parent)
    for path in sorted(paths, key=lambda path: not path.startswith(folder)):
        if Path(path).name.startswith(("libgomp", "libomp", "libiomp")):
            library = ctypes.CDLL(path)
            if hasattr(library, "GOMP_parallel"):
                parallel = library.GOMP_parallel
                parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
                parallel.restype = None
                return library
    return None


def address_in(function: Any) -> int:
    """Address of a function of a loaded library."""
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def most_threads() -> int:
    """How many threads OpenMP gives the calling thread at most: OMP_THREAD_LIMIT.

    From now on it gives as many as it is asked for, however busy the machine is (OMP_DYNAMIC): with
    fewer, oneDNN leaves parts of its products out, and says nothing.
    """
    openmp = load_openmp()
    if openmp is None:
        return sys.maxsize
    openmp.omp_set_dynamic(0)
    return int(openmp.omp_get_thread_limit()) if openmp.omp_get_max_active_levels() else 1
