"""Drawn problems and their account, over four problems whose first epoch is the order of `order`."""

import json

import pytest

from parallm.rollout.problems import ProblemCursor, ProblemStream
from parallm.types import Message, Problem


def stream() -> ProblemStream:
    problems = [
        Problem(problem_id=str(place), messages=(Message(role="user", content="?"),), answer="") for place in range(4)
    ]
    return ProblemStream(problems, seed=3)


@pytest.fixture
def order() -> list[str]:
    """What a cursor alone draws: three epochs."""
    return [stream().at(index).problem_id for index in range(12)]


@pytest.fixture
def problem_cursor() -> ProblemCursor:
    return ProblemCursor(stream())


def draw(problem_cursor: ProblemCursor, step: int, count: int) -> list[str]:
    problems = problem_cursor.take(count)
    problem_cursor.claim(step)
    return [problem.problem_id for problem in problems]


def resumed(problem_cursor: ProblemCursor) -> ProblemCursor:
    """What comes back from a checkpoint."""
    other = ProblemCursor(stream())
    other.restore(json.loads(json.dumps(problem_cursor.state())))
    return other


def test_one_step_after_the_other_draws_what_a_cursor_draws(problem_cursor: ProblemCursor, order: list[str]) -> None:
    drawn: list[str] = []
    for step in range(4):
        drawn += draw(problem_cursor, step, 3)
        problem_cursor.commit(step)
        problem_cursor = resumed(problem_cursor)
    assert drawn == order


def test_a_step_that_was_not_settled_draws_the_same_again(problem_cursor: ProblemCursor, order: list[str]) -> None:
    draw(problem_cursor, 0, 3)
    problem_cursor.commit(0)
    assert draw(problem_cursor, 1, 4) == order[3:7]
    assert draw(resumed(problem_cursor), 1, 4) == order[3:7]


def test_steps_that_draw_in_turns_lose_and_repeat_nothing(problem_cursor: ProblemCursor, order: list[str]) -> None:
    first, second = draw(problem_cursor, 0, 2), draw(problem_cursor, 1, 2)
    first += draw(problem_cursor, 0, 1)  # a refill, after the next step has begun
    problem_cursor.commit(0)
    second += draw(problem_cursor, 1, 2)
    assert (first, second) == ([order[0], order[1], order[4]], [order[2], order[3], order[5], order[6]])
    later = resumed(problem_cursor)
    assert draw(later, 1, 4) == second
    assert draw(later, 2, 5) == order[7:12]


def test_steps_are_given_back_in_their_order(problem_cursor: ProblemCursor, order: list[str]) -> None:
    for step in range(3):
        draw(problem_cursor, step, 2)
    problem_cursor.requeue([2, 1])
    assert draw(problem_cursor, 1, 3) == order[2:5]
    assert draw(resumed(problem_cursor), 1, 4) == [*order[0:4]]  # step 0 is open still, and so is the new step 1


def test_steps_that_drew_in_turns_are_given_back_as_they_drew(problem_cursor: ProblemCursor, order: list[str]) -> None:
    """A step that has not refilled yet leaves the same draws to come as one that has."""
    for step in (0, 1, 0):
        draw(problem_cursor, step, 2)
    later = resumed(problem_cursor)
    problem_cursor.requeue([0, 1])
    for cursor in (problem_cursor, later):
        assert draw(cursor, 2, 6) == order[:6]


def test_what_was_drawn_across_an_epoch_comes_back_too(problem_cursor: ProblemCursor, order: list[str]) -> None:
    draw(problem_cursor, 0, 6)
    assert draw(resumed(problem_cursor), 0, 8) == order[:8]


def test_a_checkpoint_with_a_cursor_alone_can_be_restored(order: list[str]) -> None:
    problem_cursor = ProblemCursor(stream())
    problem_cursor.restore({"cursor": 5})
    assert draw(problem_cursor, 0, 2) == order[5:7]
