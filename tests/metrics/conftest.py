"""Reports with literal numbers, to be changed where a test needs others."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from parallm.metrics.step import StepMetrics
from parallm.reports import Estimate, EvaluationReport, ParityReport, RatioReport, UpdateReport

PARITY = ParityReport(num_tokens=100, bit_equal_fraction=1.0, mean_abs=0.0, max_abs=0.0)
UPDATE = UpdateReport(
    step=1,
    version=1,
    loss=0.02,
    gradient_norm=0.5,
    learning_rate=1e-4,
    clip_fraction=0.01,
    kl_to_behaviour=0.0004,
    entropy=0.9,
    num_tokens=800,
    seconds=1.5,
    parity=PARITY,
    ratio=RatioReport(num_tokens=700, mean=1.0, smallest=0.5, largest=1.75),
)
STEP = StepMetrics(
    step=1,
    reward_mean=0.25,
    reward_std=0.4,
    reward_parts={"correct": 0.25},
    groups_sampled=16,
    groups_with_signal=11,
    completion_length_mean=64.0,
    truncated_fraction=0.125,
    rollout_tokens=1000,
    rollout_seconds=2.0,
    update_seconds=1.75,
    total_seconds=4.0,
    rollout_tokens_per_second=500.0,
    serving_tokens_per_second=30.0,
    update=UPDATE,
)
EVALUATION = EvaluationReport(
    step=0,
    version=0,
    num_problems=512,
    accuracy=0.31,
    low=0.27,
    high=0.35,
    reward=Estimate(0.5, 0.45, 0.55),
    reward_parts={"correct": Estimate(0.31, 0.27, 0.35)},
)


@pytest.fixture
def step() -> Callable[..., StepMetrics]:
    """`step(7, reward_mean=0.5)`: step 7, made by the update to version 7."""

    def make(number: int, **changes: Any) -> StepMetrics:
        return replace(STEP, **{"step": number, "update": replace(UPDATE, step=number, version=number), **changes})

    return make


@pytest.fixture
def evaluation() -> Callable[..., EvaluationReport]:
    """`evaluation(20, accuracy=0.8)`: an evaluation after step 20."""

    def make(number: int, **changes: Any) -> EvaluationReport:
        return replace(EVALUATION, **{"step": number, "version": number, **changes})

    return make
