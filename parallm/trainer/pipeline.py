"""Collects groups of coming steps while a step trains, within a limit on the age of tokens. `Trainer` calls it."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from parallm.model.adapters.names import of_alias
from parallm.reports import OffPolicyReport
from parallm.rollout.collector import Collector, RolloutBatch
from parallm.rollout.staleness import is_stale, off_policy_report
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
        self._collector.problem_cursor.requeue(tasks)

    async def _fresh(self, step: int, rollout_batch: RolloutBatch) -> StepGroups:
        """The groups of a step; those that are too old are sampled again with the newest version."""
        version = self._version()
        trained = rollout_batch.to_train(needs_all=self._needs_all)
        stale = [group for group in trained if is_stale(group.trajectories, version, self._limit)]
        if stale:
            logger.warning("step %d: %d groups are too old for version %d", step + 1, len(stale), version)
            resampled = await self._collector.resample(stale, step, len(rollout_batch.sampled), self._model)
            rollout_batch = _replaced(rollout_batch, dict(zip(map(id, stale), resampled, strict=True)))
            trained = rollout_batch.to_train(needs_all=self._needs_all)
        return StepGroups(
            rollout_batch=rollout_batch, trained=trained, off_policy=off_policy_report(trained, version, len(stale))
        )


def _replaced(rollout_batch: RolloutBatch, by_identity: dict[int, TrajectoryGroup]) -> RolloutBatch:
    return replace(
        rollout_batch,
        first=tuple(by_identity.get(id(group), group) for group in rollout_batch.first),
        sampled=tuple(by_identity.get(id(group), group) for group in rollout_batch.sampled),
    )
