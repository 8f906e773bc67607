"""Seconds of rollouts of fixed length and of the updates on them: what strict mode costs."""

import time

from bench.workers.workbench import open_workbench
from parallm.types import POLICY, SamplingParams

PROMPTS, MAX_TOKENS, REPEATS = 8, 64, 2


async def main(*, model: str, data: str | None) -> dict[str, float]:
    async with open_workbench(model=model) as bench:
        learner = await bench.make_learner(0.0)
        seconds = []
        for repeat in range(REPEATS + 1):
            sampling = SamplingParams(max_tokens=MAX_TOKENS, seed=repeat, ignore_eos=True)
            requests = bench.requests(f"speed-{repeat}", data, PROMPTS, sampling, model=POLICY)
            began = time.perf_counter()
            groups = await bench.sampled_groups(requests, repeat)
            await bench.update(learner, groups, repeat, MAX_TOKENS)
            seconds.append(time.perf_counter() - began)
        return {"seconds": sum(seconds[1:])}  # the first one warms up
