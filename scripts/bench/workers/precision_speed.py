"""Tokens/s of rollouts and of the updates on them in the type that a model computes in by default, and in bfloat16.

Both stand in one process, each with an engine and a learner of its own, and take their steps in turns: what its host
does for longer than a step slows down both alike.
"""

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from typing import Any

from bench.workers.workbench import Workbench, open_workbench
from parallm.learner.learner import Learner
from parallm.types import POLICY, SamplingParams

WARM_UP = 3
"""First steps, in which buffers and graphs are made."""


async def main(
    *, types: Sequence[str], model: str, data: str | None, prompts: int, group_size: int, max_tokens: int, steps: int
) -> AsyncIterator[dict[str, Any]]:
    """A result for each of `steps`, by type: tokens/s, and in what it computes. `types` are loaded in their order."""
    async with AsyncExitStack() as stack:
        sides: dict[str, tuple[Workbench, Learner]] = {}
        for dtype in types:
            bench = await stack.enter_async_context(open_workbench(model=model, dtype=dtype, rows=prompts * group_size))
            sides[dtype] = bench, await bench.make_learner(0.0)
        for step in range(WARM_UP + steps):
            sampling = SamplingParams(max_tokens=max_tokens, seed=step)
            found = {}
            for dtype in types if step % 2 == 0 else types[::-1]:
                bench, learner = sides[dtype]
                requests = bench.requests(f"{dtype}-{step}", data, prompts, sampling, n=group_size, model=POLICY)
                began = time.perf_counter()
                groups = await bench.sampled_groups(requests, step)
                sampled = time.perf_counter()
                report = await bench.update(learner, groups, step, max_tokens)
                ended = time.perf_counter()
                num_tokens = sum(len(one.tokens) for group in groups for one in group.trajectories)
                found[dtype] = {
                    "rollout": num_tokens / (sampled - began),
                    "update": report.num_tokens / (ended - sampled),
                    "computed": str(bench.model.dtype).removeprefix("mlx.core."),
                }
            if step >= WARM_UP:
                yield found
