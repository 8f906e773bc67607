"""Runs a worker after its BLAS: `python with_blas.py WORKER.py JOB`. MLX takes whatever BLAS the process has by then.

In an environment without parallm the library's path comes in the variable BENCH_BLAS_LIBRARY.
"""

import ctypes
import os
import runpy
import sys

LIBRARY = os.environ.get("BENCH_BLAS_LIBRARY")

if LIBRARY is None:
    from job import read_job

    from parallm.device.blas import load_blas

    load_blas(read_job(sys.argv[2]).device)
elif LIBRARY:
    ctypes.CDLL(LIBRARY, mode=ctypes.RTLD_GLOBAL)

sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
