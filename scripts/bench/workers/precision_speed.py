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
UPDATES = 4
"""Updates of each type in a step, in turns: one takes a fifth of a second, less than a host's pauses."""


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
            order = types if step % 2 == 0 else types[::-1]
            sampled = {}
            found: dict[str, dict[str, Any]] = {}
            for dtype in order:
                bench, _ = sides[dtype]
                requests = bench.requests(f"{dtype}-{step}", data, prompts, sampling, n=group_size, model=POLICY)
                began = time.perf_counter()
                sampled[dtype] = groups = await bench.sampled_groups(requests, step)
                seconds = time.perf_counter() - began
                num_tokens = sum(len(one.tokens) for group in groups for one in group.trajectories)
                computed = str(bench.model.dtype).removeprefix("mlx.core.")
                found[dtype] = {"rollout": num_tokens / seconds, "computed": computed}
            num_trained, trained_for = dict.fromkeys(types, 0), dict.fromkeys(types, 0.0)
            for turn in range(UPDATES):
                for dtype in order if turn % 2 == 0 else order[::-1]:
                    bench, learner = sides[dtype]
                    began = time.perf_counter()
                    report = await bench.update(learner, sampled[dtype], step, max_tokens)
                    trained_for[dtype] += time.perf_counter() - began
                    num_trained[dtype] += report.num_tokens
            for dtype in types:
                found[dtype]["update"] = num_trained[dtype] / trained_for[dtype]
            if step >= WARM_UP:
                yield found
