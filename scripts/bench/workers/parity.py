"""Samples tokens in a ragged batch with LoRA and scores them with the learner at learning rate 0."""

import asyncio
import math
import random
from dataclasses import replace

import bench as package
from bench.workers.workbench import Workbench, open_workbench, scored_at_random
from parallm.types import POLICY, SamplingParams, TrajectoryGroup

MAX_PROBLEMS, GROUP_SIZE, MAX_TOKENS, TYPICAL_TOKENS = 16, 8, 160, 64
ROWS = 48
"""Fewer than there are completions, so that rows join whenever others leave."""
SECONDS_BETWEEN = 0.05


async def main(
    *,
    model: str = "nano",
    data: str | None = None,
    tokens: int,
    dtype: str = "auto",
    shape: str | None = None,
    rows: int = ROWS,
    length: int | None = None,
) -> dict[str, float | str | bool]:
    """A `shape` has random weights. Completions end by themselves, or after `length` tokens."""
    generator = random.Random(0)
    groups: list[TrajectoryGroup] = []
    async with open_workbench(model=model, shape=shape, dtype=dtype, rows=rows) as bench:
        while sum(len(one.tokens) for group in groups for one in group.trajectories) < tokens:
            groups += await sample_ragged(bench, f"parity-{len(groups)}", data, tokens, generator, length)
        report = await bench.update(await bench.make_learner(0.0), groups, 0, length or MAX_TOKENS)
        computed = str(bench.model.dtype).removeprefix("mlx.core.")
    parity = report.parity
    return {
        "tokens": parity.num_tokens,
        "bit_equal_fraction": parity.bit_equal_fraction,
        "mean_abs": parity.mean_abs,
        "max_abs": parity.max_abs,
        "kl": report.kl_to_behaviour,
        "blas": package.BLAS.name,
        "strict": package.BLAS.strict,
        "dtype": computed,
    }


async def sample_ragged(
    bench: Workbench, name: str, data: str | None, tokens: int, generator: random.Random, length: int | None
) -> list[TrajectoryGroup]:
    """One request a problem, each at another moment and with another limit: rows come and go all the time."""
    count = min(MAX_PROBLEMS, math.ceil(tokens / ((length or TYPICAL_TOKENS) * GROUP_SIZE)))
    requests = [
        replace(
            request,
            sampling=SamplingParams(
                max_tokens=length or generator.randint(8, MAX_TOKENS),
                ignore_eos=length is not None,
                temperature=generator.choice((1.0, 1.0, 0.7)),
                seed=generator.getrandbits(63),
            ),
        )
        for request in bench.requests(name, data, count, SamplingParams(max_tokens=1), n=GROUP_SIZE, model=POLICY)
    ]

    async def generate_late(place: int) -> TrajectoryGroup:
        await asyncio.sleep(SECONDS_BETWEEN * place)
        return scored_at_random(requests[place], await bench.engine.generate(requests[place]), generator)

    return await asyncio.gather(*(generate_late(place) for place in range(len(requests))))
