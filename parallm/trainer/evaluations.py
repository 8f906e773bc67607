"""Evaluations of a run: when they are due, which version is the best, when patience is over. `Loop` calls it."""

import asyncio
import logging
import math
from collections.abc import Mapping
from typing import Any

from parallm.checkpoint.format import read_score, read_version
from parallm.errors import AdapterError, ConfigError, EnvironmentFailed, UnknownModel
from parallm.interrupts import unless
from parallm.model.adapters.adapter import Adapter
from parallm.model.adapters.names import of_alias
from parallm.model.adapters.table import AdapterTable
from parallm.reports import EvaluationReport
from parallm.trainer.context import TrainerContext
from parallm.trainer.settings import TrainerSettings
from parallm.types import BEST, LATEST

logger = logging.getLogger(__name__)


class Evaluations:
    """Evaluates on the asyncio thread, between two steps."""

    def __init__(self, context: TrainerContext, settings: TrainerSettings) -> None:
        """Raises ConfigError if the settings depend on evaluations and there are none."""
        if context.evaluator is None and (
            settings.patience or settings.keep_best or settings.publish_if == "evaluation"
        ):
            raise ConfigError(
                "trainer.patience, keep_best and publish_if=evaluation go by evaluations, and this run has none; set "
                "trainer.evaluate_problems above 0 and use an environment with a test split, or learner.data_held_out"
            )
        if settings.patience and not settings.evaluate_every:
            raise ConfigError(
                f"trainer.patience={settings.patience} counts evaluations between steps; set trainer.evaluate_every "
                "above 0, or trainer.patience=0"
            )
        self._context = context
        self._settings = settings
        self._best: float | None = None
        self._best_version: int | None = None  # the newest of equals
        self._since_best = 0  # evaluations in a row that were no better
        self._latest: EvaluationReport | None = None
        self._evaluated_step: int | None = None  # of the newest evaluation that was not dropped

    def is_due(self, step: int) -> bool:
        """Whether to evaluate after `step` finished steps."""
        every = self._settings.evaluate_every
        return step >= self._settings.steps or (every > 0 and step % every == 0)

    def is_missed(self, step: int) -> bool:
        """Whether the evaluation after `step` finished steps is due and was dropped or never begun."""
        return self.is_due(step) and self._evaluated_step != step

    @property
    def is_out_of_patience(self) -> bool:
        """Whether the last `trainer.patience` evaluations were no better than the best before them."""
        return 0 < self._settings.patience <= self._since_best

    def of(self, version: int) -> EvaluationReport | None:
        """Return the newest evaluation if it is of this version."""
        return self._latest if self._latest is not None and self._latest.version == version else None

    async def evaluate(
        self, step: int, stopped: asyncio.Event, *, is_requested: bool = False
    ) -> EvaluationReport | None:
        """Evaluate and report the newest version, and set the alias `best` to it if its score is the highest.

        The score is the accuracy, or the negative loss of held-out demonstrations. Returns None without an evaluator,
        and if `stopped` is set before the end. One that a client has requested costs no patience. Raises
        EnvironmentFailed if nothing can be scored before the first step.
        """
        if self._context.evaluator is None:
            return None
        version = self._context.learner.adapter.version
        model = of_alias(LATEST, self._context.policy)
        try:
            evaluation = await unless(
                stopped, self._context.evaluator.evaluate(step, version, model, self._context.display.progress)
            )
        except EnvironmentFailed as error:
            if step == 0:
                raise
            logger.error("after step %d there is no evaluation, and training goes on: %s", step, error)
            self._evaluated_step = step
            return None
        if evaluation is None:
            logger.warning("the evaluation after step %d was dropped, since the run is to stop", step)
            return None
        self._latest = report = evaluation.report
        self._evaluated_step = step
        self._context.recorder.evaluation(report, evaluation.completions)
        self._context.display.evaluation(report)
        self._rank(report, costs_patience=report.step > 0 and not is_requested)
        return report

    def _rank(self, report: EvaluationReport, *, costs_patience: bool) -> None:
        """Update best version and patience. The base cannot be best."""
        counts = report.version > 0 and math.isfinite(report.score)
        is_better = counts and (self._best is None or report.score > self._best)
        if is_better:
            self._since_best = 0
        elif costs_patience:
            self._since_best += 1
        if is_better or (counts and report.score == self._best):
            self._best, self._best_version = report.score, report.version
            self._mark_best(report.version)

    def _mark_best(self, version: int) -> None:
        try:
            self._context.adapters.set_alias(BEST, version, name=self._context.policy)
        except AdapterError as error:
            logger.error("version %d is the best so far and cannot be called so: %s", version, error)

    def score(self, step: int) -> float | None:
        """Score of the evaluation after `step` finished steps; None if there was none."""
        if self._latest is None or self._latest.step != step or not math.isfinite(self._latest.score):
            return None
        return self._latest.score

    def is_best(self, step: int) -> bool:
        """Whether the version after `step` finished steps was evaluated and is the best."""
        return self.score(step) is not None and self._context.learner.adapter.version == self._best_version

    def counters(self) -> dict[str, Any]:
        """Counters for a checkpoint."""
        return {
            "best": self._best,
            "best_version": self._best_version,
            "since_best": self._since_best,
            "evaluated_step": self._evaluated_step,
        }

    def resume_after(self, step: int, counters: Mapping[str, Any]) -> None:
        """Restore whether `step` was evaluated; older checkpoints do not say so, and theirs counts as evaluated."""
        self._evaluated_step = counters.get("evaluated_step", step)

    def resume(self, counters: Mapping[str, Any]) -> None:
        """Restore the best version, or the best saved one if it was not saved."""
        self._since_best = int(counters.get("since_best", 0))
        self._best, self._best_version = counters["best"], counters.get("best_version")
        if self._best_version is None:
            return
        if self._context.adapters.holds(self._context.policy, self._best_version):
            self._mark_best(self._best_version)
            return
        lost, score = self._best_version, self._best or 0.0
        self._best, self._best_version = self._best_saved()
        logger.warning(
            "version %d, the best so far with %s, was not saved; %s",
            lost,
            f"{100 * score:.1f}%" if score >= 0 else f"a loss of {-score:.3f}",
            "none is the best now" if self._best is None else f"the best is version {self._best_version} now",
        )

    def _best_saved(self) -> tuple[float | None, int | None]:
        path = self._context.checkpoints.best()
        version = None if path is None else read_version(path)
        if path is None or version is None or not self._context.adapters.holds(self._context.policy, version):
            return None, None
        return read_score(path), version


def final_adapter(adapters: AdapterTable, policy: str, keep_best: bool) -> Adapter | None:
    """The adapter that a run exports: the best version with `keep_best`, else the served one; None before the first.

    The served version is the newest unless trainer.publish_if holds it back.
    """
    if not keep_best:
        return adapters.resolve(policy)
    try:
        return adapters.resolve(of_alias(BEST, policy))
    except UnknownModel:
        logger.warning("trainer.keep_best: no version was evaluated, so the newest is kept")
        return adapters.resolve(policy)
