"""Streams of the device thread: work that runs at the same time on one device.

On a CPU, MLX runs the operations of a stream one after the other, and only matrix products use several cores. Two
halves of a batch on two streams, each with one BLAS thread, keep all cores busy in all operations. A GPU has one
stream.
"""

import os
from collections.abc import Callable, Sequence
from typing import TypeVar

import mlx.core as mx

from parallm.device.memory import keep_freed_memory

MAX_CPU_STREAMS = 8

Item = TypeVar("Item")
Result = TypeVar("Result")


class DeviceStreams:
    """Create it on the device thread: MLX's streams belong to the thread that creates them."""

    def __init__(self, set_blas_threads: Callable[[int], None]) -> None:
        # One thread per product even where only one stream has work: with more, the result of a product would depend on
        # how the threads divide it, and so on what else runs
        set_blas_threads(1)
        if mx.default_device() == mx.Device(mx.cpu):
            keep_freed_memory()
            first = mx.default_stream(mx.cpu)
            others = [mx.new_stream(mx.cpu) for _ in range(min(available_cores(), MAX_CPU_STREAMS) - 1)]
            self.handles = [first, *others]
        else:
            self.handles = [mx.default_stream(mx.default_device())]

    @property
    def width(self) -> int:
        return len(self.handles)

    def run(self, function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
        """Build `function(item)` for each item, item i on stream i modulo width. Evaluates nothing by itself."""
        results: list[Result] = []
        for index, item in enumerate(items):
            with mx.stream(self.handles[index % self.width]):
                results.append(function(item))
        return results


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
