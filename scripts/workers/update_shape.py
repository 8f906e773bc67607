"""Seconds and peak memory of our learner's update on a shape with random weights."""

import json
import sys
import time

import mlx.core as mx
import numpy as np
from random_model import random_model
from shapes import SHAPES, UpdateJob

from parallm.device.streams import DeviceStreams
from parallm.learner.learner import Learner
from parallm.learner.settings import LearnerSettings
from parallm.model.adapters.adapter import make_adapter
from parallm.model.adapters.initial import initial_arrays
from parallm.types import Problem, Trajectory, TrajectoryGroup


def random_groups(job: UpdateJob, vocabulary: int) -> list[TrajectoryGroup]:
    random = np.random.default_rng(0)
    groups: list[TrajectoryGroup] = []
    for place in range(job.groups):
        prompt = tuple(random.integers(0, vocabulary, job.prompt).tolist())
        rows = tuple(
            Trajectory(
                problem_id=str(place),
                prompt_tokens=prompt,
                tokens=tuple(random.integers(0, vocabulary, job.completion).tolist()),
                loss_mask=(True,) * job.completion,
                logprobs=(-float(np.log(vocabulary)),) * job.completion,
                temperature=1.0,
                weight_versions=(),
                reward_parts={},
                reward=float((place + index) % 2),
                text="",
                finish_reason="length",
            )
            for index in range(job.group_size)
        )
        groups.append(
            TrajectoryGroup(problem=Problem(problem_id=str(place), messages=(), answer=""), trajectories=rows)
        )
    return groups


def main(job: UpdateJob) -> None:
    shape = SHAPES[job.shape]
    model = random_model(shape)
    adapter = make_adapter(initial_arrays(model.targets, 16, mx.random.key(0)), version=0, rank=16, alpha=32.0)
    # advantages over the whole batch: a group of one has a signal, too, and the step ends with an optimizer step
    settings = LearnerSettings(advantage="reinforce_pp")
    learner = Learner(model, DeviceStreams(lambda _: None), settings, start=adapter, total_steps=10, seed=0)
    groups = random_groups(job, shape.vocabulary)
    seconds: list[float] = []
    for step in range(job.repeats + 1):
        if step == 1:
            mx.reset_peak_memory()
        began = time.perf_counter()
        *_, report = learner.update(groups, step=step, max_tokens=job.completion)
        seconds.append(time.perf_counter() - began)
        assert report is not None
        assert report.skipped is None, report.skipped
    print(json.dumps({"seconds": seconds[1:], "peak_gb": mx.get_peak_memory() / 1e9}))


main(UpdateJob(**json.loads(sys.argv[1])))
