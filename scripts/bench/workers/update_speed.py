"""Seconds of our learner's update on groups that the engine samples; writes them to the file that peers train on."""

import json
import time
from pathlib import Path

from bench.workers.workbench import open_workbench
from parallm.types import POLICY, SamplingParams


async def main(
    *, model: str, data: str | None, trajectories: str, prompts: int, max_tokens: int, repeats: int, seed: int
) -> dict[str, list[float]]:
    async with open_workbench(model=model) as bench:
        sampling = SamplingParams(max_tokens=max_tokens, seed=0)  # the same trajectories in every round
        groups = await bench.sampled_groups(bench.requests("sample", data, prompts, sampling, model=POLICY))
        rows = [
            [{"prompt_tokens": one.prompt_tokens, "tokens": one.tokens, "text": one.text} for one in group.trajectories]
            for group in groups
        ]
        Path(trajectories).write_text(json.dumps(rows))
        learner = await bench.make_learner(1e-6, seed)
        seconds: list[float] = []
        for step in range(repeats + 1):
            began = time.perf_counter()
            await bench.update(learner, groups, step, max_tokens)
            seconds.append(time.perf_counter() - began)
        return {"seconds": seconds[1:]}  # the first one warms up
