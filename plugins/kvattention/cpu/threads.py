"""Running one C function on a team of threads, with as little ceremony as a parallel region in C.

A decode step calls attention once per layer, between matrix products that Torch runs on its own OpenMP threads. So
the team is not a second pool: the function goes to `GOMP_parallel`, the entry point compilers use, of the very
libgomp that Torch has loaded, whose threads are then still awake from the last product. Where there is no libgomp,
threads of Python's own do the work, at some tens of microseconds a call.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

Run = Callable[[int, int], None]
"""run(threads, argument): call the function on that many threads, and wait."""


def team(function: int, threads: int) -> Run:
    """A runner of the C function ``void f(void *)`` at an address, for up to ``threads`` threads."""
    alone = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)
    library = _libgomp()
    if library is not None:
        parallel = library.GOMP_parallel
        parallel.restype = None
        parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]

        def run_openmp(count: int, argument: int) -> None:
            if count == 1:
                alone(argument)
            else:
                parallel(function, argument, count, 0)

        return run_openmp

    pool = ThreadPoolExecutor(max(1, threads - 1), "kvattention")

    def run_pool(count: int, argument: int) -> None:
        others = [pool.submit(alone, argument) for _ in range(count - 1)]
        alone(argument)
        for other in others:
            other.result()

    return run_pool


def _libgomp() -> ctypes.CDLL | None:
    """Torch's libgomp where Torch is imported, else the system's, else None."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.__file__:
        for path in sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*")):
            return ctypes.CDLL(str(path))
    name = ctypes.util.find_library("gomp")
    return ctypes.CDLL(name) if name else None
