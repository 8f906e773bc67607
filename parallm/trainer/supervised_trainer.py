"""Supervised training: demonstrations or pairs -> update -> publish -> evaluate -> save."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from parallm.checkpoint.state import TrainingState
from parallm.learner.datasets import Example, to_group
from parallm.learner.learner import Learner
from parallm.model.shared_model import SharedModel
from parallm.rollout.collector import RolloutBatch
from parallm.rollout.evaluation import Evaluator
from parallm.rollout.problems import ProblemStream
from parallm.trainer.context import TrainerContext
from parallm.trainer.evaluators import DemonstrationEvaluator
from parallm.trainer.guard import Verdict
from parallm.trainer.loop import Loop
from parallm.trainer.settings import TrainerSettings
from parallm.trainer.step_metrics import step_metrics
from parallm.types import TrajectoryGroup


def tokenize(examples: Sequence[Example], model: SharedModel) -> list[TrajectoryGroup]:
    """Raises ProblemError for an example that cannot be used."""
    return [to_group(example, model.tokenizer, model.max_context) for example in examples]


def add_held_out_loss(context: TrainerContext, held_out: Sequence[TrajectoryGroup]) -> TrainerContext:
    """`context` whose evaluations also score these demonstrations."""
    if not held_out:
        return context
    assert isinstance(context.learner, Learner), "reward models have pairs"
    assert context.evaluator is None or isinstance(context.evaluator, Evaluator), "an environment's evaluator"
    evaluator = DemonstrationEvaluator(
        device=context.device, learner=context.learner, demonstrations=held_out, environment=context.evaluator
    )
    return replace(context, evaluator=evaluator)


class SupervisedTrainer(Loop):
    """Trains on demonstrations or pairs; samples nothing."""

    def __init__(
        self,
        context: TrainerContext,
        groups: Sequence[TrajectoryGroup],
        stream: ProblemStream,
        settings: TrainerSettings,
        *,
        per_step: int,
    ) -> None:
        """`stream`: the problems of `groups` in shuffled epochs."""
        super().__init__(context, settings)
        self._groups = {group.problem.problem_id: group for group in groups}
        self._stream = stream
        self._per_step = per_step
        self._cursor = 0  # draws of finished steps

    def resume(self, state: TrainingState) -> None:
        super().resume(state)
        if self._context.facts.draws_same_problems(state.facts):
            self._cursor = int(state.counters["cursor"])

    async def _one_step(self) -> Verdict:
        began, served = time.perf_counter(), self._served()
        self._set("updating")
        indices = range(self._cursor, self._cursor + self._per_step)
        groups = [self._groups[self._stream.at(index).problem_id] for index in indices]
        update = await self._update(groups, max_tokens=1)
        seconds = time.perf_counter() - began
        metrics = step_metrics(
            step=self._step + 1,
            rollout_batch=RolloutBatch(first=(), sampled=(), seconds=0.0),
            update=update,
            update_seconds=seconds,
            total_seconds=seconds,
            served_tokens=self._served() - served,
        )
        length = fmean(len(group.trajectories[0].tokens) for group in groups)
        metrics = replace(metrics, completion_length_mean=length, is_supervised=True)
        verdict = await self._judge(metrics, trained=groups)
        self._cursor += self._per_step
        self._finish(metrics)
        return verdict

    def _counters(self) -> Mapping[str, Any]:
        return {"cursor": self._cursor}
