"""Groups of made-up trajectories over the vocabulary of the small models, and adapters that change what they do."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import pytest

from parallm.learner.learner import GraphBuilder
from parallm.model.adapters.adapter import Adapter, make_adapter
from parallm.model.adapters.initial import initial_arrays
from parallm.model.shared_model import SharedModel
from parallm.types import Message, Problem, Trajectory, TrajectoryGroup, WeightSpan
from tests.model.kernels.flash_emulation import fake_kernel

VOCABULARY_SIZE = 385


@pytest.fixture
def make_start() -> Callable[..., Adapter]:
    """An adapter with products that are not zero: `make_start(model, dropout=0.1)`."""
    return build_start


@pytest.fixture
def make_group() -> Callable[..., TrajectoryGroup]:
    """A group with one trajectory per length; log-probs are made up, so ratios differ from 1."""
    return build_group


def build_start(model: SharedModel, *, rank: int = 4, dropout: float = 0.0) -> Adapter:
    arrays = initial_arrays(model.targets, rank, mx.random.key(1))
    keys = mx.random.split(mx.random.key(2), len(arrays))
    for key, name in zip(keys, sorted(arrays), strict=True):
        if name.endswith("lora_b"):
            arrays[name] = 0.05 * mx.random.normal(arrays[name].shape, key=key)
    return make_adapter(arrays, version=3, rank=rank, alpha=8.0, dropout=dropout)


def build_group(
    seed: int, lengths: Sequence[int], rewards: Sequence[float], *, prompt_length: int = 9, logprob: float | None = None
) -> TrajectoryGroup:
    chance = random.Random(seed)
    prompt = tuple(chance.randrange(VOCABULARY_SIZE) for _ in range(prompt_length))
    trajectories = [
        build_trajectory(chance, prompt, length, reward, logprob)
        for length, reward in zip(lengths, rewards, strict=True)
    ]
    problem = Problem(problem_id=f"p{seed}", messages=(Message(role="user", content="?"),), answer="")
    return TrajectoryGroup(problem=problem, trajectories=tuple(trajectories))


def build_trajectory(
    chance: random.Random, prompt: tuple[int, ...], length: int, reward: float, logprob: float | None
) -> Trajectory:
    return Trajectory(
        problem_id="p",
        prompt_tokens=prompt,
        tokens=tuple(chance.randrange(VOCABULARY_SIZE) for _ in range(length)),
        loss_mask=tuple(place != 2 for place in range(length)),  # the third token is not the policy's
        logprobs=tuple(chance.uniform(-9, -5) if logprob is None else logprob for _ in range(length)),
        temperature=chance.choice((0.7, 1.0, 1.3)),
        weight_versions=(WeightSpan(version=3, start=0, end=length),),
        reward_parts={},
        reward=reward,
        text="",
        finish_reason="stop",
    )


@pytest.fixture
def fused_rows(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Passes as on a GPU: layers attend by numpy's flash attention, in any dtype. Returns the names of the launches."""
    launches: list[str] = []

    def kernel(name: str, *arguments: Any, **options: Any) -> Any:
        launches.append(name)
        return fake_kernel(name, *arguments, **options)

    for module in ("packing", "lm_head"):
        monkeypatch.setattr(f"parallm.learner.passes.{module}.has_kernels", lambda: True)
    monkeypatch.setattr("parallm.learner.passes.packing.fits", lambda *_: True)
    monkeypatch.setattr(
        "parallm.learner.passes.packing.before_rotation", lambda queries, keys, *_: (queries, keys, None)
    )
    monkeypatch.setattr("parallm.model.kernels.flash_attention.kernel", kernel)
    # numpy evaluates what a graph is built of, which only this thread may
    monkeypatch.setattr(GraphBuilder, "build_during", lambda _, build, launch: (launch(), build())[1])
    return launches
