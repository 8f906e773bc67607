"""Resident memory of a serving process before and after it gets a learner. Prints bytes."""

import asyncio
import json
import random
import sys

import mlx.core as mx
from job import Job, read_job
from memory_left import settled
from workbench import open_workbench, scored_at_random

from parallm.types import SamplingParams


async def measure(job: Job) -> dict[str, int]:
    bench = await open_workbench(job)
    requests = bench.requests("memory", job.prompts, SamplingParams(max_tokens=job.max_tokens, seed=0))
    results = await bench.engine.generate_all(requests)
    before, arrays_before = await bench.on_device(settled)
    learner = await bench.make_learner(1e-6)
    await bench.on_device(lambda: mx.eval(learner.optimizer_state()))
    added, arrays_added = await bench.on_device(settled)
    generator = random.Random(0)
    groups = [scored_at_random(*pair, generator) for pair in zip(requests, results, strict=True)]
    await bench.update(learner, groups, 0)
    trained, arrays_trained = await bench.on_device(settled)
    sizes = {"base": bench.model.base_bytes, "adapter": bench.adapter.nbytes}
    bench.close()
    return sizes | {
        "server": before,
        "added": added - before,
        "added_after_update": trained - before,
        "arrays_added": arrays_added - arrays_before,
        "arrays_added_after_update": arrays_trained - arrays_before,
    }


print(json.dumps(asyncio.run(measure(read_job(sys.argv[1])))))
