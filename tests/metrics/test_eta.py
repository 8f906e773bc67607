"""The time left that a display shows, and progress of long work."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from parallm.metrics.eta import Eta, Schedule, ThrottledProgress
from parallm.metrics.step import StepMetrics
from parallm.reports import EvaluationReport, TrainingStatus

EVALUATING, COLLECTING = TrainingStatus(state="evaluating"), TrainingStatus(state="collecting")
MakeStep = Callable[..., StepMetrics]
MakeEvaluation = Callable[..., EvaluationReport]


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def after_an_evaluation_and(
    steps: int, schedule: Schedule, clock: Clock, step: MakeStep, evaluation: MakeEvaluation
) -> Eta:
    """Ten seconds for the evaluation before the first step, and two for each step."""
    left = Eta(schedule, clock)
    left.phase(EVALUATING)
    clock.now += 10
    left.evaluation(evaluation(0))
    for number in range(1, steps + 1):
        left.phase(COLLECTING)
        clock.now += 2
        left.step(step(number, total_seconds=2.0))
    return left


@pytest.mark.parametrize(
    ("total", "every", "step", "expected"),
    [(4, 2, 0, 2), (4, 2, 1, 2), (4, 2, 2, 1), (5, 2, 0, 3), (5, 2, 4, 1), (5, 0, 0, 1), (5, 0, 4, 1), (5, 2, 5, 0)],
)
def test_evaluations_to_come_are_those_between_steps_and_the_last(
    total: int, every: int, step: int, expected: int
) -> None:
    schedule = Schedule(total_steps=total, evaluate_every=every)
    assert schedule.evaluations_after(step) == expected
    assert expected == sum(schedule.has_evaluation(later) for later in range(step + 1, total + 1))


def test_evaluations_count_before_and_while_they_run(step: MakeStep, evaluation: MakeEvaluation) -> None:
    clock = Clock()
    left = after_an_evaluation_and(3, Schedule(total_steps=4, evaluate_every=2), clock, step, evaluation)
    left.evaluation(evaluation(2))
    assert left.seconds == pytest.approx(2 + 10)
    left.step(step(4, total_seconds=2.0))
    assert left.text == "10 s left", "the last step is done and its evaluation is not"
    left.phase(EVALUATING)
    clock.now += 4
    assert left.seconds == pytest.approx(6)
    clock.now += 60
    assert left.text == "0.0 s left"
    left.evaluation(evaluation(4))
    assert left.seconds == 0


def test_the_estimate_goes_down_within_a_step_and_not_below_the_steps_after_it(
    step: MakeStep, evaluation: MakeEvaluation
) -> None:
    clock = Clock()
    left = after_an_evaluation_and(1, Schedule(total_steps=10), clock, step, evaluation)
    assert left.seconds == pytest.approx(18)
    clock.now += 1.5
    assert left.seconds == pytest.approx(16.5)
    clock.now += 100
    assert left.seconds == pytest.approx(16)


def test_a_resumed_run_that_has_seen_no_evaluation_says_that_it_takes_longer(step: MakeStep) -> None:
    left = Eta(Schedule(total_steps=10, evaluate_every=0), Clock())
    left.step(step(8, total_seconds=3.0))
    assert left.text == "over 6.0 s left"


def test_nothing_is_said_before_the_first_step_and_without_a_schedule(step: MakeStep) -> None:
    assert Eta(Schedule(total_steps=10), Clock()).text == ""
    serving = Eta(None, Clock())
    serving.step(step(1))
    assert (serving.text, serving.seconds) == ("", None)


@pytest.mark.parametrize(("seconds", "text"), [(900.0, "4.00 steps/h"), (3.0, "20.0 steps/min")])
def test_where_others_decide_when_a_step_begins_its_rate_is_said(seconds: float, text: str, step: MakeStep) -> None:
    left = Eta(Schedule(total_steps=1000, waits_for_others=True), Clock())
    left.step(step(1, total_seconds=seconds))
    assert (left.text, left.seconds) == (text, None)


def test_progress_is_told_every_ten_seconds() -> None:
    now = 100.0
    seldom = ThrottledProgress(lambda: now)
    assert seldom.text(1, 512) == ""
    now = 109.0
    assert seldom.text(60, 512) == ""
    now = 110.5
    assert seldom.text(70, 512) == "70 of 512"
    assert seldom.text(71, 512) == ""
    now = 121.0
    assert seldom.text(512, 512) == ""


def test_other_work_begins_anew() -> None:
    now = 0.0
    seldom = ThrottledProgress(lambda: now)
    seldom.text(5, 8)
    now = 60.0
    assert seldom.text(1, 8) == ""
    now = 71.0
    assert seldom.text(2, 8) == "2 of 8"
