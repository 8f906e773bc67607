"""Tokens/s of rollouts and of the updates on them in the type that a model computes in by default, and in bfloat16."""

import time
from collections.abc import AsyncIterator
from typing import Any

from bench.workers.workbench import open_workbench
from parallm.types import POLICY, SamplingParams

TYPES = ("auto", "bfloat16")
WARM_UP = 2
"""First steps of a turn, in which buffers and graphs are made."""


async def main(
    *, model: str, data: str | None, prompts: int, group_size: int, max_tokens: int, steps: int, turns: int
) -> AsyncIterator[dict[str, Any]]:
    """A result for each turn of each type; `steps` of it count."""
    for turn in range(turns):
        for dtype in TYPES if turn % 2 == 0 else TYPES[::-1]:
            yield await speeds(dtype, model, data, prompts, group_size, max_tokens, steps)


async def speeds(
    dtype: str, model: str, data: str | None, prompts: int, group_size: int, max_tokens: int, steps: int
) -> dict[str, Any]:
    found: dict[str, Any] = {"asked": dtype, "rollout": [], "update": []}
    async with open_workbench(model=model, dtype=dtype, rows=prompts * group_size) as bench:
        found["computed"] = str(bench.model.dtype).removeprefix("mlx.core.")
        learner = await bench.make_learner(0.0)
        for step in range(WARM_UP + steps):
            sampling = SamplingParams(max_tokens=max_tokens, seed=step)
            requests = bench.requests(f"{dtype}-{step}", data, prompts, sampling, n=group_size, model=POLICY)
            began = time.perf_counter()
            groups = await bench.sampled_groups(requests, step)
            sampled = time.perf_counter()
            report = await bench.update(learner, groups, step, max_tokens)
            ended = time.perf_counter()
            if step >= WARM_UP:
                num_tokens = sum(len(one.tokens) for group in groups for one in group.trajectories)
                found["rollout"].append(num_tokens / (sampled - began))
                found["update"].append(report.num_tokens / (ended - sampled))
    return found
