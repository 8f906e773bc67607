"""The loop: collect -> update -> publish -> evaluate -> save. It decides the order and nothing else."""

import asyncio
import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from parallm.checkpoint.state import TrainingState
from parallm.errors import CheckpointError, TrainingStopped
from parallm.reports import TrainingStatus, UpdateReport
from parallm.rollout.collector import Collection
from parallm.rollout.settings import RolloutSettings
from parallm.trainer.evaluations import Evaluations
from parallm.trainer.guard import Guard
from parallm.trainer.parts import Parts
from parallm.trainer.pipeline import Pipeline
from parallm.trainer.publication import Publication
from parallm.trainer.recovery import Recovery
from parallm.trainer.saving import Saver
from parallm.trainer.settings import TrainerSettings
from parallm.trainer.step_metrics import step_metrics
from parallm.types import BEST

logger = logging.getLogger(__name__)

State = Literal["serving", "starting", "collecting", "updating", "evaluating", "saving", "finished", "failed"]


class Trainer:
    """Runs on the asyncio thread; what touches arrays goes to the device thread.

    Loop contract: consumes the pipeline's batches / waits for the oldest one, then for the update / produces adapter
    versions, metrics and checkpoints / ends after the last step, when patience is over, when `stop` was called, or with
    an error.
    """

    def __init__(self, parts: Parts, settings: TrainerSettings, rollout: RolloutSettings, *, save_every: int) -> None:
        self._parts = parts
        self._settings = settings
        self._rollout = rollout
        self._pipeline = Pipeline(
            parts.collector,
            lambda: parts.learner.adapter.version,
            policy=parts.policy,
            limit=settings.max_off_policy_steps,
            num_steps=settings.steps,
        )
        self._evaluations = Evaluations(parts, settings)
        self._publication = Publication(parts.adapters, parts.policy, settings)
        self._guard = Guard(settings.guard, compares=parts.learner.adapter.dropout == 0)
        self._recovery = Recovery(parts, self._guard, self._publication)
        self._saver = Saver(parts.device, parts.checkpoints, self._state, every=save_every)
        self._stopping = asyncio.Event()
        self._step = 0  # finished steps
        self._version = parts.learner.adapter.version  # that the last finished step has left
        self._idle_steps = 0  # in a row without a group with signal
        self.status = TrainingStatus(state="starting", total_steps=settings.steps)

    def resume(self, state: TrainingState) -> None:
        """Go on after `state`; the adapter and the optimizer were restored on the device thread already."""
        self._step = self._saver.saved_step = state.step
        self._version = state.version
        self._parts.collector.ledger.restore(state.counters)
        self._parts.collector.curriculum.restore(state.counters)
        self._idle_steps = int(state.counters["idle_steps"])
        self._evaluations.resume(dict(state.counters))
        self._publication.resume(state.counters["publication"], BEST)
        self._guard.resume(state.counters["guard"])

    def stop(self) -> None:
        """Finish the present step, or drop the present evaluation; save, and leave."""
        self._stopping.set()

    @property
    def was_stopped(self) -> bool:
        return self._stopping.is_set()

    async def run(self) -> None:
        """Raises TrainingStopped when no problem teaches anything or the guard says so, and whatever a part raises.

        The finished steps are saved before.
        """
        try:
            await self._run()
        except Exception as error:
            if not isinstance(error, CheckpointError):
                await self._rescue()
            self._set("failed", message=str(error))
            raise
        self._set("finished")

    async def _run(self) -> None:
        if self._step == 0:
            await self._evaluate()
        try:
            while not self._is_over():
                await self._one_step()
                if self._evaluations.is_due(self._step):
                    await self._evaluate()
                if self._saver.is_due(self._step) and not self._is_over():
                    self._set("saving")
                    await self._saver.try_save()
        finally:
            await self._pipeline.close()
        if self._saver.saved_step < self._step:
            self._set("saving")
            await self._saver.save()

    def _is_over(self) -> bool:
        return self.was_stopped or self._step >= self._settings.steps or self._evaluations.is_hopeless

    async def _one_step(self) -> None:
        began, served = time.perf_counter(), self._served()
        self._set("collecting")
        batch = await self._pipeline.take(self._step)
        collection = batch.collection
        self._set("updating")
        update_began = time.perf_counter()
        update = await self._update(collection)
        metrics = step_metrics(
            step=self._step + 1,
            collection=collection,
            off_policy=batch.off_policy,
            update=update,
            update_seconds=time.perf_counter() - update_began,
            total_seconds=time.perf_counter() - began,
            served_tokens=self._served() - served,
        )
        verdict = await self._recovery.after(metrics, trained=collection.with_signal, sampled=collection.sampled)
        if verdict.action == "roll_back":
            await self._pipeline.close()  # what the version that was undone has sampled ahead
        metrics = replace(metrics, guard=self._guard.row())
        self._finish_step(collection)
        self._parts.recorder.step(metrics, collection.sampled)
        self._parts.display.step(metrics)
        self.status = replace(self.status, metrics=metrics.to_flat())
        self._check_signal(collection)
        if verdict.action == "stop":
            raise TrainingStopped(verdict.reason)

    async def _update(self, collection: Collection) -> UpdateReport | None:
        """Train on the groups with signal and publish the new version; None if there are none."""
        groups = collection.with_signal
        if not groups:
            return None
        units: Iterator[UpdateReport | None] = self._parts.learner.update(
            groups, step=self._step, max_tokens=self._rollout.max_tokens
        )
        report = await asyncio.wrap_future(self._parts.device.iterate(units))
        assert report is not None, "an update ends with its report"
        if report.skipped is None:
            self._publication.publish(self._parts.learner.adapter)
        return report

    def _finish_step(self, collection: Collection) -> None:
        self._parts.collector.ledger.settle(self._step)
        self._parts.collector.curriculum.learn(collection.sampled)
        self._step += 1
        self._version = self._parts.learner.adapter.version
        self._idle_steps = 0 if collection.with_signal else self._idle_steps + 1

    async def _evaluate(self) -> None:
        if self._parts.evaluator is not None:
            self._set("evaluating")
        report = await self._evaluations.evaluate(self._step, self._stopping)
        if report is not None:
            self._publication.evaluated(report)
        if self._evaluations.is_hopeless:
            self._parts.display.message(
                f"training ends after step {self._step}: the last {self._settings.patience} evaluations were no better "
                "than the best before them (trainer.patience)"
            )

    async def _rescue(self) -> None:
        """Save the finished steps, unless the error left a step half done."""
        if self._saver.saved_step < self._step and self._parts.learner.adapter.version == self._version:
            self._set("saving")
            await self._saver.rescue()

    def _state(self) -> TrainingState:
        learner = self._parts.learner
        return TrainingState(
            step=self._step,
            version=learner.adapter.version,
            adapter=learner.adapter,
            optimizer=learner.optimizer_state(),
            schedule_step=self._step,
            counters={
                "idle_steps": self._idle_steps,
                "publication": self._publication.counters(),
                "guard": self._guard.counters(),
                **self._parts.collector.ledger.state(),
                **self._parts.collector.curriculum.state(),
                **self._evaluations.counters(),
            },
            groups=(),  # what was sampled ahead is sampled again: its problems are the first that are drawn
            score=self._evaluations.score(self._step),
            fingerprint=self._parts.fingerprint,
        )

    def _check_signal(self, collection: Collection) -> None:
        if self._idle_steps >= self._rollout.max_idle_steps:
            rewards = sorted({reward for group in collection.sampled for reward in group.rewards})
            raise TrainingStopped(
                f"in {self._idle_steps} steps every completion of a problem got the same reward (the last ones: "
                f"{rewards[:5]}; faults: {dict(collection.faults)}), so there is nothing to learn from; choose "
                "problems that the model solves sometimes, raise rollout.group_size or rollout.temperature, or check "
                "the environment's score"
            )

    def _served(self) -> int:
        return self._parts.engine.stats().tokens_total["serving"]

    def _set(self, state: State, message: str = "") -> None:
        self.status = replace(
            self.status, state=state, step=self._step, version=self._parts.learner.adapter.version, message=message
        )
        self._parts.display.phase(self.status)
