"""Machine, commit and peak memory that stand beside each figure. MLX devices are not its business."""

import os
import platform
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import parallm

MLX_BUILDS = ("mlx-cpu", "mlx-cuda-12", "mlx-cuda-13", "mlx-metal")


def describe_machine(device: str = "") -> str:
    """Return one line: system, processor, usable cores and, if given, the device that evaluates arrays."""
    text = f"{platform.system()} {platform.machine()}, {processor_name()}, {num_usable_cores()} cores"
    return f"{text}, {device}" if device else text


def describe_versions() -> str:
    """Return one line: versions of ParaLLM, MLX with its build, mlx-lm and Python. Imports none of them."""
    builds = [name.removeprefix("mlx-") for name in MLX_BUILDS if version_of(name) is not None]
    mlx = f"mlx {version_of('mlx') or 'missing'} ({', '.join(builds) or 'without a backend'})"
    mlx_lm = f"mlx-lm {version_of('mlx-lm') or 'missing'}"
    python = f"Python {platform.python_version()}"
    return f"ParaLLM {parallm.__version__}, {mlx}, {mlx_lm}, {python}, {platform.system()} {platform.machine()}"


def version_of(distribution: str) -> str | None:
    """Return the version of an installed package; None where it is missing."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def describe_commit() -> str:
    """Return the commit of the checkout that holds this package, `+changes` if it was edited, else the version."""
    folder = Path(parallm.__file__).parent
    if not (folder.parent / ".git").exists():
        return f"version {parallm.__version__}"
    try:
        commit = run_git(folder, "rev-parse", "--short=12", "HEAD")
        return f"{commit}+changes" if run_git(folder, "status", "--porcelain", "--", ".") else commit
    except (OSError, subprocess.SubprocessError):
        return f"version {parallm.__version__}"


def peak_memory_gb() -> float | None:
    """Return the largest resident memory of this process so far in GB (1e9 bytes); None on Windows."""
    try:
        import resource  # noqa: PLC0415 - there is none on Windows
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e9 if sys.platform == "darwin" else peak * 1024 / 1e9


def processor_name() -> str:
    """Return the processor's marketing name where the system tells it."""
    file = Path("/proc/cpuinfo")
    text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    name = re.search(r"^model name\s*: *(.+)$", text, re.MULTILINE)
    return name[1].strip() if name else platform.processor() or "unknown processor"


def num_usable_cores() -> int:
    """Return how many cores this process may use, which a container can limit below what the machine has."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def run_git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
