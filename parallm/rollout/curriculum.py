"""Fewer draws of problems that the policy nearly always or nearly never solves. Used by `Collector`.

Such problems' groups have mostly equal rewards, which teach nothing.
"""

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from parallm.rollout.problems import ProblemCursor
from parallm.rollout.settings import CurriculumSettings
from parallm.seeds import mix
from parallm.types import Problem, TrajectoryGroup

logger = logging.getLogger(__name__)


class Curriculum:
    """Keeps solve rates and draws problems by them.

    A draw follows from the seed, the cursor's index and the rates. `state` is all there is to save.
    """

    def __init__(self, problem_cursor: ProblemCursor, settings: CurriculumSettings, seed: int) -> None:
        self._problem_cursor = problem_cursor
        self._settings = settings
        self._seed = seed
        self._rates: dict[str, deque[float]] = {}
        self.num_skipped = 0  # problems passed over since the start of this process

    def take(self, count: int) -> list[Problem]:
        """Draw the next `count` problems from the cursor, together with those that are passed over."""
        if self._settings.by == "off":
            return self._problem_cursor.take(count)
        return [self._next() for _ in range(count)]

    def learn(self, groups: Sequence[TrajectoryGroup]) -> None:
        """Add the solve rates of a finished step. An interrupted step must leave none, since it runs again."""
        for group in groups:
            if self._settings.by != "off" and group.solve_rate is not None:
                window = self._settings.window
                self._rates.setdefault(self._key(group.problem), deque(maxlen=window)).append(group.solve_rate)

    def rate(self, problem: Problem) -> float | None:
        """The solve rate that decides about `problem`; None before its first group."""
        rates = self._rates.get(self._key(problem))
        return fmean(rates) if rates else None

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint, as JSON."""
        rates = {key: list(rates) for key, rates in self._rates.items()}
        return {"curriculum": {"by": self._settings.by, "rates": rates}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore `state`. Rates of a curriculum by something else are dropped."""
        saved = state.get("curriculum", {"by": self._settings.by, "rates": {}})
        if saved["by"] != self._settings.by:
            logger.warning("rollout.curriculum.by was %s and is %s: it starts anew", saved["by"], self._settings.by)
            return
        window = self._settings.window
        self._rates = {key: deque(rates, maxlen=window) for key, rates in saved["rates"].items()}

    def _next(self) -> Problem:
        while True:  # ends, since each round keeps its problem with a probability of at least `keep`
            (problem,) = self._problem_cursor.take(1)
            dice = mix(self._seed, self._problem_cursor.last_index) / 2**64
            rate = self.rate(problem)
            if rate is None or self._settings.low <= rate <= self._settings.high or dice < self._settings.keep:
                return problem
            self.num_skipped += 1

    def _key(self, problem: Problem) -> str:
        if self._settings.by == "problem":
            return problem.problem_id
        return f"{problem.environment}/{problem.level}"
