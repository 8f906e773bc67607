"""A run that has learned nothing gets a word about it, and one that has learned does not."""

import random
from collections.abc import Sequence
from typing import Any

import pytest

from parallm.metrics.summary import flat_reward_advice


def rows(rewards: Sequence[float | None], *, delta: float = 0.01, signal: int = 8) -> list[dict[str, Any]]:
    return [
        {
            "step": step,
            "reward/mean": reward,
            "update/adapter_delta_norm": delta,
            "groups/sampled": 16,
            "groups/with_signal": signal,
        }
        for step, reward in enumerate(rewards, start=1)
    ]


def noisy(rise: float, *, count: int = 20, seed: int = 0) -> list[float]:
    chance = random.Random(seed)
    return [0.3 + rise * step / count + chance.gauss(0, 0.05) for step in range(count)]


def test_a_flat_reward_is_named_with_what_to_try() -> None:
    assert flat_reward_advice(rows([0.12, 0.1, 0.14, 0.12, 0.12, 0.1, 0.14, 0.12])) == (
        "the reward has not risen beyond its noise in 8 steps (0.110 in the first third, 0.130 in the last): read "
        "samples.jsonl, and try more steps, a higher learner.learning_rate, or more problems a step"
    )


def test_where_hardly_a_group_has_signal_the_problems_are_named() -> None:
    text = flat_reward_advice(rows([1.0] * 9, signal=1))
    assert text is not None
    assert text.endswith(
        "6.2% of the groups had completions with different rewards; choose problems that the model solves sometimes, "
        "or raise rollout.group_size or rollout.temperature"
    )


def test_a_fall_is_called_so() -> None:
    text = flat_reward_advice(rows(noisy(-0.4)))
    assert text is not None
    assert text.startswith("the reward has fallen in 20 steps (0.2")


@pytest.mark.parametrize("seed", range(20))
def test_a_clear_rise_is_seen_through_noise(seed: int) -> None:
    assert flat_reward_advice(rows(noisy(0.3, seed=seed))) is None


def test_noise_is_seldom_taken_for_a_rise() -> None:
    assert sum(flat_reward_advice(rows(noisy(0.0, seed=seed))) is None for seed in range(200)) <= 12


@pytest.mark.parametrize(
    "steps",
    [
        rows([0.1] * 5),
        rows([None] * 9),
        rows([0.1] * 9, delta=0.0),
        [{"step": 1, "update/loss": 2.0}] * 9,
        [],
        rows([0.1, 0.2, 0.3, 0.4, 0.5, 0.6]),
    ],
    ids=["short", "no rewards", "learning rate 0", "supervised", "none", "straight"],
)
def test_a_run_that_learned_or_was_not_to_is_told_nothing(steps: list[dict[str, Any]]) -> None:
    assert flat_reward_advice(steps) is None
