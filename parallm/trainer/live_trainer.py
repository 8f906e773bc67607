"""The loop of training on what others bring: wait for it -> update -> publish -> evaluate -> save."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

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
    """Where groups come from by themselves: clients (`rollout.live.traffic`), or Atropos (`rollout.atropos.source`)."""

    @property
    def message(self) -> str:
        """Why there is nothing to train on, where that is known."""
        ...

    @property
    def waiting(self) -> Mapping[str, float]:
        """What has been brought and waits, under flat names of the metrics."""
        ...

    def is_ready(self, version: int, limit: int) -> bool:
        """Whether a step may begin; lets go what is more than `limit` versions older than `version`."""
        ...

    def take(self, step: int) -> StepBatch:
        """What `step` is about, after `is_ready`."""
        ...


class LiveTrainer(Loop):
    """Takes the groups of each step from `source`. `parts.collector` stays unused.

    A step begins when there is enough to train on, so pause, checkpoint and stop need not wait for it.
    """

    def __init__(
        self,
        parts: TrainerContext,
        source: GroupSource,
        settings: TrainerSettings,
        rollout: RolloutSettings,
        *,
        save_every: int,
    ) -> None:
        super().__init__(parts, settings, compares=parts.learner.adapter.dropout == 0, save_every=save_every)
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
        taken, version = self._source.take(self._step + 1), self._context.learner.adapter.version
        collection = RolloutBatch(first=taken.groups, sampled=taken.groups, seconds=began - self._last_end)
        self._set("updating")
        update = await self._update(taken.with_signal, max_tokens=self._rollout.max_tokens)
        ended, served = time.perf_counter(), self._served()
        metrics = step_metrics(
            step=self._step + 1,
            collection=collection,
            off_policy=off_policy_report(taken.with_signal, version, taken.num_stale),
            update=update,
            update_seconds=ended - began,
            total_seconds=ended - self._last_end,
            served_tokens=served - self._last_served,
        )
        # where completions are compared over the whole step, no group of one has signal by itself
        figures = {**taken.figures, **self._source.waiting}
        metrics = replace(metrics, groups_with_signal=len(taken.with_signal), source=figures)
        self._last_end, self._last_served = ended, served
        verdict = await self._judge(metrics, trained=taken.with_signal, sampled=taken.groups)
        self._finish(metrics, taken.groups)
        return verdict

    def _counters(self) -> Mapping[str, Any]:
        return {}


class ClientTrainer(LiveTrainer):
    """Reports to `traffic` what became of the trajectories that a step took: saved, failed or undone."""

    def __init__(
        self,
        parts: TrainerContext,
        traffic: LiveSource,
        settings: TrainerSettings,
        rollout: RolloutSettings,
        *,
        save_every: int,
    ) -> None:
        super().__init__(parts, traffic, settings, rollout, save_every=save_every)
        self._traffic = traffic

    def _on_save(self, step: int) -> None:
        self._traffic.saved(step)

    async def _one_step(self) -> Verdict:
        try:
            return await super()._one_step()
        except Exception:  # it ends the run, which must not begin with the same for ever
            self._traffic.failed(self._step + 1, ())
            raise

    async def _judge(
        self, metrics: StepMetrics, *, trained: Sequence[TrajectoryGroup], sampled: Sequence[TrajectoryGroup] = ()
    ) -> Verdict:
        before, update = self._context.learner.adapter, metrics.update
        verdict = await super()._judge(metrics, trained=trained, sampled=sampled)
        if update is not None and update.fault is not None:
            self._traffic.failed(metrics.step, [(one.group, one.index) for one in update.culprits])
        elif update is not None and update.skipped is None and update.has_moved:
            self._traffic.learned()
        after = self._context.learner.adapter
        if after is not before:
            assert after.parent is not None, "a roll-back goes back to a version"
            self._traffic.undone(after.parent, after.version)
        return verdict
