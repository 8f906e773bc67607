"""The loop of supervised training: demonstrations -> update -> publish -> evaluate -> save."""

import asyncio
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from parallm.checkpoint.state import TrainingState
from parallm.errors import CheckpointError, TrainingStopped
from parallm.learner.demonstrations import to_group
from parallm.metrics.step import StepMetrics
from parallm.model.shared_model import SharedModel
from parallm.reports import TrainingStatus, UpdateReport
from parallm.rollout.problem_stream import ProblemStream
from parallm.trainer.evaluations import Evaluations
from parallm.trainer.guard import Guard
from parallm.trainer.parts import Parts
from parallm.trainer.publication import Publication
from parallm.trainer.recovery import Recovery
from parallm.trainer.saving import Saver
from parallm.trainer.settings import TrainerSettings
from parallm.trainer.trainer import State
from parallm.types import BEST, Problem, TrajectoryGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstrations:
    """What to imitate, in shuffled epochs."""

    groups: Mapping[str, TrajectoryGroup]
    """By the id of their problem."""
    stream: ProblemStream
    per_step: int

    def take(self) -> list[TrajectoryGroup]:
        """Those of the next step."""
        return [self.groups[problem.problem_id] for problem in self.stream.take(self.per_step)]


def tokenized(problems: Sequence[Problem], model: SharedModel, *, per_step: int, seed: int) -> Demonstrations:
    """Demonstrations as this model reads and writes them. Raises ProblemError for one that is too long for it."""
    groups = {one.problem_id: to_group(one, model.tokenizer, model.max_context) for one in problems}
    return Demonstrations(groups=groups, stream=ProblemStream(problems, seed), per_step=per_step)


class SupervisedTrainer:
    """Runs on the asyncio thread; what touches arrays goes to the device thread. `parts.collector` stays unused.

    Loop contract: consumes demonstrations / waits for the update / produces adapter versions, metrics and checkpoints /
    ends after the last step, when patience is over, when `stop` was called, or with an error.
    """

    def __init__(
        self, parts: Parts, demonstrations: Demonstrations, settings: TrainerSettings, *, save_every: int
    ) -> None:
        self._parts = parts
        self._demonstrations = demonstrations
        self._settings = settings
        self._evaluations = Evaluations(parts, settings)
        self._publication = Publication(parts.adapters, parts.policy, settings)
        self._guard = Guard(settings.guard, compares=False)  # nothing was sampled that log-probs could be compared with
        self._recovery = Recovery(parts, self._guard, self._publication)
        self._saver = Saver(parts.device, parts.checkpoints, self._state, every=save_every)
        self._stopping = asyncio.Event()
        self._step = 0  # finished steps
        self._cursor = demonstrations.stream.cursor  # that the last finished step has left
        self.status = TrainingStatus(state="starting", total_steps=settings.steps)

    def resume(self, state: TrainingState) -> None:
        """Go on after `state`; the adapter and the optimizer were restored on the device thread already."""
        self._step = self._saver.saved_step = state.step
        self._cursor = self._demonstrations.stream.cursor = int(state.counters["cursor"])
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
        """Raises TrainingStopped when the guard says so, and whatever a part raises."""
        try:
            await self._run()
        except Exception as error:
            if not isinstance(error, CheckpointError) and self._saver.saved_step < self._step:
                await self._saver.rescue()
            self._set("failed", message=str(error))
            raise
        self._set("finished")

    async def _run(self) -> None:
        if self._step == 0:
            await self._evaluate()
        while not self._is_over():
            await self._one_step()
            if self._evaluations.is_due(self._step):
                await self._evaluate()
            if self._saver.is_due(self._step) and not self._is_over():
                self._set("saving")
                await self._saver.try_save()
        if self._saver.saved_step < self._step:
            self._set("saving")
            await self._saver.save()

    def _is_over(self) -> bool:
        return self.was_stopped or self._step >= self._settings.steps or self._evaluations.is_hopeless

    async def _one_step(self) -> None:
        began, served = time.perf_counter(), self._served()
        self._set("updating")
        groups = self._demonstrations.take()
        update = await self._update(groups)
        self._step += 1
        self._cursor = self._demonstrations.stream.cursor
        seconds = time.perf_counter() - began
        metrics = _metrics(self._step, groups, update, seconds, (self._served() - served) / max(seconds, 1e-9))
        verdict = await self._recovery.after(metrics, trained=groups)
        metrics = replace(metrics, guard=self._guard.row())
        self._parts.recorder.step(metrics)
        self._parts.display.step(metrics)
        self.status = replace(self.status, metrics=metrics.to_flat())
        if verdict.action == "stop":
            raise TrainingStopped(verdict.reason)

    async def _update(self, groups: Sequence[TrajectoryGroup]) -> UpdateReport:
        units: Iterator[UpdateReport | None] = self._parts.learner.update(groups, step=self._step, max_tokens=1)
        report = await asyncio.wrap_future(self._parts.device.iterate(units))
        assert report is not None, "an update ends with its report"
        if report.skipped is None:
            self._publication.publish(self._parts.learner.adapter)
        return report

    async def _evaluate(self) -> None:
        self._set("evaluating")
        report = await self._evaluations.evaluate(self._step, self._stopping)
        if report is not None:
            self._publication.evaluated(report)

    def _state(self) -> TrainingState:
        learner = self._parts.learner
        return TrainingState(
            step=self._step,
            version=learner.adapter.version,
            adapter=learner.adapter,
            optimizer=learner.optimizer_state(),
            schedule_step=self._step,
            counters={
                "cursor": self._cursor,
                "publication": self._publication.counters(),
                "guard": self._guard.counters(),
                **self._evaluations.counters(),
            },
            groups=(),
            score=self._evaluations.score(self._step),
            fingerprint=self._parts.fingerprint,
        )

    def _served(self) -> int:
        return self._parts.engine.stats().tokens_total["serving"]

    def _set(self, state: State, message: str = "") -> None:
        self.status = replace(
            self.status, state=state, step=self._step, version=self._parts.learner.adapter.version, message=message
        )
        self._parts.display.phase(self.status)


def _metrics(
    step: int, groups: Sequence[TrajectoryGroup], update: UpdateReport, seconds: float, served_per_second: float
) -> StepMetrics:
    return StepMetrics(
        step=step,
        reward_mean=math.nan,
        reward_std=math.nan,
        groups_sampled=0,
        groups_with_signal=0,
        completion_length_mean=fmean(len(group.trajectories[0].tokens) for group in groups),
        truncated_fraction=0.0,
        rollout_tokens=0,
        rollout_seconds=0.0,
        update_seconds=seconds,
        total_seconds=seconds,
        rollout_tokens_per_second=0.0,
        serving_tokens_per_second=served_per_second,
        is_supervised=True,
        update=update,
    )
