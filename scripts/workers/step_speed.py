"""Seconds of one rollout of fixed length and of the update on it: what strict mode costs."""

import asyncio
import json
import random
import sys
import time

from job import Job, read_job
from workbench import open_workbench, scored_at_random

from parallm.types import SamplingParams


async def measure(job: Job) -> dict[str, float]:
    bench = await open_workbench(job)
    learner = await bench.make_learner(0.0)
    rollout = update = 0.0
    for repeat in range(job.repeats + 1):  # the first one warms up
        sampling = SamplingParams(max_tokens=job.max_tokens, seed=repeat, ignore_eos=True)
        requests = bench.requests(f"speed-{repeat}", job.prompts, sampling)
        began = time.perf_counter()
        results = await bench.engine.generate_all(requests)
        rollout += (time.perf_counter() - began) * (repeat > 0)
        generator = random.Random(repeat)
        groups = [scored_at_random(*pair, generator) for pair in zip(requests, results, strict=True)]
        began = time.perf_counter()
        await bench.update(learner, groups, repeat)
        update += (time.perf_counter() - began) * (repeat > 0)
    bench.close()
    return {"rollout": rollout / job.repeats, "update": update / job.repeats}


print(json.dumps(asyncio.run(measure(read_job(sys.argv[1])))))
