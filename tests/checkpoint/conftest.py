from collections.abc import Callable

import mlx.core as mx
import pytest

from parallm.checkpoint.state import Fingerprint, TrainingState
from parallm.model.adapters.adapter import make_adapter
from parallm.types import Message, Problem, Trajectory, TrajectoryGroup, WeightSpan

SITE = "model.layers.0.self_attn.q_proj"


@pytest.fixture
def make_state() -> Callable[..., TrainingState]:
    """Builds the state after a step, which its arrays follow from; `rank` and `score` can be chosen."""
    return build_state


def build_state(step: int, *, score: float | None = None, rank: int = 2) -> TrainingState:
    key = mx.random.key(step)
    a, b, moment = (mx.random.normal(shape, key=key) for shape in ((64, rank), (rank, 32), (64, rank)))
    arrays = {f"{SITE}.lora_a": a, f"{SITE}.lora_b": b}
    return TrainingState(
        step=step,
        version=step,
        adapter=make_adapter(arrays, version=step, parent=step - 1, step=step, rank=rank, alpha=5.0),
        optimizer={f"{SITE}.lora_a.m": moment, "step": mx.array(step, mx.uint64), "half": moment.astype(mx.bfloat16)},
        schedule_step=step,
        counters={"cursor": 17, "random_state": {"state": 2**100 + step, "words": [1, 2]}, "mean": 0.1 + 0.2},
        groups=(group(step), group(step + 1)),
        score=score,
        fingerprint=Fingerprint(
            model="nano", model_sha256="ab" * 32, num_layers=1, rank=rank, alpha=5.0, targets=(SITE,)
        ),
    )


def group(step: int) -> TrajectoryGroup:
    problem = Problem(
        problem_id=f"p{step}", messages=(Message(role="user", content="2 + 2?\n\u2028"),), answer="4", level=1
    )
    return TrajectoryGroup(problem=problem, trajectories=(trajectory(step, 0.0), trajectory(step, 1.0)))


def trajectory(step: int, reward: float) -> Trajectory:
    return Trajectory(
        problem_id=f"p{step}",
        prompt_tokens=(1, 2, 3),
        tokens=(4, 5),
        loss_mask=(True, False),
        logprobs=(-0.1234567891234567, -1e-30),
        temperature=1.0,
        weight_versions=(WeightSpan(version=step, start=0, end=2),),
        reward_parts={"correct": reward, "format": 0.5},
        reward=reward,
        text="\u00e9 #### 4\n",
        finish_reason="stop",
    )
