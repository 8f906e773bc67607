"""Ages of tokens, from spans of versions and loss masks."""

import pytest

from parallm.rollout.staleness import is_stale, off_policy_report
from parallm.types import Message, Problem, Trajectory, TrajectoryGroup, WeightSpan

Spans = tuple[tuple[int, int], ...]


def group_of(*completions: Spans, mask: tuple[bool, ...] | None = None) -> TrajectoryGroup:
    """Completions given as (version, number of tokens) for each span."""
    problem = Problem(problem_id="p", messages=(Message(role="user", content="?"),), answer="")
    return TrajectoryGroup(problem=problem, trajectories=tuple(trajectory(spans, mask) for spans in completions))


def trajectory(spans: Spans, mask: tuple[bool, ...] | None) -> Trajectory:
    made, start = [], 0
    for version, length in spans:
        made.append(WeightSpan(version=version, start=start, end=start + length))
        start += length
    return Trajectory(
        problem_id="p",
        prompt_tokens=(1,),
        tokens=(5,) * start,
        loss_mask=mask or (True,) * start,
        logprobs=(-1.0,) * start,
        temperature=1.0,
        weight_versions=tuple(made),
        reward_parts={},
        reward=0.0,
        text="",
        finish_reason="stop",
    )


def test_lags_are_weighted_by_tokens() -> None:
    report = off_policy_report([group_of(((4, 3),), ((3, 2), (4, 1))), group_of(((2, 2),))], version=4, dropped=1)
    assert report.lag_mean == pytest.approx((3 * 0 + 2 * 1 + 1 * 0 + 2 * 2) / 8)
    assert (report.lag_max, report.dropped) == (2, 1)


def test_tokens_that_are_not_trained_on_have_no_age() -> None:
    group = group_of(((1, 2), (4, 1)), mask=(False, False, True))
    assert off_policy_report([group], version=4, dropped=0).lag_max == 0
    assert not is_stale(group.trajectories, version=4, limit=0)


def test_no_groups_have_no_age() -> None:
    report = off_policy_report([], version=4, dropped=0)
    assert (report.lag_mean, report.lag_max) == (0.0, 0)


@pytest.mark.parametrize(("limit", "stale"), [(0, True), (1, True), (2, False), (3, False)])
def test_one_token_beyond_the_limit_makes_its_group_stale(limit: int, stale: bool) -> None:
    group = group_of(((4, 5),), ((2, 1), (4, 8)))
    assert is_stale(group.trajectories, version=4, limit=limit) is stale


def test_a_version_that_is_yet_to_come_is_stale() -> None:
    assert is_stale(group_of(((5, 1),)).trajectories, version=4, limit=9)
