"""The loop: collect -> update -> publish -> evaluate -> save. It decides the order and nothing else."""

import asyncio
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from parallm.checkpoint.manager import CheckpointManager
from parallm.checkpoint.state import Fingerprint, TrainingState
from parallm.device.thread import DeviceThread
from parallm.engine.async_engine import AsyncEngine
from parallm.errors import CheckpointError, TrainingStopped
from parallm.learner.learner import Learner
from parallm.metrics.display import Display
from parallm.metrics.record import RunRecorder
from parallm.metrics.step import StepMetrics
from parallm.model.adapter import AdapterTable
from parallm.rollout.collector import Collection, Collector
from parallm.rollout.evaluation import Evaluator
from parallm.rollout.settings import RolloutSettings
from parallm.trainer.settings import TrainerSettings
from parallm.trainer.step_metrics import step_metrics
from parallm.types import POLICY, EvaluationReport, TrainingStatus, UpdateReport

logger = logging.getLogger(__name__)

State = Literal["serving", "starting", "collecting", "updating", "evaluating", "saving", "finished", "failed"]
BEST = "best"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What the trainer drives; made by build.py."""

    device: DeviceThread
    engine: AsyncEngine
    learner: Learner
    adapters: AdapterTable
    collector: Collector
    evaluator: Evaluator | None
    checkpoints: CheckpointManager
    fingerprint: Fingerprint
    recorder: RunRecorder
    display: Display


class Trainer:
    """Runs on the asyncio thread; what touches arrays goes to the device thread.

    Loop contract: consumes problems and completions / waits for the engine, then for the update / produces adapter
    versions, metrics and checkpoints / ends after the last step, when `stop` was called, or with an error.
    """

    def __init__(
        self, parts: Parts, settings: TrainerSettings, rollout: RolloutSettings, *, save_every: int
    ) -> None:
        self._parts = parts
        self._settings = settings
        self._rollout = rollout
        self._save_every = save_every
        self._stopping = False
        self._step = 0  # finished steps
        self._idle_steps = 0  # in a row without a group with signal
        self._best: float | None = None
        self._latest: EvaluationReport | None = None
        self.status = TrainingStatus(state="starting", total_steps=settings.steps)

    def resume(self, state: TrainingState) -> None:
        """Go on after `state`; the adapter and the optimizer were restored on the device thread already."""
        self._step = state.step
        self._parts.collector.stream.cursor = int(state.counters["cursor"])
        self._idle_steps = int(state.counters["idle_steps"])
        self._best = state.counters["best"]

    def stop(self) -> None:
        """Finish the present step, save, and leave."""
        self._stopping = True

    async def run(self) -> None:
        """Raises TrainingStopped when no problem teaches anything, and whatever a part raises."""
        try:
            await self._run()
        except Exception as error:
            self._set("failed", message=str(error))
            raise
        self._set("finished")

    async def _run(self) -> None:
        if self._step == 0:
            await self._evaluate()
        while self._step < self._settings.steps and not self._stopping:
            await self._one_step()
            is_last = self._step >= self._settings.steps or self._stopping
            if is_last or (self._settings.evaluate_every and self._step % self._settings.evaluate_every == 0):
                await self._evaluate()
            if is_last or self._step % self._save_every == 0:
                await self._save(must=is_last)

    async def _one_step(self) -> None:
        began, served = time.perf_counter(), self._served()
        self._set("collecting")
        collection = await self._parts.collector.collect(self._step, POLICY)
        self._set("updating")
        update_began = time.perf_counter()
        update = await self._update(collection)
        metrics = step_metrics(
            step=self._step + 1,
            collection=collection,
            update=update,
            update_seconds=time.perf_counter() - update_began,
            total_seconds=time.perf_counter() - began,
            served_tokens=self._served() - served,
        )
        self._step += 1
        self._parts.recorder.step(metrics, collection.sampled)
        self._parts.display.step(metrics)
        self.status = replace(self.status, metrics=metrics.to_flat())
        self._check_signal(collection)

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
            await self._publish()
        else:
            logger.warning("step %d changed nothing: %s", self._step + 1, report.skipped)
        return report

    async def _publish(self) -> None:
        adapter = self._parts.learner.adapter
        await asyncio.wrap_future(self._parts.device.call(lambda: self._parts.adapters.publish(adapter)))

    async def _evaluate(self) -> None:
        if self._parts.evaluator is None:
            return
        self._set("evaluating")
        version = self._parts.learner.adapter.version
        report = await self._parts.evaluator.evaluate(self._step, version, POLICY)
        self._latest = report
        self._parts.recorder.evaluation(report)
        self._parts.display.evaluation(report)
        if version > 0 and (self._best is None or report.accuracy > self._best):
            self._best = report.accuracy
            await asyncio.wrap_future(
                self._parts.device.call(lambda: self._parts.adapters.set_alias(BEST, version))
            )

    async def _save(self, must: bool) -> None:
        """A full disk costs a checkpoint, not the run; only at the end there is nothing left to go on with."""
        self._set("saving")
        is_fresh = self._latest is not None and self._latest.step == self._step
        score = self._latest.accuracy if self._latest is not None and is_fresh else None
        learner = self._parts.learner
        state = TrainingState(
            step=self._step,
            version=learner.adapter.version,
            adapter=learner.adapter,
            optimizer=learner.optimizer_state(),
            schedule_step=self._step,
            counters={
                "cursor": self._parts.collector.stream.cursor,
                "idle_steps": self._idle_steps,
                "best": self._best,
            },
            groups=(),  # strictly on-policy: what was sampled in a step is trained on in it
            score=score,
            fingerprint=self._parts.fingerprint,
        )
        try:
            await asyncio.wrap_future(self._parts.device.call(lambda: self._parts.checkpoints.save(state)))
        except CheckpointError as error:
            if must:
                raise
            logger.error("%s; training goes on, the next try is in %d steps", error, self._save_every)

    def _check_signal(self, collection: Collection) -> None:
        self._idle_steps = 0 if collection.with_signal else self._idle_steps + 1
        if self._idle_steps >= self._rollout.max_idle_steps:
            rewards = sorted({reward for group in collection.sampled for reward in group.rewards})
            raise TrainingStopped(
                f"in {self._idle_steps} steps every completion of a problem got the same reward (the last ones: "
                f"{rewards[:5]}), so there is nothing to learn from; choose problems that the model solves sometimes, "
                "raise rollout.group_size or rollout.temperature, or check the environment's score"
            )

    def _served(self) -> int:
        return self._parts.engine.stats().tokens_total["serving"]

    def _set(self, state: State, message: str = "") -> None:
        self.status = replace(
            self.status, state=state, step=self._step, version=self._parts.learner.adapter.version, message=message
        )
        self._parts.display.phase(self.status)
