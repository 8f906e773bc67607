"""Memory of a serving process before it gets a learner, with one, and after each of five updates, in bytes."""

import ctypes
import gc
import resource
import sys
from collections.abc import Sequence
from typing import ClassVar

import mlx.core as mx

from bench.workers.workbench import open_workbench
from parallm.types import POLICY, SamplingParams

PROMPTS, MAX_TOKENS, UPDATES = 4, 64, 5


async def main(*, model: str, data: str | None) -> dict[str, object]:
    async with open_workbench(model=model) as bench:
        requests = bench.requests("memory", data, PROMPTS, SamplingParams(max_tokens=MAX_TOKENS, seed=0), model=POLICY)
        groups = await bench.sampled_groups(requests)
        readings: dict[str, list[int]] = {"arrays": [], "allocated": []}

        async def note() -> None:
            arrays = await bench.on_device(settled)
            readings["arrays"].append(arrays)
            readings["allocated"].append(allocated() or arrays)

        await note()
        peak = peak_resident()
        learner = await bench.make_learner(1e-6)
        await bench.on_device(lambda: mx.eval(learner.optimizer_state()))
        await note()
        for step in range(UPDATES):
            await bench.update(learner, groups, step, MAX_TOKENS)
            await note()
        sizes = {"base": bench.model.base_bytes, "adapter": bench.adapter.nbytes}
        return sizes | readings | {"peak": peak, "peak_of_updates": peak_resident()}


def peak_resident() -> int:
    """The largest resident memory that this process has ever had, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


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


def settled(streams: Sequence[mx.Stream] = ()) -> int:
    """Bytes of live arrays after giving unused memory back to the system. Called on the device thread.

    `streams` are those that are waited for beside the default one: what they have computed may hold arrays.
    """
    gc.collect()
    for stream in (None, *streams):
        mx.synchronize(stream)
    mx.clear_cache()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
    return int(mx.get_active_memory())
