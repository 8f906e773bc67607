"""Gradients of steps of one and of many passes, and what counts as a copy."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from parallm.device.streams import DeviceStreams
from parallm.learner.passes.batch import make_passes
from parallm.learner.settings import LearnerSettings
from parallm.model.lora.dora import lora_scaling
from parallm.model.shared_model import SharedModel
from parallm.tasks.encoder_learner import EmbeddingLearner, copies, in_order, rows_of
from parallm.types import Problem, TaskSpec, Trajectory, TrajectoryGroup
from tests.learner.conftest import build_start

GROUPS = [(5, 9), (3, 7, 4), (12, 2), (6, 6)]
"""Lengths of the texts of each group."""


def group(*rows: tuple[int, ...]) -> TrajectoryGroup:
    texts = tuple(
        Trajectory(
            problem_id="a",
            prompt_tokens=(),
            tokens=row,
            loss_mask=(True,) * len(row),
            logprobs=(0.0,) * len(row),
            temperature=1.0,
            weight_versions=(),
            reward_parts={},
            reward=0.0,
            text="",
            finish_reason="stop",
        )
        for row in rows
    )
    return TrajectoryGroup(problem=Problem(problem_id="a", messages=(), answer=""), trajectories=texts)


def test_copies_of_right_documents_are_found() -> None:
    groups = [group((1,), (2,), (9,)), group((3,), (2,)), group((1,), (4,), (2,))]
    columns = [[False, True, True, False, True], [True, False, False, False, True], [True, True, False, False, True]]
    assert np.array(copies(groups)).tolist() == columns


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_a_step_of_many_passes_has_the_gradient_of_their_common_loss(
    load_tiny: Callable[[str], SharedModel],
    streams: DeviceStreams,
    monkeypatch: pytest.MonkeyPatch,
    dropout: float,
) -> None:
    model = load_tiny("qwen3")
    coin = np.random.default_rng(0)
    groups = [group(*(tuple(coin.integers(1, 50, length).tolist()) for length in lengths)) for lengths in GROUPS]
    spec = TaskSpec(pooling=("mean",), dimensions=(8,), source="test")
    start = replace(build_start(model, dropout=dropout), task=spec)
    settings = LearnerSettings(trains="embedding", micro_batch_tokens=16)
    learner = EmbeddingLearner(model, streams, settings, start=start, total_steps=2, seed=0)
    found: list[mx.array] = []
    compute = learner.compute_step

    def keep(gradient_N: mx.array, step: int) -> Any:
        found.append(gradient_N)
        return compute(gradient_N, step)

    monkeypatch.setattr(learner, "compute_step", keep)
    *rounds, report = learner.update(groups, step=1, max_tokens=1)
    assert report is not None
    assert len(rounds) >= 4  # two or more of each kind
    loss, expected = whole(learner, start.arrays, groups)
    assert report.loss == pytest.approx(loss, rel=1e-5)
    assert float(mx.linalg.norm(found[0] - expected).item()) < 1e-5 * float(mx.linalg.norm(expected).item())
    other = whole(learner, start.arrays, groups[:3])[1]
    assert float(mx.linalg.norm(found[0] - other).item()) > 1e-2 * float(mx.linalg.norm(expected).item())


def whole(learner: Any, arrays: Any, groups: list[TrajectoryGroup]) -> tuple[float, mx.array]:
    """Loss and gradient of one graph through all passes, with the same keys for the dropout."""
    rows, scaling = rows_of(groups), lora_scaling(learner.adapter, learner._model)
    rounds = list(learner._rounds_of(make_passes([len(row) for row in rows], 16, learner._streams.width), 1))

    def mean_loss(traced: Any) -> mx.array:
        parts = [part for passes, key in rounds for part in learner._numbers(rows, passes, traced, scaling, key)]
        numbers_SD = in_order(parts, [passes for passes, _ in rounds])
        return learner.losses(groups, rows, numbers_SD).mean()

    loss, gradient = mx.value_and_grad(mean_loss)(dict(arrays))
    return float(loss.item()), learner.layout.join(gradient)
