"""Runs a worker after its BLAS: `python with_blas.py WORKER.py JOB`. MLX takes whatever BLAS the process has by then.

In an environment without parallm the library's path comes in the variable BENCH_BLAS_LIBRARY.
"""

import ctypes
import json
import os
import runpy
import sys

LIBRARY = os.environ.get("BENCH_BLAS_LIBRARY")

if LIBRARY is None:
    from parallm.device.blas import load_blas
    from parallm.device.settings import DeviceSettings

    asked = json.loads(sys.argv[2])
    load_blas(DeviceSettings(blas=asked.get("blas", "auto"), blas_strict=asked.get("strict", True)))
elif LIBRARY:
    ctypes.CDLL(LIBRARY, mode=ctypes.RTLD_GLOBAL)

sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
