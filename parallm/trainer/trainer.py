"""Training on samples of the policy: collect -> update -> publish -> evaluate -> save."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from parallm.checkpoint.state import TrainingState
from parallm.errors import TrainingStopped
from parallm.learner.learner import Learner
from parallm.model.adapters.names import of_alias
from parallm.reports import OffPolicyReport, UpdateReport
from parallm.rollout.collector import Collector, RolloutBatch
from parallm.rollout.scoring import raise_if_none_scored
from parallm.rollout.settings import RolloutSettings
from parallm.rollout.staleness import is_stale, off_policy_report
from parallm.trainer.context import TrainerContext
from parallm.trainer.guard import Verdict
from parallm.trainer.loop import Loop
from parallm.trainer.settings import TrainerSettings
from parallm.trainer.step_metrics import step_metrics
from parallm.types import LATEST, TrajectoryGroup

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepGroups:
    """The groups of one step."""

    rollout_batch: RolloutBatch
    trained: tuple[TrajectoryGroup, ...]
    off_policy: OffPolicyReport


class Pipeline:
    """One collection per step, at most `limit` steps ahead of the training one. Runs on the asyncio thread.

    A step makes one version. So if a collection begins after the step `limit` + 1 before it has trained, no token is
    older than `limit` versions. After a roll-back, groups that are too old are sampled again.

    Loop contract: consumes problems and completions / waits for the oldest collection / produces one batch per step, in
    the order of the steps / ends with `close`.
    """

    def __init__(
        self,
        collector: Collector,
        version: Callable[[], int],
        *,
        policy: str,
        limit: int,
        num_steps: int,
        needs_all_groups: bool = False,
    ) -> None:
        """`needs_all_groups`: also train on groups without signal."""
        self._collector = collector
        self._version = version  # the learner's newest version
        self._model = of_alias(LATEST, policy)
        self._limit = limit
        self._num_steps = num_steps
        self._needs_all = needs_all_groups
        self._tasks: dict[int, asyncio.Task[RolloutBatch]] = {}

    async def take(self, step: int) -> StepGroups:
        """Wait for the groups of `step`, while groups of later steps are sampled. Raises errors of their collection."""
        for later_step in range(step, min(step + self._limit + 1, self._num_steps)):
            if later_step not in self._tasks:
                self._tasks[later_step] = asyncio.create_task(self._collector.collect(later_step, self._model))
        rollout_batch = await self._tasks[step]
        del self._tasks[step]
        return await self._fresh(step, rollout_batch)

    async def close(self) -> None:
        """Cancel all collections and requeue their problems."""
        tasks, self._tasks = self._tasks, {}
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        self._collector.give_up(tasks)

    async def _fresh(self, step: int, rollout_batch: RolloutBatch) -> StepGroups:
        """The groups of a step; those that are too old are sampled again with the newest version."""
        version = self._version()
        trained = rollout_batch.to_train(needs_all=self._needs_all)
        stale = [group for group in trained if is_stale(group.trajectories, version, self._limit)]
        if stale:
            logger.warning("step %d: %d groups are too old for version %d", step + 1, len(stale), version)
            resampled = await self._collector.resample(stale, step, len(rollout_batch.sampled), self._model)
            fresh = dict(zip(map(id, stale), resampled, strict=True))
            first, sampled = (
                tuple(fresh.get(id(group), group) for group in groups)
                for groups in (rollout_batch.first, rollout_batch.sampled)
            )
            rollout_batch = replace(rollout_batch, first=first, sampled=sampled)
            trained = rollout_batch.to_train(needs_all=self._needs_all)
        return StepGroups(
            rollout_batch=rollout_batch, trained=trained, off_policy=off_policy_report(trained, version, len(stale))
        )


class Trainer(Loop):
    """Trains on groups that its pipeline samples and scores."""

    def __init__(self, context: TrainerContext, settings: TrainerSettings, rollout: RolloutSettings) -> None:
        super().__init__(context, settings)
        assert isinstance(context.learner, Learner), "a reward model samples nothing"
        self._rollout = rollout
        self._pipeline = Pipeline(
            context.collector,
            lambda: context.learner.adapter.version,
            policy=context.policy,
            limit=settings.max_off_policy_steps,
            num_steps=settings.steps,
            needs_all_groups=context.learner.needs_all_groups,
        )
        self._idle_steps = 0  # steps in a row that changed nothing
        self._has_scored = False  # whether this process has seen the environment score anything

    def resume(self, state: TrainingState) -> None:
        super().resume(state)
        if self._context.facts.draws_same_problems(state.facts):
            self._context.collector.problem_cursor.restore(state.counters)
        if self._context.facts.scores_same_problems(state.facts):
            self._context.collector.curriculum.restore(state.counters)
            self._idle_steps = int(state.counters["idle_steps"])

    async def _one_step(self) -> Verdict:
        began, served = time.perf_counter(), self._served()
        self._set("collecting")
        batch = await self._pipeline.take(self._step)
        rollout_batch, groups = batch.rollout_batch, batch.trained
        self._set("updating")
        update_began = time.perf_counter()
        update = await self._update(groups, max_tokens=self._rollout.max_tokens) if groups else None
        metrics = step_metrics(
            step=self._step + 1,
            rollout_batch=rollout_batch,
            off_policy=batch.off_policy,
            update=update,
            update_seconds=time.perf_counter() - update_began,
            total_seconds=time.perf_counter() - began,
            served_tokens=self._served() - served,
        )
        verdict = await self._judge(metrics, trained=groups, sampled=rollout_batch.sampled)
        self._account_for(rollout_batch, update)
        self._finish(metrics, rollout_batch.sampled)
        self._check_signal(rollout_batch, update)
        return verdict

    def _account_for(self, rollout_batch: RolloutBatch, update: UpdateReport | None) -> None:
        """Update problem cursor, curriculum and idle count after a step."""
        self._context.collector.problem_cursor.commit(self._step)
        self._context.collector.curriculum.learn(rollout_batch.sampled)
        self._idle_steps = 0 if update is not None and update.skipped is None else self._idle_steps + 1

    def _check_signal(self, rollout_batch: RolloutBatch, update: UpdateReport | None) -> None:
        """Raise EnvironmentFailed if nothing was ever scored, TrainingStopped after many idle steps."""
        num_scored = sum(len(group.trajectories) for group in rollout_batch.sampled)
        self._has_scored |= num_scored > 0
        if not self._has_scored:
            faults = [episode for group in rollout_batch.sampled for episode in group.faulty]
            raise_if_none_scored(f"step {self._step}", faults, num_scored)
        if self._idle_steps >= self._rollout.max_idle_steps:
            is_equal = update is None or (update.fault is None and not rollout_batch.with_signal)
            skipped = None if update is None else update.skipped
            reason = _why_idle(rollout_batch, num_scored) if is_equal else f"nothing was changed: {skipped}"
            raise TrainingStopped(
                f"in {self._idle_steps} steps there was nothing to learn from (rollout.max_idle_steps). In the last "
                f"one {reason}"
            )

    async def _give_up_work_ahead(self) -> None:
        await self._pipeline.close()

    def _counters(self) -> Mapping[str, Any]:
        problem_cursor, curriculum = self._context.collector.problem_cursor, self._context.collector.curriculum
        return {"idle_steps": self._idle_steps, **problem_cursor.state(), **curriculum.state()}


def _why_idle(rollout_batch: RolloutBatch, num_scored: int) -> str:
    failed = f"{sum(rollout_batch.faults.values())} completions could not be scored ({dict(rollout_batch.faults)})"
    if not num_scored:
        return f"{failed}, and there were no others; correct the environment: its tracebacks are in the log"
    rewards = sorted({reward for group in rollout_batch.sampled for reward in group.rewards})
    return (
        f"every completion of a problem got the same reward ({rewards[:5]})"
        f"{f', and {failed}' if rollout_batch.faults else ''}; choose problems that the model solves sometimes, raise "
        "rollout.group_size or rollout.temperature, or check the environment's score"
    )
