"""Samples groups with the engine and writes them to the file `trajectories`: the same input for every learner."""

import asyncio
import json
import random
import sys
from pathlib import Path

from job import Job, read_job
from workbench import open_workbench, scored_at_random

from parallm.types import SamplingParams


async def sample(job: Job) -> dict[str, int]:
    bench = await open_workbench(job)
    requests = bench.requests("sample", job.prompts, SamplingParams(max_tokens=job.max_tokens, seed=job.seed))
    results = await bench.engine.generate_all(requests)
    bench.close()
    generator = random.Random(job.seed)
    groups = [scored_at_random(*pair, generator) for pair in zip(requests, results, strict=True)]
    rows = [
        [
            {
                "prompt_tokens": one.prompt_tokens,
                "tokens": one.tokens,
                "logprobs": one.logprobs,
                "reward": one.reward,
                "text": one.text,
            }
            for one in group.trajectories
        ]
        for group in groups
    ]
    Path(str(job.trajectories)).write_text(json.dumps(rows))
    return {
        "tokens": sum(len(one.tokens) for group in groups for one in group.trajectories),
        "prompt_tokens": sum(len(request.prompt_tokens) for request in requests),
    }


print(json.dumps(asyncio.run(sample(read_job(sys.argv[1])))))
