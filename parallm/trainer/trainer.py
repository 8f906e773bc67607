"""Training on samples of the policy: collect -> update -> publish -> evaluate -> save."""

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
    """Trains on groups that its pipeline samples and scores."""

    def __init__(
        self, context: TrainerContext, settings: TrainerSettings, rollout: RolloutSettings, *, save_every: int
    ) -> None:
        super().__init__(context, settings, compares=context.learner.adapter.dropout == 0, save_every=save_every)
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
            reason = (
                _why_idle(rollout_batch, num_scored) if update is None else f"nothing was changed: {update.skipped}"
            )
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
