"""Samples at least `tokens` tokens in a ragged batch with LoRA and scores them with the learner at learning rate 0."""

import asyncio
import json
import math
import random
import sys
from dataclasses import replace

from job import Job, read_job
from workbench import Workbench, open_workbench, scored_at_random

from parallm.types import SamplingParams, TrajectoryGroup

MOST_PROBLEMS_PER_ROUND = 16
TYPICAL_TOKENS = 64
SECONDS_BETWEEN = 0.05


async def measure(job: Job) -> dict[str, float | str | bool]:
    bench = await open_workbench(job)
    generator = random.Random(job.seed)
    groups: list[TrajectoryGroup] = []
    while sum(len(one.tokens) for group in groups for one in group.trajectories) < job.tokens:
        groups += await sample_ragged(bench, f"parity-{len(groups)}", generator)
    report = await bench.update(await bench.make_learner(0.0), groups, 0)
    parity = report.parity
    bench.close()
    return {
        "tokens": parity.num_tokens,
        "bit_equal_fraction": parity.bit_equal_fraction,
        "mean_abs": parity.mean_abs,
        "max_abs": parity.max_abs,
        "kl": report.kl_to_behaviour,
        "blas": bench.blas.name,
        "strict": bench.blas.strict,
    }


async def sample_ragged(bench: Workbench, name: str, generator: random.Random) -> list[TrajectoryGroup]:
    """One request per problem, each at another moment and with another limit: rows come and go all the time."""
    count = min(MOST_PROBLEMS_PER_ROUND, math.ceil(bench.job.tokens / (TYPICAL_TOKENS * bench.job.group_size)))
    requests = [
        replace(
            request,
            sampling=SamplingParams(
                max_tokens=generator.randint(8, bench.job.max_tokens),
                temperature=generator.choice((1.0, 1.0, 0.7)),
                seed=generator.getrandbits(63),
            ),
        )
        for request in bench.requests(name, count, SamplingParams(max_tokens=1))
    ]

    async def generate_late(place: int) -> TrajectoryGroup:
        await asyncio.sleep(SECONDS_BETWEEN * place)
        return scored_at_random(requests[place], await bench.engine.generate(requests[place]), generator)

    return await asyncio.gather(*(generate_late(place) for place in range(len(requests))))


print(json.dumps(asyncio.run(measure(read_job(sys.argv[1])))))
