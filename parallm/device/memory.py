"""How much memory the default device computes in, and how much of it is free."""

import ctypes
import os
from pathlib import Path

import mlx.core as mx

MEMORY_INFO = Path("/proc/meminfo")
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
MAX_BLOCK_BYTES, MAX_KEPT_BYTES = 32 * 2**20, 256 * 2**20


def device_memory() -> int:
    """Bytes of the memory that the default device computes in."""
    info = mx.device_info()
    known = info.get("total_memory") or info.get("memory_size")  # CUDA's name, Metal's
    if mx.default_device() != mx.Device(mx.cpu) and known:
        return int(known)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def free_memory() -> int:
    """Bytes that this process may still take: of the device, or on a CPU of what the system says is available."""
    left = max(0, device_memory() - mx.get_active_memory())
    if mx.default_device() != mx.Device(mx.cpu) or not MEMORY_INFO.exists():
        return left
    lines = MEMORY_INFO.read_text().splitlines()
    available = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    return left if available is None else int(available) * 1024


def wire_memory() -> None:
    """On a Mac, let MLX's arrays stay in memory up to what the system recommends: else a model that fills most of it is
    paged out between requests. Elsewhere nothing. (Written after mlx-lm's server; we have no Mac to run it on.)"""
    recommended = mx.device_info().get("max_recommended_working_set_size")
    if recommended is not None:
        mx.set_wired_limit(int(recommended))


def keep_freed_memory() -> None:
    """Let glibc keep up to `MAX_KEPT_BYTES` bytes that are freed, in blocks of up to `MAX_BLOCK_BYTES`, for what comes next.

    By itself it gives such blocks back at once, and the system clears each page again when it is next written: 256 rows
    of a small model had 90,000 page faults a second, and decoded 3% slower (2 cores). On a virtual machine where a new
    page takes 2 to 14 microseconds, steps with arrays of 16 to 32 MB took half as long again while these were given
    back. glibc keeps no larger blocks.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(M_MMAP_THRESHOLD, MAX_BLOCK_BYTES)
        set_option(M_TRIM_THRESHOLD, MAX_KEPT_BYTES)


def give_back_memory() -> None:
    """Let the system have what this process has freed. glibc keeps freed blocks that lie between others in use."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def release_memory() -> None:
    """Give back what MLX and the allocator keep for later arrays, after a model is gone."""
    mx.clear_cache()
    give_back_memory()
