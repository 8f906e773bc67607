"""Memory of a serving process before it gets a learner, with one, and after each of `steps` updates. Prints bytes."""

import asyncio
import json
import random
import resource
import sys

import mlx.core as mx
from job import Job, read_job
from memory_left import allocated, settled
from workbench import open_workbench, scored_at_random

from parallm.types import SamplingParams


async def measure(job: Job) -> dict[str, object]:
    bench = await open_workbench(job)
    requests = bench.requests("memory", job.prompts, SamplingParams(max_tokens=job.max_tokens, seed=0))
    results = await bench.engine.generate_all(requests)
    readings: dict[str, list[int]] = {"resident": [], "arrays": [], "allocated": []}

    async def note() -> None:
        resident, arrays = await bench.on_device(settled)
        heap = allocated()
        for name, size in (("resident", resident), ("arrays", arrays), ("allocated", arrays if heap is None else heap)):
            readings[name].append(size)

    await note()
    peak = most_resident()
    learner = await bench.make_learner(1e-6)
    await bench.on_device(lambda: mx.eval(learner.optimizer_state()))
    await note()
    generator = random.Random(0)
    groups = [scored_at_random(*pair, generator) for pair in zip(requests, results, strict=True)]
    for step in range(job.steps):
        report = await bench.update(learner, groups, step)
        assert report.skipped is None, report.skipped
        await note()
    sizes = {"base": bench.model.base_bytes, "adapter": bench.adapter.nbytes}
    bench.close()
    return sizes | readings | {"peak": peak, "peak_of_updates": most_resident()}


def most_resident() -> int:
    """That this process has ever had, in bytes."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


print(json.dumps(asyncio.run(measure(read_job(sys.argv[1])))))
