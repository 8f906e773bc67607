"""Drawn problems and their account, over four problems whose first epoch is the order of `order`."""

import json

import pytest

from parallm.rollout.ledger import Ledger
from parallm.rollout.problem_stream import ProblemStream
from parallm.types import Message, Problem


def stream() -> ProblemStream:
    problems = [
        Problem(problem_id=str(place), messages=(Message(role="user", content="?"),), answer="") for place in range(4)
    ]
    return ProblemStream(problems, seed=3)


@pytest.fixture
def order() -> list[str]:
    """What a cursor alone draws: three epochs."""
    return [problem.problem_id for problem in stream().take(12)]


@pytest.fixture
def ledger() -> Ledger:
    return Ledger(stream())


def draw(ledger: Ledger, step: int, count: int) -> list[str]:
    problems = ledger.take(count)
    ledger.claim(step)
    return [problem.problem_id for problem in problems]


def resumed(ledger: Ledger) -> Ledger:
    """What comes back from a checkpoint."""
    other = Ledger(stream())
    other.restore(json.loads(json.dumps(ledger.state())))
    return other


def test_one_step_after_the_other_draws_what_a_cursor_draws(ledger: Ledger, order: list[str]) -> None:
    drawn: list[str] = []
    for step in range(4):
        drawn += draw(ledger, step, 3)
        ledger.settle(step)
        ledger = resumed(ledger)
    assert drawn == order


def test_a_step_that_was_not_settled_draws_the_same_again(ledger: Ledger, order: list[str]) -> None:
    draw(ledger, 0, 3)
    ledger.settle(0)
    assert draw(ledger, 1, 4) == order[3:7]
    assert draw(resumed(ledger), 1, 4) == order[3:7]


def test_steps_that_draw_in_turns_lose_and_repeat_nothing(ledger: Ledger, order: list[str]) -> None:
    first, second = draw(ledger, 0, 2), draw(ledger, 1, 2)
    first += draw(ledger, 0, 1)  # a refill, after the next step has begun
    ledger.settle(0)
    second += draw(ledger, 1, 2)
    assert (first, second) == ([order[0], order[1], order[4]], [order[2], order[3], order[5], order[6]])
    later = resumed(ledger)
    assert draw(later, 1, 4) == second
    assert draw(later, 2, 5) == order[7:12]


def test_steps_are_given_back_in_their_order(ledger: Ledger, order: list[str]) -> None:
    for step in range(3):
        draw(ledger, step, 2)
    ledger.give_back([2, 1])
    assert draw(ledger, 1, 3) == order[2:5]
    assert draw(resumed(ledger), 1, 4) == [*order[0:4]]  # step 0 is open still, and so is the new step 1


def test_what_was_drawn_across_an_epoch_comes_back_too(ledger: Ledger, order: list[str]) -> None:
    draw(ledger, 0, 6)
    assert draw(resumed(ledger), 0, 8) == order[:8]


def test_a_checkpoint_with_a_cursor_alone_can_be_restored(order: list[str]) -> None:
    ledger = Ledger(stream())
    ledger.restore({"cursor": 5})
    assert draw(ledger, 0, 2) == order[5:7]
