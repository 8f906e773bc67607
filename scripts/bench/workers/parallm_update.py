"""Seconds and peak memory of our learner's update on a shape with random weights."""

import time
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

import bench
from bench.workers.loads import SHAPES, Layout
from bench.workers.random_model import random_model
from parallm.device.blas import set_blas_threads
from parallm.device.streams import DeviceStreams
from parallm.learner.learner import Learner
from parallm.learner.settings import LearnerSettings
from parallm.model.adapters.adapter import make_adapter
from parallm.model.adapters.initial import initial_arrays
from parallm.types import Problem, Trajectory, TrajectoryGroup


def random_groups(layout: Layout, vocabulary: int) -> list[TrajectoryGroup]:
    """Groups of random tokens in which every other reward is 1."""
    random = np.random.default_rng(0)
    groups: list[TrajectoryGroup] = []
    for place, (num_prompt, completions) in enumerate(layout):
        prompt = tuple(random.integers(0, vocabulary, num_prompt).tolist())
        rows = tuple(
            Trajectory(
                problem_id=str(place),
                prompt_tokens=prompt,
                tokens=tuple(random.integers(0, vocabulary, length).tolist()),
                loss_mask=(True,) * length,
                logprobs=(-float(np.log(vocabulary)),) * length,
                temperature=1.0,
                weight_versions=(),
                reward_parts={},
                reward=float((place + index) % 2),
                text="",
                finish_reason="length",
            )
            for index, length in enumerate(completions)
        )
        groups.append(
            TrajectoryGroup(problem=Problem(problem_id=str(place), messages=(), answer=""), trajectories=rows)
        )
    return groups


def main(*, shape: str, groups: int, group_size: int, prompt: int, completion: int, repeats: int = 3) -> dict[str, Any]:
    model = random_model(SHAPES[shape])
    adapter = make_adapter(initial_arrays(model.targets, 16, mx.random.key(0)), version=0, rank=16, alpha=32.0)
    # advantages over the whole batch: a group of one has a signal, too, and the step ends with an optimizer step
    settings = LearnerSettings(advantage="reinforce_pp")
    streams = DeviceStreams(partial(set_blas_threads, bench.BLAS))
    learner = Learner(model, streams, settings, start=adapter, total_steps=10, seed=0)
    trained = random_groups([(prompt, [completion] * group_size)] * groups, SHAPES[shape]["vocab_size"])
    seconds: list[float] = []
    for step in range(repeats + 1):
        if step == 1:
            mx.reset_peak_memory()
        began = time.perf_counter()
        *_, report = learner.update(trained, step=step, max_tokens=completion)
        seconds.append(time.perf_counter() - began)
        assert report is not None
        assert report.skipped is None, report.skipped
    return {"seconds": seconds[1:], "peak_gb": mx.get_peak_memory() / 1e9}
