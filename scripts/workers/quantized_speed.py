"""Tokens/s of prefill and decode, seconds of an update, and memory, of one base and one way to keep its weights."""

import asyncio
import json
import random
import sys
import time
from dataclasses import replace

import mlx.core as mx
from job import Job, read_job
from workbench import Workbench, open_workbench, scored_at_random

from parallm.types import SamplingParams

PROMPT_TOKENS = 256


async def measure(job: Job) -> dict[str, float]:
    bench = await open_workbench(job)
    warm_up = await bench.engine.generate_all(bench.requests("warm-up", 2, SamplingParams(max_tokens=8)))
    assert warm_up
    mx.reset_peak_memory()
    prefill = await prefill_speed(bench)
    requests = bench.requests("speed", job.prompts, SamplingParams(max_tokens=job.max_tokens, ignore_eos=True))
    began = time.perf_counter()
    results = await bench.engine.generate_all(requests)
    seconds = time.perf_counter() - began
    engine_peak = mx.get_peak_memory()
    learner = await bench.make_learner(1e-6)
    generator = random.Random(0)
    groups = [scored_at_random(*pair, generator) for pair in zip(requests, results, strict=True)]
    mx.reset_peak_memory()
    began = time.perf_counter()
    await bench.update(learner, groups, 0)
    update = time.perf_counter() - began
    base = bench.model.base_bytes
    bench.close()
    return {
        "prefill": prefill,
        "decode": len(requests) * job.group_size * job.max_tokens / seconds,
        "update": update,
        "base_bytes": base,
        "engine_peak": engine_peak,
        "update_peak": mx.get_peak_memory(),
    }


async def prefill_speed(bench: Workbench) -> float:
    """Of prompts that have nothing in common."""
    generator = random.Random(1)
    requests = [
        replace(
            request,
            prompt_tokens=tuple(generator.randrange(4, bench.model.vocabulary_size) for _ in range(PROMPT_TOKENS)),
            n=1,
        )
        for request in bench.requests("prefill", bench.job.prompts, SamplingParams(max_tokens=1))
    ]
    began = time.perf_counter()
    await bench.engine.generate_all(requests)
    return len(requests) * PROMPT_TOKENS / (time.perf_counter() - began)


print(json.dumps(asyncio.run(measure(read_job(sys.argv[1])))))
