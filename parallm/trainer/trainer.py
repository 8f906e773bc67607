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
from parallm.errors import CheckpointError, ParallmError, TrainingStopped
from parallm.learner.learner import Learner
from parallm.metrics.display import Display
from parallm.metrics.record import RunRecorder
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mark:
    """What a finished step has left: a step that fails in its middle must not count in a checkpoint."""

    cursor: int
    version: int


class Trainer:
    """Runs on the asyncio thread; what touches arrays goes to the device thread.

    Loop contract: consumes problems and completions / waits for the engine, then for the update / produces adapter
    versions, metrics and checkpoints / ends after the last step, when `stop` was called, or with an error.
    """

    def __init__(self, parts: Parts, settings: TrainerSettings, rollout: RolloutSettings, *, save_every: int) -> None:
        self._parts = parts
        self._settings = settings
        self._rollout = rollout
        self._save_every = save_every
        self._stopping = False
        self._step = 0  # finished steps
        self._saved_step = 0
        self._mark = self._present_mark()  # where the last finished step has left off
        self._idle_steps = 0  # in a row without a group with signal
        self._best: float | None = None
        self._latest: EvaluationReport | None = None
        self.status = TrainingStatus(state="starting", total_steps=settings.steps)

    def resume(self, state: TrainingState) -> None:
        """Go on after `state`; the adapter and the optimizer were restored on the device thread already."""
        self._step = self._saved_step = state.step
        self._mark = _Mark(cursor=int(state.counters["cursor"]), version=state.version)
        self._parts.collector.stream.cursor = self._mark.cursor
        self._idle_steps = int(state.counters["idle_steps"])
        self._best = state.counters["best"]

    def stop(self) -> None:
        """Finish the present step, save, and leave."""
        self._stopping = True

    @property
    def was_stopped(self) -> bool:
        return self._stopping

    async def run(self) -> None:
        """Raises TrainingStopped when no problem teaches anything, and whatever a part raises.

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
        while not self._is_over():
            await self._one_step()
            if self._evaluation_is_due():
                await self._evaluate()
            if self._step % self._save_every == 0 and not self._is_over():
                await self._try_save()
        if self._saved_step < self._step:
            await self._save()

    def _is_over(self) -> bool:
        return self._stopping or self._step >= self._settings.steps

    def _evaluation_is_due(self) -> bool:
        every = self._settings.evaluate_every
        return self._step >= self._settings.steps or (every > 0 and self._step % every == 0)

    def _present_mark(self) -> "_Mark":
        return _Mark(cursor=self._parts.collector.stream.cursor, version=self._parts.learner.adapter.version)

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
        self._idle_steps = 0 if collection.with_signal else self._idle_steps + 1
        self._mark = self._present_mark()
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
            self._parts.adapters.publish(self._parts.learner.adapter)
        else:
            logger.warning("step %d changed nothing: %s", self._step + 1, report.skipped)
        return report

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
            self._parts.adapters.set_alias(BEST, version)

    async def _try_save(self) -> None:
        """A full disk costs a checkpoint, not the run; only at the end there is nothing left to go on with."""
        try:
            await self._save()
        except CheckpointError as error:
            logger.error("%s; training goes on, the next try is in %d steps", error, self._save_every)

    async def _rescue(self) -> None:
        """Save what the steps before an error have learned, unless the error left a step half done."""
        if self._saved_step == self._step or self._parts.learner.adapter.version != self._mark.version:
            return
        try:
            await self._save()
        except ParallmError as error:
            logger.error("the steps since the last checkpoint are lost: %s", error)

    async def _save(self) -> None:
        """Save the state after the last finished step. Raises CheckpointError."""
        self._set("saving")
        state = self._state()
        await asyncio.wrap_future(self._parts.device.call(lambda: self._parts.checkpoints.save(state)))
        self._saved_step = self._step

    def _state(self) -> TrainingState:
        is_fresh = self._latest is not None and self._latest.step == self._step
        score = self._latest.accuracy if self._latest is not None and is_fresh else None
        learner = self._parts.learner
        return TrainingState(
            step=self._step,
            version=learner.adapter.version,
            adapter=learner.adapter,
            optimizer=learner.optimizer_state(),
            schedule_step=self._step,
            counters={
                "cursor": self._mark.cursor,
                "idle_steps": self._idle_steps,
                "best": self._best,
            },
            groups=(),  # strictly on-policy: what was sampled in a step is trained on in it
            score=score,
            fingerprint=self._parts.fingerprint,
        )

    def _check_signal(self, collection: Collection) -> None:
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
