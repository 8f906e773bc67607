"""A run of `parallm.train` on random weights of a shape, and its parts alone: sampling, and an update.

Each completion has a limit of its own, which stands for the end token; the parts have those of a step of the run.
"""

import asyncio
import gc
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.processes import metrics
from bench.workers.grpo_steps import limit_completions
from parallm.config.schema import RunConfig
from parallm.device.blas import BlasReport
from parallm.run.command import run_command

LEARNING_RATE = 1e-6


def main(
    *,
    shape: str,
    steps: int,
    prompts: int,
    group_size: int,
    shortest: int,
    longest: int,
    has_parts: bool,
    overrides: tuple[str, ...] = (),
) -> dict[str, Any]:
    """By step: seconds, those of its rollout and update, sampled and trained tokens. `rates`: tokens/s of the parts."""
    models: list[Any] = []

    def run(config: RunConfig, folder: Path, blas: BlasReport) -> int:
        from bench.workers.loads import SHAPES  # noqa: PLC0415  # not at the top: the command loads the BLAS before MLX
        from bench.workers.random_model import random_model  # noqa: PLC0415
        from bench.workers.random_training import train_on  # noqa: PLC0415

        limit_completions(group_size, prompts * group_size, (shortest, longest))
        code, model = train_on(lambda: random_model(SHAPES[shape]), config, folder, blas)
        models.append(model)
        return code

    with tempfile.TemporaryDirectory() as folder:
        sys.argv[1:] = [
            *("environment=custom", "environment.target=bench.problems:Lottery", f"trainer.steps={steps}"),
            *(f"rollout.problems_per_step={prompts}", f"rollout.group_size={group_size}", "rollout.refill_rounds=0"),
            *(f"rollout.max_tokens={longest}", f"learner.learning_rate={LEARNING_RATE}", "checkpoint.every=1000"),
            *("trainer.evaluate_problems=0", "server=off", "metrics.display=off", "name=bench"),
            *(f"hydra.run.dir={folder}", *overrides),
        ]
        if code := run_command("train", run):
            sys.exit(code)
        rows = metrics(Path(folder))
    names = {"seconds": "seconds/total", "rollout": "seconds/rollout", "update": "seconds/update"}
    names |= {"sampled": "rollout/tokens", "trained": "update/tokens"}
    found: dict[str, Any] = {name: [row[column] for row in rows] for name, column in names.items()}
    if has_parts:
        gc.collect()  # the run's engine gives its memory back
        found["rates"] = asyncio.run(measure_parts(models[0], prompts, group_size, longest))
    return found


async def measure_parts(model: Any, prompts: int, group_size: int, longest: int) -> dict[str, float]:
    """Each after one round that warms up."""
    from bench.workers.workbench import open_workbench  # noqa: PLC0415  # as above
    from parallm.types import POLICY, SamplingParams  # noqa: PLC0415

    rates: dict[str, float] = {}
    async with open_workbench(model=model, rows=prompts * group_size) as bench:
        learner = await bench.make_learner(LEARNING_RATE)
        for step in (1, 2):
            sampling = SamplingParams(max_tokens=longest, seed=step)
            requests = [
                replace(request, request_id=f"step-{step}-{place}-{POLICY}")
                for place, request in enumerate(bench.requests("", None, prompts, sampling, n=group_size, model=POLICY))
            ]
            began = time.perf_counter()
            groups = await bench.sampled_groups(requests, step)
            rates["sampling"] = count(groups) / (time.perf_counter() - began)
            began = time.perf_counter()
            await bench.update(learner, groups, step, longest)
            rates["update"] = count(groups) / (time.perf_counter() - began)
    return rates


def count(groups: Any) -> int:
    return sum(len(one.tokens) for group in groups for one in group.trajectories)
