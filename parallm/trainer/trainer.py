"""The loop of training on what the policy samples: collect -> update -> publish -> evaluate -> save."""

import time
from collections.abc import Mapping
from typing import Any

from parallm.checkpoint.state import TrainingState
from parallm.errors import TrainingStopped
from parallm.learner.learner import Learner
from parallm.reports import UpdateReport
from parallm.rollout.collector import RolloutBatch
from parallm.rollout.scoring import raise_if_none_scored
from parallm.rollout.settings import RolloutSettings
from parallm.trainer.context import TrainerContext
from parallm.trainer.guard import Verdict
from parallm.trainer.loop import Loop
from parallm.trainer.pipeline import Pipeline
from parallm.trainer.settings import TrainerSettings
from parallm.trainer.step_metrics import step_metrics


class Trainer(Loop):
    """Takes the groups of each step from its pipeline, which samples and scores them."""

    def __init__(
        self, parts: TrainerContext, settings: TrainerSettings, rollout: RolloutSettings, *, save_every: int
    ) -> None:
        super().__init__(parts, settings, compares=parts.learner.adapter.dropout == 0, save_every=save_every)
        assert isinstance(parts.learner, Learner), "a reward model samples nothing"
        self._rollout = rollout
        self._pipeline = Pipeline(
            parts.collector,
            lambda: parts.learner.adapter.version,
            policy=parts.policy,
            limit=settings.max_off_policy_steps,
            num_steps=settings.steps,
            needs_all_groups=parts.learner.needs_all_groups,
        )
        self._idle_steps = 0  # in a row that have changed nothing
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
        collection, groups = batch.collection, batch.trained
        self._set("updating")
        update_began = time.perf_counter()
        update = await self._update(groups, max_tokens=self._rollout.max_tokens) if groups else None
        metrics = step_metrics(
            step=self._step + 1,
            collection=collection,
            off_policy=batch.off_policy,
            update=update,
            update_seconds=time.perf_counter() - update_began,
            total_seconds=time.perf_counter() - began,
            served_tokens=self._served() - served,
        )
        verdict = await self._judge(metrics, trained=groups, sampled=collection.sampled)
        self._account_for(collection, update)
        self._finish(metrics, collection.sampled)
        self._check_signal(collection, update)
        return verdict

    def _account_for(self, collection: RolloutBatch, update: UpdateReport | None) -> None:
        """What the present step leaves to later ones, besides a version."""
        self._context.collector.problem_cursor.commit(self._step)
        self._context.collector.curriculum.learn(collection.sampled)
        self._idle_steps = 0 if update is not None and update.skipped is None else self._idle_steps + 1

    def _check_signal(self, collection: RolloutBatch, update: UpdateReport | None) -> None:
        """Raise EnvironmentFailed if nothing was ever scored, TrainingStopped after many steps without a lesson."""
        num_scored = sum(len(group.trajectories) for group in collection.sampled)
        self._has_scored |= num_scored > 0
        if not self._has_scored:
            faults = [one for group in collection.sampled for one in group.faulty]
            raise_if_none_scored(f"step {self._step}", faults, num_scored)
        if self._idle_steps >= self._rollout.max_idle_steps:
            why = _why_idle(collection, num_scored) if update is None else f"nothing was changed: {update.skipped}"
            raise TrainingStopped(
                f"in {self._idle_steps} steps there was nothing to learn from (rollout.max_idle_steps). In the last "
                f"one {why}"
            )

    async def _give_up_work_ahead(self) -> None:
        await self._pipeline.close()

    def _counters(self) -> Mapping[str, Any]:
        problem_cursor, curriculum = self._context.collector.problem_cursor, self._context.collector.curriculum
        return {"idle_steps": self._idle_steps, **problem_cursor.state(), **curriculum.state()}


def _why_idle(collection: RolloutBatch, num_scored: int) -> str:
    failed = f"{sum(collection.faults.values())} completions could not be scored ({dict(collection.faults)})"
    if not num_scored:
        return f"{failed}, and there were no others; correct the environment: its tracebacks are in the log"
    rewards = sorted({reward for group in collection.sampled for reward in group.rewards})
    return (
        f"every completion of a problem got the same reward ({rewards[:5]})"
        f"{f', and {failed}' if collection.faults else ''}; choose problems that the model solves sometimes, raise "
        "rollout.group_size or rollout.temperature, or check the environment's score"
    )
