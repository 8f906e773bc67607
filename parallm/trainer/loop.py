"""The base class of all trainers: step after step, evaluate, save, and save finished steps whatever happens.

It decides the order; `trainer`, `live_trainer` and `supervised_trainer` get the groups of a step.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from parallm.checkpoint.state import TrainingState
from parallm.errors import CheckpointError, TrainingStopped, Unavailable
from parallm.learner.learner import Learner
from parallm.metrics.step import StepMetrics
from parallm.model.adapters.adapter import Adapter
from parallm.reports import EvaluationReport, State, TrainingStatus, UpdateReport
from parallm.trainer.context import TrainerContext
from parallm.trainer.evaluations import Evaluations
from parallm.trainer.guard import Guard, Verdict
from parallm.trainer.publication import Publication
from parallm.trainer.recovery import Recovery
from parallm.trainer.saving import Saver
from parallm.trainer.settings import TrainerSettings
from parallm.types import BEST, TrajectoryGroup

logger = logging.getLogger(__name__)


class Loop(ABC):
    """Runs on the asyncio thread; work on arrays goes to the device thread.

    Loop contract: consumes the groups of each step / waits for its update / produces adapter versions, metrics and
    checkpoints / ends after the last step, when patience is over, after `stop`, or with an error.
    """

    def __init__(self, context: TrainerContext, settings: TrainerSettings) -> None:
        self._context = context
        self._settings = settings
        self._evaluations = Evaluations(context, settings)
        self._publication = Publication(context.adapters, context.policy, settings)
        self._guard = Guard(settings.guard, compares=context.learner.adapter.dropout == 0)
        self._recovery = Recovery(context, self._guard, self._publication)
        self._saver = Saver(context.device, context.checkpoints, self._state, on_save=self._on_save)
        self.pacing = context.make_pacing(self._save_now, self._evaluate_now)
        self._step = 0  # finished steps
        self._version = context.learner.adapter.version  # after the last finished step
        self._has_updated = False  # within the unfinished step, which may leave the version as it is
        self.status = TrainingStatus(state="starting", total_steps=settings.steps)

    @abstractmethod
    async def _one_step(self) -> Verdict:
        """Run one step from its groups to `_finish`; returns the guard's verdict."""

    def _counters(self) -> Mapping[str, Any]:
        """The subclass's own counters for a checkpoint."""
        return {}

    def _is_ready(self) -> bool:
        """Whether there are groups to train on; overridden by trainers that wait for them."""
        return True

    def _missing(self) -> str:
        """Why no step begins before clients send more; empty if one may begin by itself. Called if not ready."""
        return ""

    def _on_save(self, step: int) -> None:  # noqa: B027  # most loops need not know
        """Called when a checkpoint holds all steps up to `step`."""

    async def _give_up_work_ahead(self) -> None:  # noqa: B027  # most loops have none
        """Cancel sampling for later steps: the run ends, or the sampling version was rolled back."""

    def resume(self, state: TrainingState) -> None:
        """Resume after `state`; the device thread has restored adapter and optimizer already."""
        self._step = self._saver.saved_step = state.step
        self._version = state.version
        if state.step >= (steps := self._settings.steps):
            logger.warning("step %d is done, so nothing is left with trainer.steps=%d; raise it", state.step, steps)
        counters = dict(state.counters)
        self._evaluations.resume_after(state.step, counters)
        if not self._context.facts.draws_same_problems(state.facts):
            logger.warning("the problems or their order are not those of step %d: they begin anew", state.step)
        if self._context.facts.scores_same_problems(state.facts):
            self._evaluations.resume(counters)
            self._guard.resume(counters["guard"])
        else:
            logger.warning("rewards of other problems are not compared: what is best begins anew")
            counters["publication"] = {**counters["publication"], "best": None}
        self._publication.resume(counters["publication"], BEST)

    def renumbered(self, adapter: Adapter) -> None:
        """Called after the learner gave its newest version this higher number."""
        self._version = adapter.version
        self._publication.renumbered(adapter)

    def stop(self) -> None:
        """Finish the present step, or drop the present evaluation; save and leave."""
        self.pacing.stop()

    @property
    def was_stopped(self) -> bool:
        return self.pacing.stopping.is_set()

    @property
    def num_saves(self) -> int:
        """Checkpoints that this process has written."""
        return self._saver.num_saves

    async def run(self) -> None:
        """Train to the end. Raises TrainingStopped, and any error of a step, after saving the finished steps."""
        try:
            await self._run()
        except Exception as error:
            if not isinstance(error, CheckpointError):
                await self._rescue()
            self._set("failed", message=str(error))
            raise
        finally:
            self.pacing.end()
        self._set("finished")

    async def _run(self) -> None:
        if self._step == 0:
            await self._evaluate()
        elif self._evaluations.is_missed(self._step):
            await self._make_up_evaluation()
        try:
            while not self._is_over():
                await self.pacing.before_step(self._is_over, self._wait, self._is_ready)
                if not self._is_over():
                    await self._step_and_save()
            await self.pacing.after_last_step()
        finally:
            await self._give_up_work_ahead()
        if self._saver.saved_step < self._step:
            self._set("saving")
            await self._saver.save()

    async def _make_up_evaluation(self) -> None:
        """Evaluate the step that the run resumes after, and save it again with its score."""
        if await self._evaluate() is None:
            return
        self._saver.mark_outdated()  # the end of the run saves it, if the run is over
        if not self._is_over():
            self._set("saving")
            await self._saver.try_save()

    def _wait(self) -> None:
        state: State = "paused" if self.pacing.is_paused else "collecting"
        if self.status.state != state:
            self._set(state)
        if self.pacing.awaits_step and (missing := self._missing()):
            self.pacing.refuse_steps(missing)

    async def _step_and_save(self) -> None:
        verdict = await self._one_step()
        if verdict.action == "stop":
            raise TrainingStopped(verdict.reason)
        if self._evaluations.is_due(self._step):
            await self._evaluate()
        is_kept = self._settings.keep_best and self._evaluations.is_best(self._step)
        if (self._saver.is_due(self._step) or is_kept) and not self._is_over():
            self._set("saving")
            await self._saver.try_save()

    def _is_over(self) -> bool:
        return self.was_stopped or self._step >= self._settings.steps or self._evaluations.is_out_of_patience

    async def update_between_steps(
        self, groups: Sequence[TrajectoryGroup], *, max_tokens: int, serve: bool | None
    ) -> UpdateReport:
        """Train on `groups` without counting a step, between steps."""
        self._set("updating")
        report = await self._update(groups, max_tokens=max_tokens, serve=serve)
        self._version, self._has_updated = self._context.learner.adapter.version, False
        if report.skipped is None:
            self._saver.mark_outdated()
        return report

    def check_name(self, name: str) -> None:
        """Raise InvalidRequest if no checkpoint can be saved under this name."""
        self._context.checkpoints.check_name(name)

    async def save_as(self, name: str) -> Path:
        """Save as a named checkpoint, between steps. Raises CheckpointError."""
        self._set("saving")
        return await self._saver.save_as(name)

    async def _update(
        self, groups: Sequence[TrajectoryGroup], *, max_tokens: int, serve: bool | None = None
    ) -> UpdateReport:
        """Train on `groups` and publish the new version if any weight has moved. `serve`: see `Publication.publish`."""
        report = await asyncio.wrap_future(self._context.device.iterate(self._units(groups, max_tokens)))
        assert report is not None, "an update ends with its report"
        if self._context.rollouts is not None and isinstance(self._context.learner, Learner):
            self._context.rollouts.take(self._context.learner, groups)
        self._has_updated = report.skipped is None
        if report.skipped is None and report.has_moved:
            self._publication.publish(self._context.learner.adapter, serve=serve)
            now = datetime.now(UTC).isoformat(timespec="milliseconds")
            self.status = replace(self.status, last_update=now, loss=report.loss)
        return report

    def _units(self, groups: Sequence[TrajectoryGroup], max_tokens: int) -> Iterator[UpdateReport | Future[Any] | None]:
        """The units of an update, which keeps what people want to see of it."""
        learner, rollouts = self._context.learner, self._context.rollouts
        if rollouts is None or not isinstance(learner, Learner):
            return learner.update(groups, step=self._step, max_tokens=max_tokens)
        return learner.update(groups, step=self._step, max_tokens=max_tokens, look=rollouts.look(groups))

    async def _judge(
        self, metrics: StepMetrics, *, trained: Sequence[TrajectoryGroup], sampled: Sequence[TrajectoryGroup] = ()
    ) -> Verdict:
        """The guard's verdict on a step, acted upon except for stopping the run."""
        verdict = await self._recovery.handle(metrics, trained=trained, sampled=sampled)
        if verdict.action == "roll_back":
            await self._give_up_work_ahead()
        return verdict

    def _finish(self, metrics: StepMetrics, sampled: Sequence[TrajectoryGroup] = ()) -> None:
        """Count a judged step as finished, and report it."""
        self._step += 1
        self._version, self._has_updated = self._context.learner.adapter.version, False
        metrics = replace(metrics, guard=self._guard.row())
        self._context.recorder.step(metrics, sampled)
        self._context.display.step(metrics)
        if self._context.rollouts is not None and sampled:
            self._context.rollouts.write(metrics.step, sampled, metrics.update)
        collected = self.status.trajectories_collected + sum(len(group.trajectories) for group in sampled)
        self.status = replace(self.status, metrics=metrics.to_flat(), trajectories_collected=collected)

    async def _save_now(self) -> Path:
        """Save on request between two steps. Raises CheckpointError."""
        if self._saver.saved_step == self._step == 0:
            raise Unavailable("no step has finished yet, so there is nothing to save; ask again later")
        self._set("saving")
        return await self._saver.save()

    async def _evaluate_now(self) -> EvaluationReport:
        """Evaluate on request between two steps, unless the newest version was. Raises Unavailable."""
        if self._context.evaluator is None:
            raise Unavailable(
                "this run has nothing held out to evaluate on; set trainer.evaluate_problems above 0 and use an "
                "environment with a test split, or learner.data_held_out"
            )
        report = self._evaluations.of(self._context.learner.adapter.version)
        report = report or await self._evaluate(is_requested=True)
        if report is None:
            raise Unavailable("the evaluation was dropped; the log of the run says why")
        return report

    async def _evaluate(self, *, is_requested: bool = False) -> EvaluationReport | None:
        if self._context.evaluator is not None:
            self._set("evaluating")
        report = await self._evaluations.evaluate(self._step, self.pacing.stopping, is_requested=is_requested)
        if report is not None:
            self._publication.evaluated(report)
            if self._context.rollouts is not None:
                self._context.rollouts.evaluated(report.step)
        if self._evaluations.is_out_of_patience:
            self._context.display.message(
                f"training ends after step {self._step}: the last {self._settings.patience} evaluations were no better "
                "than the best before them (trainer.patience)"
            )
        return report

    async def _rescue(self) -> None:
        """Save the finished steps, unless an error left a step half done."""
        is_between = self._context.learner.adapter.version == self._version and not self._has_updated
        if self._saver.saved_step < self._step and is_between:
            self._set("saving")
            await self._saver.rescue()

    def _state(self) -> TrainingState:
        learner = self._context.learner
        return TrainingState(
            step=self._step,
            version=learner.adapter.version,
            adapter=learner.adapter,
            optimizer=learner.optimizer_state(),
            counters={
                **self._counters(),
                "publication": self._publication.counters(),
                "guard": self._guard.counters(),
                **self._evaluations.counters(),
            },
            score=self._evaluations.score(self._step),
            fingerprint=self._context.fingerprint,
            facts=self._context.facts,
        )

    def _served(self) -> int:
        return self._context.engine.stats().tokens_total["serving"]

    def _set(self, state: State, message: str = "") -> None:
        self.status = replace(
            self.status, state=state, step=self._step, version=self._context.learner.adapter.version, message=message
        )
        self._context.display.phase(self.status)
