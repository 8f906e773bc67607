"""Loads a tuned BLAS into the process before MLX, whose Linux CPU wheel links the slow reference one.

A library in the global symbol scope wins over the one that MLX was linked with. That works only until MLX is loaded:
`load_blas` must come first. Nothing here is needed, or done, on macOS or with the CUDA build of MLX.

MKL's strict mode makes a row of a product independent of how many other rows there are. Where the CPU is not Intel's,
MKL answers a strict AVX2 or AVX-512 with its automatic branch: measured on an AMD EPYC (MKL 2026.2, float32), rows were
equal from 4 rows on with one thread; with fewer than 4 rows never, with two threads and 16 columns from 16 rows on.

Left out: OpenBLAS as bundled by NumPy and SciPy, whose symbols are renamed, so that MLX would not find them.
"""

import ctypes
import ctypes.util
import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Literal

from parallm.device.settings import DeviceSettings
from parallm.errors import ConfigError

CUDA_BUILDS = ("mlx-cuda-12", "mlx-cuda-13")
MKL_PATTERNS = ("/opt/intel/oneapi/mkl/latest/lib/libmkl_rt.so*", "/usr/lib/*/libmkl_rt.so*")
OPENBLAS_PATTERNS = (
    "/usr/lib/*/libopenblas.so*",
    "/usr/lib/*/openblas-*/libopenblas.so*",
    "/usr/lib64/libopenblas*.so*",
    "/usr/local/lib/libopenblas.so*",
    "/opt/OpenBLAS/lib/libopenblas.so*",
)
MKL_ALL_FLAGS = -1
MKL_STRICT_FLAG = 0x10000

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlasReport:
    """What multiplies matrices in this process."""

    name: Literal["mkl", "openblas", "reference", "accelerate", "cuda"]
    path: Path | None
    """The library that was loaded; None where MLX uses what it came with."""
    strict: bool
    """MKL confirms the flag of its strict mode. Whether log-probs are equal bit for bit is measured in each step."""
    message: str


@cache  # a process can load one BLAS once; the jobs of a sweep share it
def load_blas(settings: DeviceSettings) -> BlasReport:
    """Load the BLAS that `settings` name into the global symbol scope. Sets MKL_CBWR unless the user has.

    Raises ConfigError if a library is named but not found, or if MLX is loaded already.
    """
    if sys.platform != "linux":
        return _report("accelerate", "matrix products: Apple's, on Metal or Accelerate")
    if _has_cuda_build():
        # TF32 keeps 10 bits in float32 products: log-probs of engine and learner then differ by 1e-2 instead of 1e-5
        os.environ.setdefault("MLX_ENABLE_TF32", "0")
        return _report("cuda", f"matrix products: CUDA, MLX_ENABLE_TF32={os.environ['MLX_ENABLE_TF32']}")
    if "mlx.core" in sys.modules:
        raise ConfigError(
            f"device.blas={settings.blas}: MLX is loaded already, with whatever BLAS there was; load_blas must come "
            "before `import mlx.core`, and a sweep over device.* needs one process for each choice"
        )
    # MLX walks a graph wider than this depth first, which puts all of one stream's work before the next stream's
    os.environ.setdefault("MLX_BFS_MAX_WIDTH", "1000")
    loaders = {"mkl": _load_mkl, "openblas": _load_openblas}
    for name in loaders if settings.blas == "auto" else loaders.keys() & {settings.blas}:
        report = loaders[name](settings)
        if report is not None:
            return report
    if settings.blas not in {"auto", "reference"}:
        raise ConfigError(f"device.blas={settings.blas}: no such library found; {_WAY_OUT}, or set device.blas=auto")
    report = _report("reference", f"matrix products: the reference BLAS, 15 to 30 times slower than others; {_WAY_OUT}")
    logger.warning(report.message)
    return report


_WAY_OUT = "`pip install mkl` (x86-64) or `apt install libopenblas0` brings a fast one"


def set_blas_threads(report: BlasReport, num_threads: int) -> None:
    """Set the threads of one matrix product for the whole process. Does nothing where BLAS is not ours to set."""
    if report.path is None:
        return
    library = ctypes.CDLL(str(report.path))
    if report.name == "mkl":
        library.MKL_Set_Num_Threads(ctypes.c_int(num_threads))
    elif report.name == "openblas":
        library.openblas_set_num_threads(ctypes.c_int(num_threads))


def _load_mkl(settings: DeviceSettings) -> BlasReport | None:
    if settings.blas_strict:
        # MKL reads it once, when it loads
        os.environ.setdefault("MKL_CBWR", "AVX512,STRICT" if _has_avx512() else "AVX2,STRICT")
    for path in _mkl_paths():
        library = _load_globally(path)
        if library is not None:
            strict = bool(library.MKL_CBWR_Get(ctypes.c_int(MKL_ALL_FLAGS)) & MKL_STRICT_FLAG)
            mode = os.environ.get("MKL_CBWR", "not set")
            return _report("mkl", f"matrix products: MKL, MKL_CBWR={mode} ({path})", path=path, strict=strict)
    return None


def _load_openblas(_: DeviceSettings) -> BlasReport | None:
    for path in _openblas_paths():
        if _load_globally(path) is not None:
            return _report("openblas", f"matrix products: OpenBLAS ({path})", path=path)
    return None


def _load_globally(path: Path) -> ctypes.CDLL | None:
    """None if it cannot be loaded or does not have the functions that MLX calls under their plain names."""
    try:
        if not hasattr(ctypes.CDLL(str(path)), "cblas_sgemm"):
            return None
        return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        logger.warning("found %s, which cannot be loaded: %s", path, error)
        return None


def _mkl_paths() -> Iterator[Path]:
    try:
        files = metadata.files("mkl") or []
    except metadata.PackageNotFoundError:
        files = []
    found = (Path(str(file.locate())).resolve() for file in files if "libmkl_rt.so" in file.name)
    yield from sorted(found, reverse=True)
    yield from _matches(f"{sys.prefix}/lib/libmkl_rt.so*", *MKL_PATTERNS)


def _openblas_paths() -> Iterator[Path]:
    yield from _matches(f"{sys.prefix}/lib/libopenblas.so*", *OPENBLAS_PATTERNS)
    name = ctypes.util.find_library("openblas")
    if name is not None:
        yield Path(name)


def _matches(*patterns: str) -> Iterator[Path]:
    for pattern in patterns:
        # the highest version of the file name first
        yield from sorted(Path("/").glob(pattern.lstrip("/")), reverse=True)


def _has_cuda_build() -> bool:
    return any(_is_installed(name) for name in CUDA_BUILDS)


def _is_installed(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


def _has_avx512() -> bool:
    cpu = Path("/proc/cpuinfo")
    return cpu.exists() and "avx512f" in cpu.read_text().split()


def _report(
    name: Literal["mkl", "openblas", "reference", "accelerate", "cuda"],
    message: str,
    *,
    path: Path | None = None,
    strict: bool = False,
) -> BlasReport:
    return BlasReport(name=name, path=path, strict=strict, message=message)
