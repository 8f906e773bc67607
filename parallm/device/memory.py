"""Memory of the default device: its size, what is free, and what the allocator keeps."""

import ctypes
import os
import re
from pathlib import Path

import mlx.core as mx

from parallm.device.cgroup import memory_limits

OUT_OF_MEMORY = re.compile(
    r"out of memory|unable to allocate|insufficient memory|attempting to allocate", re.IGNORECASE
)
"""Messages of CUDA, MLX on a CPU, Metal's command buffers, and MLX on Metal."""
MEMORY_INFO = Path("/proc/meminfo")
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
MAX_BLOCK_BYTES, MAX_KEPT_BYTES = 32 * 2**20, 256 * 2**20


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the device, or the host, had no memory left for what raised `error`."""
    is_message = isinstance(error, RuntimeError) and OUT_OF_MEMORY.search(str(error)) is not None
    return is_message or isinstance(error, MemoryError)


def device_memory() -> int:
    """Return the bytes of memory of the default device; of a CPU at most what control groups allow this process."""
    info = mx.device_info()
    size = info.get("total_memory") or info.get("memory_size")  # CUDA's name, Metal's
    if mx.default_device() != mx.Device(mx.cpu) and size:
        return int(size)
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min((physical, *(group.limit for group in memory_limits())))


def free_memory() -> int:
    """Return the bytes that this process may allocate: of the device, or on a CPU what the system has available and
    control groups allow."""
    left = max(0, device_memory() - mx.get_active_memory())
    if mx.default_device() != mx.Device(mx.cpu):
        return left
    left = min((left, *(group.left for group in memory_limits())))
    if not MEMORY_INFO.exists():
        return left
    lines = MEMORY_INFO.read_text().splitlines()
    available = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    return left if available is None else min(left, int(available) * 1024)


def wire_memory() -> None:
    """On a Mac, wire MLX's arrays in memory up to what the system recommends; do nothing elsewhere.

    Otherwise macOS pages out a large model between requests. Follows mlx-lm's server; not yet run on a Mac.
    """
    recommended = mx.device_info().get("max_recommended_working_set_size")
    if recommended is not None:
        mx.set_wired_limit(int(recommended))


def keep_freed_memory() -> None:
    """Let glibc keep up to `MAX_KEPT_BYTES` freed bytes in blocks of up to `MAX_BLOCK_BYTES` for later allocations.

    By default it returns such blocks to the system, which clears each page again at its next write: 256 rows of a small
    model had 90,000 page faults a second and decoded 3% slower (2 cores); on a virtual machine, steps with arrays of 16
    to 32 MB took 50% longer. glibc keeps no larger blocks.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(M_MMAP_THRESHOLD, MAX_BLOCK_BYTES)
        set_option(M_TRIM_THRESHOLD, MAX_KEPT_BYTES)


def give_back_memory() -> None:
    """Return freed memory to the system, as far as glibc can: it keeps freed blocks between others in use."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def release_memory() -> None:
    """Return the caches of MLX and of the allocator to the system, after a model was closed."""
    mx.clear_cache()
    give_back_memory()
