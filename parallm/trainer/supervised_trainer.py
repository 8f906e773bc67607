"""The loop of supervised training: demonstrations -> update -> publish -> evaluate -> save."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from parallm.checkpoint.state import TrainingState
from parallm.learner.datasets import to_group
from parallm.learner.learner import Learner
from parallm.metrics.step import StepMetrics
from parallm.model.shared_model import SharedModel
from parallm.reports import UpdateReport
from parallm.rollout.evaluation import Evaluator
from parallm.rollout.problems import ProblemStream
from parallm.trainer.context import TrainerContext
from parallm.trainer.evaluators import DemonstrationEvaluator
from parallm.trainer.guard import Verdict
from parallm.trainer.loop import Loop
from parallm.trainer.settings import TrainerSettings
from parallm.types import Problem, TrajectoryGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisedData:
    """What to imitate, in shuffled epochs."""

    groups: Mapping[str, TrajectoryGroup]
    """By the id of their problem."""
    stream: ProblemStream
    per_step: int

    def take(self) -> list[TrajectoryGroup]:
        """Those of the next step."""
        return [self.groups[problem.problem_id] for problem in self.stream.take(self.per_step)]


def tokenize_demonstrations(
    problems: Sequence[Problem], model: SharedModel, *, per_step: int, seed: int
) -> SupervisedData:
    """Demonstrations as this model reads and writes them. Raises ProblemError for one that is too long for it."""
    groups = {one.problem_id: to_group(one, model.tokenizer, model.max_context) for one in problems}
    return SupervisedData(groups=groups, stream=ProblemStream(problems, seed), per_step=per_step)


def add_held_out_loss(parts: TrainerContext, problems: Sequence[Problem], model: SharedModel) -> TrainerContext:
    """`parts` whose evaluations score these demonstrations, and then do what those of `parts` do, if anything.

    Raises ProblemError for one that is too long for the model.
    """
    if not problems:
        return parts
    assert isinstance(parts.learner, Learner), "reward models have pairs"
    assert parts.evaluator is None or isinstance(parts.evaluator, Evaluator), "the one of an environment"
    evaluator = DemonstrationEvaluator(
        device=parts.device,
        learner=parts.learner,
        demonstrations=[to_group(one, model.tokenizer, model.max_context) for one in problems],
        environment=parts.evaluator,
    )
    return replace(parts, evaluator=evaluator)


class SupervisedTrainer(Loop):
    """Takes the demonstrations of each step from their stream. `parts.collector` stays unused."""

    def __init__(
        self, parts: TrainerContext, demonstrations: SupervisedData, settings: TrainerSettings, *, save_every: int
    ) -> None:
        # nothing was sampled that log-probs could be compared with
        super().__init__(parts, settings, compares=False, save_every=save_every)
        self._demonstrations = demonstrations
        self._cursor = demonstrations.stream.cursor  # that the last finished step has left

    def resume(self, state: TrainingState) -> None:
        super().resume(state)
        if self._context.facts.draws_same_problems(state.facts):
            self._cursor = self._demonstrations.stream.cursor = int(state.counters["cursor"])

    async def _one_step(self) -> Verdict:
        began, served = time.perf_counter(), self._served()
        self._set("updating")
        groups = self._demonstrations.take()
        update = await self._update(groups, max_tokens=1)
        seconds = time.perf_counter() - began
        metrics = _metrics(self._step + 1, groups, update, seconds, (self._served() - served) / max(seconds, 1e-9))
        verdict = await self._judge(metrics, trained=groups)
        self._cursor = self._demonstrations.stream.cursor
        self._finish(metrics)
        return verdict

    def _counters(self) -> Mapping[str, Any]:
        return {"cursor": self._cursor}


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
