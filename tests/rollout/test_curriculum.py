import asyncio
import json
from collections import Counter
from collections.abc import Callable
from typing import Any, Literal

import pytest

from parallm.rollout.collector import Collector, RolloutBatch
from parallm.rollout.problems import Curriculum, ProblemCursor, ProblemStream
from parallm.rollout.settings import CurriculumSettings
from parallm.types import Message, Problem, TrajectoryGroup

PROBLEMS = [
    Problem(problem_id=f"p{place}", messages=(Message(role="user", content="?"),), answer="", level=place % 3)
    for place in range(30)
]


def curriculum_by(by: Literal["off", "problem", "level"], seed: int = 0, **values: Any) -> Curriculum:
    return Curriculum(ProblemCursor(ProblemStream(PROBLEMS, seed)), CurriculumSettings(by=by, **values), seed)


def learn(curriculum: Curriculum, rates: tuple[float, float, float]) -> None:
    """Show a group of each problem, solved at the rate of its level."""
    curriculum.learn([group_of(problem, rates[problem.level]) for problem in PROBLEMS])


def group_of(problem: Problem, solve_rate: float | None) -> TrajectoryGroup:
    return TrajectoryGroup(problem=problem, trajectories=(), solve_rate=solve_rate)


@pytest.mark.parametrize("by", ["problem", "level"])
def test_problems_that_are_too_easy_or_too_hard_are_drawn_less_often(by: Literal["problem", "level"]) -> None:
    curriculum = curriculum_by(by, keep=0.25)
    learn(curriculum, (0.0, 0.5, 1.0))
    counts = Counter(problem.level for problem in curriculum.take(600))
    assert counts[1] == pytest.approx(400, abs=40)  # 1 of 1 + 0.25 + 0.25
    assert counts[0] == pytest.approx(100, abs=30)
    assert counts[2] == pytest.approx(100, abs=30)
    assert curriculum.num_skipped == curriculum._problem_cursor.state()["cursor"] - 600


def test_before_anything_is_known_and_inside_the_limits_every_problem_is_drawn() -> None:
    curriculum = curriculum_by("problem")
    assert sorted(problem.problem_id for problem in curriculum.take(30)) == sorted(one.problem_id for one in PROBLEMS)
    learn(curriculum, (0.1, 0.5, 0.9))
    assert sorted(problem.problem_id for problem in curriculum.take(30)) == sorted(one.problem_id for one in PROBLEMS)


def test_off_draws_what_the_stream_draws_and_remembers_nothing() -> None:
    curriculum = curriculum_by("off")
    learn(curriculum, (0.0, 0.0, 1.0))
    assert curriculum.take(40) == [ProblemStream(PROBLEMS, 0).at(index) for index in range(40)]
    assert curriculum.state() == {"curriculum": {"by": "off", "rates": {}}}


def test_the_rate_is_that_of_the_last_groups() -> None:
    curriculum = curriculum_by("problem", window=2)
    assert curriculum.rate(PROBLEMS[0]) is None
    for rate in (1.0, 0.0, 0.5):
        curriculum.learn([group_of(PROBLEMS[0], rate)])
    assert curriculum.rate(PROBLEMS[0]) == 0.25
    curriculum.learn([group_of(PROBLEMS[0], None)])  # no completion could be scored
    assert curriculum.rate(PROBLEMS[0]) == 0.25


def test_levels_of_different_environments_have_rates_of_their_own() -> None:
    curriculum = curriculum_by("level")
    other = Problem(problem_id="x", messages=(), answer="", level=0, environment="other")
    curriculum.learn([group_of(PROBLEMS[0], 1.0)])
    assert (curriculum.rate(PROBLEMS[3]), curriculum.rate(other)) == (1.0, None)


def test_a_problem_that_is_solved_sometimes_again_comes_back() -> None:
    curriculum = curriculum_by("level", window=1)
    learn(curriculum, (0.5, 0.5, 1.0))
    learn(curriculum, (0.5, 0.5, 0.5))
    assert Counter(problem.level for problem in curriculum.take(30)) == {0: 10, 1: 10, 2: 10}


def test_a_restored_curriculum_draws_what_the_first_one_would_have_drawn() -> None:
    first, second, other = curriculum_by("problem"), curriculum_by("problem"), curriculum_by("problem", seed=1)
    learn(first, (0.0, 0.5, 1.0))
    first.take(17)
    first._problem_cursor.claim(0)
    first._problem_cursor.commit(0)
    state = json.loads(json.dumps(first.state() | first._problem_cursor.state()))
    expected = first.take(50)
    first.learn([group_of(PROBLEMS[0], 1.0)])  # the state is a copy
    for one in (second, other):
        one.restore(state)
        one._problem_cursor.restore(state)
    assert second.take(50) == expected != other.take(50)


def test_rates_of_another_kind_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    first, second = curriculum_by("problem"), curriculum_by("level")
    learn(first, (0.0, 0.5, 1.0))
    second.restore(first.state())
    assert second.state() == {"curriculum": {"by": "level", "rates": {}}}
    second.restore({})  # of a checkpoint without a curriculum
    assert "rollout.curriculum.by was problem and is level" in caplog.text


def test_problems_that_were_given_back_are_judged_again() -> None:
    curriculum = curriculum_by("level", keep=0.01)
    drawn = curriculum.take(6)
    curriculum._problem_cursor.claim(3)
    curriculum._problem_cursor.requeue([3])
    learn(curriculum, (0.0, 0.5, 0.5))
    assert curriculum.take(4)[:3] == [problem for problem in drawn if problem.level > 0][:3]


def test_the_groups_of_a_step_tell_the_curriculum_what_was_solved(make_collector: Callable[..., Collector]) -> None:
    collector = make_collector(
        "0", "2", "4", problems_per_step=3, refill_rounds=0, curriculum=CurriculumSettings(by="problem", keep=0.01)
    )

    async def collect_twice() -> tuple[RolloutBatch, RolloutBatch]:
        first = await collector.collect(0, "policy")
        collector.curriculum.learn(first.sampled)
        return first, await collector.collect(1, "policy")

    first, second = asyncio.run(collect_twice())
    assert collector.curriculum.state()["curriculum"]["rates"] == {"p0": [0.0], "p1": [0.5], "p2": [1.0]}
    assert (first.problems_skipped, second.problems_skipped > 3) == (0, True)
    assert {group.problem.problem_id for group in second.sampled} == {"p1"}
