"""Trainers of groups that others bring: wait -> update -> publish -> evaluate -> save."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Generic, Protocol, TypeVar

from parallm.learner.learner import Learner
from parallm.metrics.step import StepMetrics
from parallm.rollout.collector import RolloutBatch, StepBatch
from parallm.rollout.live.source import LiveSource
from parallm.rollout.settings import RolloutSettings
from parallm.rollout.staleness import off_policy_report
from parallm.trainer.context import TrainerContext
from parallm.trainer.guard import Verdict
from parallm.trainer.loop import Loop
from parallm.trainer.settings import TrainerSettings
from parallm.trainer.step_metrics import step_metrics
from parallm.types import TrajectoryGroup


class GroupSource(Protocol):
    """A source of groups: clients (`rollout.live`) or Atropos (`integrations.atropos`)."""

    @property
    def message(self) -> str:
        """Why there is nothing to train on, if known."""
        ...

    @property
    def waiting(self) -> Mapping[str, float]:
        """Counts of waiting trajectories by metric name."""
        ...

    def is_ready(self, version: int, limit: int) -> bool:
        """Whether a step may begin; drops groups more than `limit` versions older than `version`."""
        ...

    def take(self, step: int, *, needs_all_groups: bool = False) -> StepBatch:
        """The groups of `step`, of which those with equal rewards are trained on if `needs_all_groups`; called after
        `is_ready`."""
        ...


Source = TypeVar("Source", bound=GroupSource)


class LiveTrainer(Loop, Generic[Source]):
    """Trains on the groups of `source`, for Atropos.

    A step begins when there are enough groups, so pause, checkpoint and stop need not wait for it.
    """

    def __init__(
        self,
        context: TrainerContext,
        source: Source,
        settings: TrainerSettings,
        rollout: RolloutSettings,
    ) -> None:
        super().__init__(context, settings)
        assert isinstance(context.learner, Learner), "a reward model samples nothing"
        self._needs_all = context.learner.needs_all_groups
        self._source = source
        self._rollout = rollout
        self._last_end, self._last_served = time.perf_counter(), self._served()

    def _is_ready(self) -> bool:
        return self._source.is_ready(self._context.learner.adapter.version, self._settings.max_off_policy_steps)

    def _wait(self) -> None:
        super()._wait()
        message, metrics = self._source.message, {**self.status.metrics, **self._source.waiting}
        if (message, metrics) != (self.status.message, self.status.metrics):
            self.status = replace(self.status, metrics=metrics)
            self._set(self.status.state, message)

    async def _one_step(self) -> Verdict:
        began = time.perf_counter()
        step_batch = self._source.take(self._step + 1, needs_all_groups=self._needs_all)
        version = self._context.learner.adapter.version
        rollout_batch = RolloutBatch(first=step_batch.groups, sampled=step_batch.groups, seconds=began - self._last_end)
        self._set("updating")
        update = await self._update(step_batch.trained, max_tokens=self._rollout.max_tokens)
        ended, served = time.perf_counter(), self._served()
        metrics = step_metrics(
            step=self._step + 1,
            rollout_batch=rollout_batch,
            off_policy=off_policy_report(step_batch.trained, version, step_batch.num_stale),
            update=update,
            update_seconds=ended - began,
            total_seconds=ended - self._last_end,
            served_tokens=served - self._last_served,
        )
        # if advantages compare completions of the whole step, a group of one has no signal by itself
        figures = {**step_batch.figures, **self._source.waiting}
        metrics = replace(metrics, groups_with_signal=len(step_batch.with_signal), source=figures)
        self._last_end, self._last_served = ended, served
        verdict = await self._judge(metrics, trained=step_batch.trained, sampled=step_batch.groups)
        self._finish(metrics, step_batch.groups)
        return verdict


class ClientTrainer(LiveTrainer[LiveSource]):
    """Trains on completions that clients rewarded, each once. Reports saved, failed and undone steps to `source`."""

    def _missing(self) -> str:
        return self._source.missing()

    def _on_save(self, step: int) -> None:
        self._source.saved(step)

    async def _one_step(self) -> Verdict:
        try:
            return await super()._one_step()
        except Exception:  # ends the run; a resumed run must not fail on the same trajectories for ever
            self._source.failed(self._step + 1, ())
            raise

    async def _judge(
        self, metrics: StepMetrics, *, trained: Sequence[TrajectoryGroup], sampled: Sequence[TrajectoryGroup] = ()
    ) -> Verdict:
        before, update = self._context.learner.adapter, metrics.update
        verdict = await super()._judge(metrics, trained=trained, sampled=sampled)
        if update is not None and update.fault is not None:
            self._source.failed(metrics.step, [(culprit.group, culprit.index) for culprit in update.culprits])
        elif update is not None and update.skipped is None and update.has_moved:
            self._source.learned()
        after = self._context.learner.adapter
        if after is not before:
            assert after.parent is not None, "a roll-back goes back to a version"
            self._source.undone(after.parent, after.version)
        return verdict
