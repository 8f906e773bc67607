"""Compiles the kernels that a model will need before it needs them, side by side.

`listed_kernels` finds out which: it lets a part of the system build the graphs of its forwards. `run/runtime.py` calls
both before the first request. NVRTC compiles in threads: two took 0.63 of the time of one after the other on two busy
cores, with no more CPU time; processes took longer than threads, because each loads the library.
"""

import logging
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed

from parallm.model.kernels.compiler import CompileError, Specialization, cubin, is_compiled

MAX_THREADS = 16
SECONDS_BETWEEN = 1.0
"""Time between two reports."""

logger = logging.getLogger(__name__)


def prepare_kernels(kernels: Iterable[Specialization], architecture: str, report: Callable[[int, int], None]) -> int:
    """Compile what is not on disk and keep it there; returns how many kernels that were.

    `report` gets the number of kernels that are there and the number of all, once a second and at the end; it is not
    called where all are. A kernel that cannot be compiled is left to whoever launches it.
    """
    wanted = set(kernels)
    missing = [kernel for kernel in wanted if not is_compiled(*kernel, architecture)]
    if not missing:
        return 0
    reported = 0.0
    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as pool:
        compiling = {pool.submit(cubin, *kernel, architecture): kernel for kernel in missing}
        for done, future in enumerate(as_completed(compiling), len(wanted) - len(missing) + 1):
            if isinstance(error := future.exception(), CompileError):
                logger.warning("kernel %s cannot be compiled: %s", compiling[future][0], error)
            if done == len(wanted) or time.monotonic() - reported > SECONDS_BETWEEN:
                report(done, len(wanted))
                reported = time.monotonic()
    return len(missing)
