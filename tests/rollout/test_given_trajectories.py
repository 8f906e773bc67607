from dataclasses import replace
from typing import Any

import pytest

from parallm.errors import InvalidRequest
from parallm.learner.settings import Advantage
from parallm.rollout.given_trajectories import check_trajectories, groups_of, with_signal
from parallm.types import GivenTrajectory, WeightSpan


def given(reward: float, prompt: int = 1, **fields: Any) -> GivenTrajectory:
    one = GivenTrajectory(
        prompt_tokens=(prompt,),
        tokens=(2, 3),
        reward=reward,
        group=None,
        logprobs=None,
        weight_versions=(),
        loss_mask=(True, False),
        temperature=0.5,
        text="ab",
        finish_reason="length",
    )
    return replace(one, **fields)


def logprobs_of(*trajectories: GivenTrajectory) -> list[tuple[float, ...]]:
    return [one.logprobs or (-1.0, -2.0) for one in trajectories]


def span(version: int) -> tuple[WeightSpan, ...]:
    return (WeightSpan(version=version, start=0, end=2),)


def test_trajectories_are_grouped_by_their_group_or_their_prompt_and_keep_what_is_known() -> None:
    known = given(2.0, logprobs=(-0.5, -0.25), weight_versions=span(6))
    all_given = (given(0.0), given(1.0, prompt=5), known, given(3.0, group="a"), given(4.0, prompt=5, group="a"))
    groups = groups_of(all_given, logprobs_of(*all_given), 7)
    assert [group.rewards for group in groups] == [(0.0, 2.0), (1.0,), (3.0, 4.0)]
    first, second = groups[0].trajectories
    assert (first.logprobs, first.weight_versions) == ((-1.0, -2.0), span(7))
    assert (second.logprobs, second.weight_versions) == ((-0.5, -0.25), span(6))
    assert (first.loss_mask, first.temperature, first.reward_parts) == ((True, False), 0.5, {"reward": 0.0})


@pytest.mark.parametrize(
    ("advantage", "rewards", "num_trained"),
    [
        ("group_mean", ((0, 1), (1, 1)), 1),
        ("group_mean", ((1,), (0, 1)), 1),
        ("reinforce_pp", ((1,), (0,)), 2),
        ("reinforce_pp_baseline", ((0, 1), (1, 1)), 2),
        ("batch_std", ((0, 1), (1, 1)), 2),
        ("reward", ((1,), (0,)), 1),
    ],
)
def test_groups_are_trained_on_where_the_advantage_sees_a_difference(
    advantage: Advantage, rewards: tuple[tuple[float, ...], ...], num_trained: int
) -> None:
    all_given = [given(float(reward), prompt=place) for place, own in enumerate(rewards) for reward in own]
    assert len(with_signal(groups_of(all_given, logprobs_of(*all_given), 1), advantage)) == num_trained


@pytest.mark.parametrize(
    ("advantage", "rewards"),
    [("group_std", (1, 1)), ("group_mean", (1,)), ("reinforce_pp", (1, 1)), ("batch_std", (1, 1)), ("reward", (0,))],
)
def test_rewards_without_a_difference_teach_nothing_and_are_refused(
    advantage: Advantage, rewards: tuple[float, ...]
) -> None:
    all_given = [given(float(reward)) for reward in rewards]
    with pytest.raises(InvalidRequest, match=f"nothing to learn: learner.advantage={advantage}"):
        with_signal(groups_of(all_given, logprobs_of(*all_given), 1), advantage)


@pytest.mark.parametrize(
    ("one", "message"),
    [
        (given(1.0, prompt=100), "token ids of trajectories.1 must be from 0 to 99"),
        (given(1.0, tokens=(2, 100)), "token ids of trajectories.1"),
        (given(1.0, logprobs=(-1.0, -1.0), weight_versions=span(4)), "is of version 4 and the learner is at version 7"),
        (given(1.0, logprobs=(-1.0, -1.0), weight_versions=span(8)), "is of version 8"),
    ],
)
def test_what_the_learner_cannot_train_on_is_refused_by_its_place(one: GivenTrajectory, message: str) -> None:
    good = given(1.0, logprobs=(-1.0, -1.0), weight_versions=span(5))
    check_trajectories([good], version=7, limit=2, num_token_ids=100)
    with pytest.raises(InvalidRequest, match=message):
        check_trajectories([good, one], version=7, limit=2, num_token_ids=100)
