"""Rollouts with updates between them, and where the device thread's time goes meanwhile.

The thread launches work, waits for the device, or runs Python, which includes waiting for the interpreter's lock.
"""

import os
import resource
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any
from unittest.mock import patch

import mlx.core as mx

from bench.workers.workbench import open_workbench
from parallm.types import POLICY, SamplingParams

UPDATED_ROWS = 32
"""Completions of a round that are trained on, so that memory is as in a run."""


class Clock:
    """Seconds and CPU seconds of calls on one thread."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.thread = threading.get_ident()

    def timed(self, name: str, function: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            began = time.perf_counter()
            function(*arguments)
            if threading.get_ident() == self.thread:
                self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began

        return call


async def main(
    *, shape: str, rows: int, new: int, rounds: int, cores: Sequence[int] | None = None
) -> AsyncIterator[dict[str, float]]:
    """Yield a round at a time: its seconds, those of its parts, and what the operating system did with the thread.
    `cores`: the only ones that the process may use."""
    if cores is not None:
        os.sched_setaffinity(0, cores)
    async with open_workbench(shape=shape, rows=rows) as bench:
        learner = await bench.make_learner(1e-6)
        clock = await bench.on_device(Clock)
        launch, wait = clock.timed("launch_seconds", mx.async_eval), clock.timed("wait_seconds", mx.eval)
        with patch.object(mx, "async_eval", launch), patch.object(mx, "eval", wait):
            for number in range(rounds):
                sampling = SamplingParams(max_tokens=new, seed=number, ignore_eos=True)
                requests = bench.requests(f"round-{number}", None, rows // 8, sampling, model=POLICY)
                before = await bench.on_device(usage)
                clock.seconds.clear()
                began = time.perf_counter()
                groups = await bench.sampled_groups(requests, number)
                seconds = time.perf_counter() - began
                parts = dict(clock.seconds)
                after = await bench.on_device(usage)
                yield {
                    "seconds": seconds,
                    "launch_seconds": 0.0,
                    **parts,
                    "python_seconds": seconds - sum(parts.values()),
                    **{name: after[name] - before[name] for name in after},
                }
                await bench.update(learner, groups[: UPDATED_ROWS // 8], number, new)


def usage() -> dict[str, float]:
    """CPU seconds of this thread, and how often it gave its core away and lost it."""
    own = resource.getrusage(resource.RUSAGE_THREAD)
    return {"cpu_seconds": time.thread_time(), "gave_away": own.ru_nvcsw, "lost": own.ru_nivcsw}
