"""What a reward model says about held-out pairs. Axes: P pairs."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from parallm.device.thread import DeviceThread
from parallm.learner.pairs import to_prompted
from parallm.learner.reward_learner import RewardLearner
from parallm.reports import Evaluation, EvaluationReport
from parallm.rollout.estimates import mean_estimate, share_estimate
from parallm.rollout.evaluation import Progress
from parallm.types import TrajectoryGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class PairEvaluator:
    """Scores every pair with the learner's newest version. A pair counts as right if the chosen score is the higher."""

    device: DeviceThread
    learner: RewardLearner
    pairs: Sequence[TrajectoryGroup]
    center: float
    """Of the loss, see learner/reward_loss.py."""

    async def evaluate(self, step: int, version: int, model: str, progress: Progress) -> Evaluation:
        """Accuracy, margin, loss and mean score. `model` and `progress` are for evaluators that ask the engine."""
        scores = await asyncio.wrap_future(self.device.score(self._units()))
        assert scores is not None, "scoring ends with the scores"
        margins = [chosen - rejected for chosen, rejected in zip(scores[0::2], scores[1::2], strict=True)]
        accuracy = share_estimate(sum(margin > 0 for margin in margins), len(margins))
        report = EvaluationReport(
            step=step,
            version=version,
            num_problems=len(margins),
            accuracy=accuracy.mean,
            low=accuracy.low,
            high=accuracy.high,
            reward=mean_estimate(scores),
            margin=mean_estimate(margins, low=-1.0),
            loss=self._loss(scores),
        )
        return Evaluation(report=report)

    def _loss(self, scores: Sequence[float]) -> float:
        chosen_P, rejected_P = np.array(scores[0::2]), np.array(scores[1::2])
        margin_P = np.array([pair.rewards[0] - pair.rewards[1] for pair in self.pairs])
        losses_P = np.logaddexp(0.0, rejected_P + margin_P - chosen_P) + self.center * (chosen_P + rejected_P) ** 2
        return float(losses_P.mean())

    def _units(self) -> Iterator[list[float] | None]:
        yield from self.learner.scorer().units([to_prompted(pair) for pair in self.pairs])
