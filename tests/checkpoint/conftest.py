from collections.abc import Callable

import mlx.core as mx
import pytest

from parallm.checkpoint.state import Fingerprint, TrainingState
from parallm.model.adapters.adapter import make_adapter

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
        counters={"cursor": 17, "random_state": {"state": 2**100 + step, "words": [1, 2]}, "mean": 0.1 + 0.2},
        score=score,
        fingerprint=Fingerprint(
            model="nano", model_sha256="ab" * 32, num_layers=1, rank=rank, alpha=5.0, targets=(SITE,)
        ),
    )
