"""Collects the groups of coming steps while a step trains, within the limit on the age of what is trained on."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from parallm.model.adapters.table import of_alias
from parallm.reports import OffPolicyReport
from parallm.rollout.collector import Collector, RolloutBatch
from parallm.rollout.staleness import is_stale, off_policy_report
from parallm.types import LATEST, TrajectoryGroup

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepGroups:
    """What one step trains on."""

    collection: RolloutBatch
    trained: tuple[TrajectoryGroup, ...]
    off_policy: OffPolicyReport


class Pipeline:
    """One collection per step, at most `limit` steps ahead of the one that trains. Runs on the asyncio thread.

    A step makes one version, but for roll-backs. So a step whose collection begins once the step `limit` + 1 before it
    has trained sees no token older than `limit` versions; whatever breaks this is found and sampled anew.

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
        """`needs_all_groups`: train on groups without signal, too."""
        self._collector = collector
        self._version = version  # the learner's present one
        self._model = of_alias(LATEST, policy)
        self._limit = limit
        self._num_steps = num_steps
        self._needs_all = needs_all_groups
        self._tasks: dict[int, asyncio.Task[RolloutBatch]] = {}

    async def take(self, step: int) -> StepGroups:
        """Wait for the groups of `step`, which trains now, while those of later steps are sampled.

        Raises what collecting them raised.
        """
        for coming in range(step, min(step + self._limit + 1, self._num_steps)):
            if coming not in self._tasks:
                self._tasks[coming] = asyncio.create_task(self._collector.collect(coming, self._model))
        collection = await self._tasks[step]
        del self._tasks[step]
        return await self._fresh(step, collection)

    async def close(self) -> None:
        """Give up what is under way and give its problems back, so that `take` would begin anew."""
        tasks, self._tasks = self._tasks, {}
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        self._collector.problem_cursor.requeue(tasks)

    async def _fresh(self, step: int, collection: RolloutBatch) -> StepGroups:
        """The batch without groups that are too old, which are sampled anew with the present version."""
        version = self._version()
        trained = collection.to_train(needs_all=self._needs_all)
        stale = [group for group in trained if is_stale(group.trajectories, version, self._limit)]
        if stale:
            logger.warning("step %d: %d groups are too old for version %d", step + 1, len(stale), version)
            anew = await self._collector.resample(stale, step, len(collection.sampled), self._model)
            collection = _replaced(collection, dict(zip(map(id, stale), anew, strict=True)))
            trained = collection.to_train(needs_all=self._needs_all)
        return StepGroups(
            collection=collection, trained=trained, off_policy=off_policy_report(trained, version, len(stale))
        )


def _replaced(collection: RolloutBatch, by_identity: dict[int, TrajectoryGroup]) -> RolloutBatch:
    return replace(
        collection,
        first=tuple(by_identity.get(id(group), group) for group in collection.first),
        sampled=tuple(by_identity.get(id(group), group) for group in collection.sampled),
    )
