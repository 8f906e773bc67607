"""Advantages by hand; those of TRL are in test_oracles.py."""

from typing import get_args

import numpy as np
import pytest

from parallm.errors import TrainingStopped
from parallm.learner.loss.advantage import advantages
from parallm.learner.settings import Advantage

KINDS: tuple[Advantage, ...] = tuple(kind for kind in get_args(Advantage) if kind != "reward")  # those that compare
OF_A_GROUP: tuple[Advantage, ...] = ("group_mean", "group_std", "rloo", "max_rl")


def one_group(kind: Advantage, *rewards: float) -> list[float]:
    found: list[float] = advantages(kind, [rewards], [1] * len(rewards)).tolist()
    return found


def test_advantages_are_relative_to_the_group() -> None:
    assert one_group("group_mean", 1, 0) == [0.5, -0.5]
    assert advantages("group_mean", [[1, 0], [4, 4, 1]], [1] * 5).tolist() == [0.5, -0.5, 1, 1, -2]


def test_rloo_compares_with_the_others() -> None:
    assert one_group("rloo", 1, 0, 0, 0) == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3])


def test_the_reward_itself_is_compared_with_nothing() -> None:
    assert one_group("reward", 1, 0, -2) == [1, 0, -2]
    assert one_group("reward", 1) == [1]


def test_max_rl_divides_by_the_share_that_is_solved() -> None:
    assert one_group("max_rl", 1, 0, 0, 0) == [3, -1, -1, -1]
    assert one_group("max_rl", 1, 1, 1, 0) == pytest.approx([1 / 3, 1 / 3, 1 / 3, -1])


def test_max_rl_refuses_negative_rewards() -> None:
    with pytest.raises(TrainingStopped, match=r"rewards of 0 or more, got -0\.5; choose learner\.advantage"):
        one_group("max_rl", 1, -0.5)


def test_reinforce_pp_whitens_over_tokens() -> None:
    found = advantages("reinforce_pp", [[1, 0], [0, 0]], [3, 1, 1, 1])  # rewards 1 1 1 0 0 0 by token
    assert found.tolist() == pytest.approx([1, -1, -1, -1], abs=3e-4)


def test_reinforce_pp_with_a_baseline_takes_off_the_mean_of_the_group_first() -> None:
    found = advantages("reinforce_pp_baseline", [[5, 4], [1, 0]], [2, 2, 2, 2])
    assert found.tolist() == pytest.approx([1, -1, 1, -1], abs=3e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_equal_rewards_have_no_advantage(kind: Advantage) -> None:
    assert one_group(kind, *[0.5] * 8) == [0.0] * 8
    assert one_group(kind, *[0.0] * 8) == [0.0] * 8
    assert one_group(kind, *[0.1] * 3) == [0.0] * 3, "exactly, where the mean is rounded"


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_of_one_has_nothing_to_be_compared_with(kind: Advantage) -> None:
    assert one_group(kind, 3.0) == [0.0]


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("kind", KINDS)
def test_a_reward_that_is_not_finite_leaves_no_advantage_of_its_group_finite(kind: Advantage, reward: float) -> None:
    found = advantages(kind, [[1.0, reward, 0.0], [1.0, 0.0]], [1] * 5)
    assert np.isnan(found[:3]).all()
    assert np.isfinite(found[3:]).all() == (kind in OF_A_GROUP)


def test_no_groups_have_no_advantages() -> None:
    assert advantages("batch_std", [], []).tolist() == []
