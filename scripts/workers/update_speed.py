"""Seconds of our learner's update on the trajectories of a file, one optimizer step each."""

import asyncio
import json
import sys
import time
from pathlib import Path

from job import Job, read_job
from workbench import open_workbench

from parallm.types import Problem, Trajectory, TrajectoryGroup


def read_groups(path: str) -> list[TrajectoryGroup]:
    return [
        TrajectoryGroup(
            problem=Problem(problem_id=str(place), messages=(), answer=""),
            trajectories=tuple(
                Trajectory(
                    problem_id=str(place),
                    prompt_tokens=tuple(row["prompt_tokens"]),
                    tokens=tuple(row["tokens"]),
                    loss_mask=(True,) * len(row["tokens"]),
                    logprobs=tuple(row["logprobs"]),
                    temperature=1.0,
                    weight_versions=(),
                    reward_parts={},
                    reward=row["reward"],
                    text=row["text"],
                    finish_reason="stop",
                )
                for row in rows
            ),
        )
        for place, rows in enumerate(json.loads(Path(path).read_text()))
    ]


async def measure(job: Job) -> dict[str, list[float]]:
    bench = await open_workbench(job)
    learner = await bench.make_learner(1e-6)
    groups = read_groups(str(job.trajectories))
    seconds: list[float] = []
    for step in range(job.repeats + 1):
        began = time.perf_counter()
        await bench.update(learner, groups, step)
        seconds.append(time.perf_counter() - began)
    bench.close()
    return {"seconds": seconds[1:]}  # the first one warms up


print(json.dumps(asyncio.run(measure(read_job(sys.argv[1])))))
