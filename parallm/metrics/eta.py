"""ETA of a run, from its remaining steps and evaluations and the duration of recent ones; progress of long work."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

from parallm.metrics.formatting import duration, number
from parallm.metrics.step import StepMetrics
from parallm.reports import EvaluationReport, TrainingStatus

NUM_RECENT = 10
SECONDS_PER_HOUR = 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Steps and evaluations of a run."""

    total_steps: int
    evaluate_every: int | None = None
    """Steps between evaluations; 0: only before the first and after the last step; None: no evaluations."""
    waits_for_others: bool = False
    """A step begins when clients or environments have brought enough for it, so the end of a run is unknown."""

    def has_evaluation(self, step: int) -> bool:
        """Whether an evaluation follows `step`."""
        if self.evaluate_every is None:
            return False
        return step >= self.total_steps or (self.evaluate_every > 0 and step % self.evaluate_every == 0)

    def evaluations_after(self, step: int) -> int:
        """The number of evaluations that follow steps after `step`."""
        if self.evaluate_every is None or step >= self.total_steps:
            return 0
        every = self.evaluate_every or self.total_steps
        return self.total_steps // every - step // every + (self.total_steps % every != 0)


class Eta:
    """An estimate that also falls between steps. Any thread may read its properties."""

    def __init__(self, schedule: Schedule | None, clock: Callable[[], float] = time.monotonic) -> None:
        """Without a schedule there is no estimate."""
        self._schedule = schedule
        self._clock = clock
        self._steps: tuple[float, ...] = ()  # seconds of the recent ones
        self._evaluations: tuple[float, ...] = ()
        self._done = 0
        self._evaluated: int | None = None
        self._began = clock()  # the step or evaluation at work
        self._is_evaluating = False

    def step(self, metrics: StepMetrics) -> None:
        self._steps = (*self._steps, metrics.total_seconds)[-NUM_RECENT:]
        self._done, self._began = metrics.step, self._clock()

    def phase(self, status: TrainingStatus) -> None:
        """Note a state of the trainer, which may come again."""
        if status.state == "evaluating" and not self._is_evaluating:
            self._is_evaluating, self._began = True, self._clock()

    def evaluation(self, report: EvaluationReport) -> None:
        if self._is_evaluating:
            self._evaluations = (*self._evaluations, self._clock() - self._began)[-NUM_RECENT:]
        self._evaluated, self._began, self._is_evaluating = report.step, self._clock(), False

    @property
    def seconds(self) -> float | None:
        """None before the first step, and where clients or environments decide when a step begins."""
        schedule = self._schedule
        if schedule is None or schedule.waits_for_others or not self._steps:
            return None
        one_step, one_evaluation = fmean(self._steps), fmean(self._evaluations) if self._evaluations else 0.0
        num_steps = max(0, schedule.total_steps - self._done)
        at_work = one_evaluation if self._is_evaluating else one_step if num_steps else 0.0
        spent = min(self._clock() - self._began, at_work)
        return max(0.0, num_steps * one_step + self._num_evaluations(schedule) * one_evaluation - spent)

    @property
    def fraction(self) -> float | None:
        """Share of the present step or evaluation by the duration of recent ones, below 1; None before the first."""
        recent = self._evaluations if self._is_evaluating else self._steps
        if not recent:
            return None
        return min((self._clock() - self._began) / max(fmean(recent), 1e-9), 0.99)

    @property
    def text(self) -> str:
        """Time left, or the rate of steps where the end is unknown; empty before the first step."""
        schedule, seconds = self._schedule, self.seconds
        if schedule is None or not self._steps:
            return ""
        if seconds is None:
            per_hour = SECONDS_PER_HOUR / max(fmean(self._steps), 1e-9)
            return f"{number(per_hour / 60)} steps/min" if per_hour >= 60 else f"{number(per_hour)} steps/h"
        # a resumed run that has not evaluated yet does not know how long an evaluation takes
        is_more = self._num_evaluations(schedule) > 0 and not self._evaluations
        return f"{'over ' if is_more else ''}{duration(seconds)} left"

    def _num_evaluations(self, schedule: Schedule) -> int:
        is_due = schedule.has_evaluation(self._done) and self._evaluated != self._done
        return schedule.evaluations_after(self._done) + is_due


SECONDS_BETWEEN = 10.0


class ThrottledProgress:
    """Shows progress every `SECONDS_BETWEEN`, and never of work that has just begun or has ended."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last_done: int | None = None
        self._spoke = 0.0

    def text(self, done: int, total: int) -> str:
        """`128 of 512`, or empty while it is too early for the next text."""
        if self._last_done is None or done <= self._last_done:  # other work
            self._spoke = self._clock()
        self._last_done = done
        if done >= total or self._clock() - self._spoke < SECONDS_BETWEEN:
            return ""
        self._spoke = self._clock()
        return f"{done} of {total}"
