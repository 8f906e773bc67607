"""Loads a fast BLAS into the process before MLX, whose Linux CPU wheel links the slow reference one.

A library in the global symbol scope takes precedence over the one that MLX was linked with, if it is loaded before MLX:
call `load_blas` first. macOS and the CUDA build of MLX need none of this.

MKL's strict mode makes a row of a product independent of the number of other rows. On CPUs that are not Intel's, MKL
replaces a strict AVX2 or AVX-512 by its automatic branch: on an AMD EPYC (MKL 2026.2, float32) rows were equal from 4
rows on with one thread, never below, and with two threads and 16 columns from 16 rows on.

OpenBLAS as bundled by NumPy and SciPy is not used: its symbols are renamed, so MLX would not find them.
"""

import ctypes
import ctypes.util
import hashlib
import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Literal

from parallm.device import tf32
from parallm.device.settings import BlasSettings
from parallm.device.user_cache import user_cache
from parallm.errors import ConfigError

CUDA_DEFAULTS = {
    # more misses than twice a cache's size are an error otherwise, however long the process has run
    "MLX_ENABLE_CACHE_THRASHING_CHECK": "0",
    "MLX_CUDA_GRAPH_CACHE_SIZE": "2000",  # 400
    # 100 on Hopper, where a step of a 0.5B shape takes the host longer as several launches: with this variable set,
    # `scripts/figures rollouts.gpu` prints the seconds. Other GPUs were not measured. Operations of updates are so
    # large that MLX_MAX_MB_PER_BUFFER ends a launch before
    "MLX_MAX_OPS_PER_BUFFER": "400",
    "MLX_CUDA_SDPA_BACKWARD_CACHE_SIZE": "512",  # 64 plans of cuDNN, of 0.1 s each
}
"""Variables that MLX's CUDA build reads, with MLX's own values behind those of numbers."""
GPUS = Path("/proc/driver/nvidia/gpus")
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
    """The library behind matrix products of this process."""

    name: Literal["mkl", "openblas", "reference", "accelerate", "cuda"]
    path: Path | None
    """The loaded library; None if MLX uses the one that it was built with."""
    strict: bool
    """Whether MKL confirms its strict mode. Each training step measures whether log-probs are equal bit for bit."""
    message: str


def load_blas(settings: BlasSettings) -> BlasReport:
    """Load the BLAS of `device.blas` into the global symbol scope. Sets MKL_CBWR unless the environment has it.

    Raises ConfigError if a named library is not found, or if MLX is loaded already.
    """
    return _load(settings.blas, is_strict=settings.blas_strict)


@cache  # a process can load only one BLAS; the jobs of a sweep share it
def _load(choice: str, *, is_strict: bool) -> BlasReport:
    if sys.platform != "linux":
        return _report("accelerate", "matrix products: Apple's, on Metal or Accelerate")
    if _has_cuda_build():
        _set_cuda_defaults()
        return _report("cuda", "matrix products: CUDA")
    if "mlx.core" in sys.modules:
        raise ConfigError(
            f"device.blas={choice}: MLX is loaded already, with whatever BLAS there was; load_blas must come "
            "before `import mlx.core`, and a sweep over device.* needs one process for each choice"
        )
    # MLX walks wider graphs depth first, which puts all work of one stream before that of the next
    os.environ.setdefault("MLX_BFS_MAX_WIDTH", "1000")
    loaders = {"mkl": _load_mkl, "openblas": _load_openblas}
    for name in loaders if choice == "auto" else loaders.keys() & {choice}:
        report = loaders[name](is_strict)
        if report is not None:
            return report
    if choice not in {"auto", "reference"}:
        raise ConfigError(f"device.blas={choice}: no such library found; {_WAY_OUT}, or set device.blas=auto")
    report = _report("reference", f"matrix products: the reference BLAS, 15 to 30 times slower than others; {_WAY_OUT}")
    logger.warning(report.message)
    return report


def _set_cuda_defaults() -> None:
    """Set what MLX's CUDA build reads from the environment, unless it is set."""
    for name, value in CUDA_DEFAULTS.items():
        os.environ.setdefault(name, value)
    tf32.set_default()
    # MLX's own place is the folder for temporary files, where whoever comes first decides what others execute
    folder = user_cache(f"mlx-{metadata.version('mlx')}-{_gpus()}")
    if folder is not None:
        os.environ.setdefault("MLX_PTX_CACHE_DIR", str(folder))


def _gpus() -> str:
    """A name for the GPUs of this machine: MLX's files do not say which architecture they are for."""
    try:
        lines = sorted({line for path in GPUS.glob("*/information") for line in path.read_text().splitlines()})
    except OSError:
        lines = []
    models = "".join(line for line in lines if line.startswith("Model"))
    return hashlib.sha256(models.encode()).hexdigest()[:8]


_WAY_OUT = "`pip install mkl` (x86-64) or `apt install libopenblas0` brings a fast one"


def set_blas_threads(report: BlasReport, num_threads: int) -> None:
    """Set the number of threads of a matrix product for the process. Needs a library of `load_blas`."""
    if report.path is None:
        return
    library = ctypes.CDLL(str(report.path))
    if report.name == "mkl":
        library.MKL_Set_Num_Threads(ctypes.c_int(num_threads))
    elif report.name == "openblas":
        library.openblas_set_num_threads(ctypes.c_int(num_threads))


def _load_mkl(is_strict: bool) -> BlasReport | None:
    if is_strict:
        # MKL reads it once, when it is loaded
        os.environ.setdefault("MKL_CBWR", "AVX512,STRICT" if _has_avx512() else "AVX2,STRICT")
    for path in _mkl_paths():
        library = _load_globally(path)
        if library is not None:
            strict = bool(library.MKL_CBWR_Get(ctypes.c_int(MKL_ALL_FLAGS)) & MKL_STRICT_FLAG)
            mode = os.environ.get("MKL_CBWR", "not set")
            return _report("mkl", f"matrix products: MKL, MKL_CBWR={mode} ({path})", path=path, strict=strict)
    return None


def _load_openblas(_: bool) -> BlasReport | None:
    for path in _openblas_paths():
        if _load_globally(path) is not None:
            return _report("openblas", f"matrix products: OpenBLAS ({path})", path=path)
    return None


def _load_globally(path: Path) -> ctypes.CDLL | None:
    """Return None if the library cannot be loaded or lacks the plain names of functions that MLX calls."""
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
    paths = (Path(str(file.locate())).resolve() for file in files if "libmkl_rt.so" in file.name)
    yield from sorted(paths, reverse=True)
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
