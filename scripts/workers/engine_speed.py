"""Tokens per second of our engine: all prompts submitted at once, `group_size` completions each."""

import asyncio
import json
import sys
import time

from job import Job, read_job
from workbench import open_workbench

from parallm.types import SamplingParams


async def measure(job: Job) -> dict[str, float | str]:
    bench = await open_workbench(job)
    await bench.engine.generate_all(bench.requests("warm-up", 2, SamplingParams(max_tokens=8)))
    requests = bench.requests("speed", job.prompts, SamplingParams(max_tokens=job.max_tokens, seed=job.seed))
    began = time.perf_counter()
    results = await bench.engine.generate_all(requests)
    seconds = time.perf_counter() - began
    tokens = sum(len(completion.tokens) for completions in results for completion in completions)
    bench.close()
    return {"tokens": tokens, "seconds": seconds, "tokens_per_second": tokens / seconds, "blas": bench.blas.name}


print(json.dumps(asyncio.run(measure(read_job(sys.argv[1])))))
