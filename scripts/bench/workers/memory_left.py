"""What a process holds once it has given back what it does not need."""

import ctypes
import gc
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import mlx.core as mx

HEAP_FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


class HeapInformation(ctypes.Structure):
    """mallinfo2(3): `uordblks` and `hblkhd` are the bytes that are in use."""

    _fields_: ClassVar = [(name, ctypes.c_size_t) for name in HEAP_FIELDS.split()]


def allocated() -> int | None:
    """Bytes that C code of this process holds, of arrays and all else; None where the C library does not tell."""
    tell = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if tell is None:
        return None
    tell.restype = HeapInformation
    heap = tell()
    return int(heap.uordblks + heap.hblkhd)


def settled(streams: Sequence[mx.Stream] = ()) -> tuple[int, int]:
    """Resident bytes, and bytes of live arrays, after giving unused memory back to the system. On the device thread.

    `streams` are those that are waited for beside the default one: what they have computed may hold arrays.
    """
    gc.collect()
    for stream in (None, *streams):
        mx.synchronize(stream)
    mx.clear_cache()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
    resident = 0
    status = Path("/proc/self/status")
    if status.exists():
        resident = next(int(line.split()[1]) * 1024 for line in status.read_text().splitlines() if "VmRSS" in line)
    return resident, mx.get_active_memory()
