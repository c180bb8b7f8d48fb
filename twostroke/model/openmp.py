"""torch's own threads, for compiled code that is not torch's.

A second pool of threads would get in the way of the first: either one's threads spin for
milliseconds while the other's work.
"""

import ctypes
from pathlib import Path

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
