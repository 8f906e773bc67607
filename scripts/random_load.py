"""Random prompts and arrivals: what both sides of a comparison are asked for. Imports no MLX."""

from dataclasses import dataclass, replace

import numpy as np
from shapes import EngineJob

Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A request of the mixed load."""

    seconds: float
    """After the first one."""
    prompt: Tokens
    num_new: int


def random_prompts(vocabulary: int, rows: int, length: int, seed: int) -> list[Tokens]:
    tokens_BT = np.random.default_rng(seed).integers(0, vocabulary, (rows, length))
    return [tuple(tokens) for tokens in tokens_BT.tolist()]


def random_arrivals(job: EngineJob, vocabulary: int, seed: int) -> list[Arrival]:
    """A Poisson process with `job.per_second`."""
    random = np.random.default_rng(seed)
    seconds = np.cumsum(random.exponential(1 / job.per_second, job.requests))
    prompts = _lengths(random, job.prompts, job.requests)
    outputs = _lengths(random, job.outputs, job.requests)
    return [
        Arrival(
            seconds=float(second - seconds[0]),
            prompt=tuple(random.integers(0, vocabulary, length).tolist()),
            num_new=num_new,
        )
        for second, length, num_new in zip(seconds, prompts, outputs, strict=True)
    ]


def random_storm(job: EngineJob, vocabulary: int, seed: int) -> list[Arrival]:
    """Short requests that come at the same time."""
    short = replace(job, prompts=job.storm_prompts, outputs=job.storm_outputs)
    return [replace(one, seconds=0.0) for one in random_arrivals(short, vocabulary, seed)]


def _lengths(random: np.random.Generator, bounds: tuple[int, int], count: int) -> list[int]:
    low, high = np.log(bounds)
    found: list[int] = np.exp(random.uniform(low, high, count)).round().astype(int).tolist()
    return found
