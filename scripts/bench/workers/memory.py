"""Memory of a serving process before it gets a learner, with one, and after each of five updates, in bytes."""

import resource
import sys

import mlx.core as mx

from bench.workers.memory_left import allocated, settled
from bench.workers.workbench import open_workbench
from parallm.types import POLICY, SamplingParams

PROMPTS, MAX_TOKENS, UPDATES = 4, 64, 5


async def main(*, model: str, data: str | None) -> dict[str, object]:
    async with open_workbench(model=model) as bench:
        requests = bench.requests("memory", data, PROMPTS, SamplingParams(max_tokens=MAX_TOKENS, seed=0), model=POLICY)
        groups = await bench.sampled_groups(requests)
        readings: dict[str, list[int]] = {"arrays": [], "allocated": []}

        async def note() -> None:
            _, arrays = await bench.on_device(settled)
            readings["arrays"].append(arrays)
            readings["allocated"].append(allocated() or arrays)

        await note()
        peak = peak_resident()
        learner = await bench.make_learner(1e-6)
        await bench.on_device(lambda: mx.eval(learner.optimizer_state()))
        await note()
        for step in range(UPDATES):
            await bench.update(learner, groups, step, MAX_TOKENS)
            await note()
        sizes = {"base": bench.model.base_bytes, "adapter": bench.adapter.nbytes}
        return sizes | readings | {"peak": peak, "peak_of_updates": peak_resident()}


def peak_resident() -> int:
    """The largest resident memory that this process has ever had, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
