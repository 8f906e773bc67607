"""Evaluators of held-out demonstrations and pairs, and what pass@k samples. `Evaluations` calls them. Axes: P pairs."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from parallm.device.thread import DeviceThread
from parallm.learner.learner import Learner
from parallm.learner.passes.scoring import TokenLoss
from parallm.learner.reward_model import RewardLearner, to_scoring_request
from parallm.reports import Evaluation, EvaluationReport
from parallm.rollout.confidence_intervals import mean_estimate, share_estimate
from parallm.rollout.evaluation import Evaluator, Progress, Samples
from parallm.trainer.settings import EvaluationSettings
from parallm.types import TrajectoryGroup


def evaluation_samples(settings: EvaluationSettings, seed: int) -> Samples | None:
    """The samples for pass@k; None if there are none."""
    if not settings.evaluate_samples:
        return None
    return Samples(
        count=settings.evaluate_samples,
        temperature=settings.evaluate_temperature,
        ks=settings.evaluate_k or tuple(sorted({1, settings.evaluate_samples})),
        seed=seed,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DemonstrationEvaluator:
    """Scores held-out demonstrations with the learner's newest version, without sampling."""

    device: DeviceThread
    learner: Learner
    demonstrations: Sequence[TrajectoryGroup]
    environment: Evaluator | None
    """Runs on its held-out problems after the demonstrations; None: no environment."""

    async def evaluate(self, step: int, version: int, model: str, progress: Progress) -> Evaluation:
        """The loss in nats per token, and the environment's evaluation if there is one."""
        units = self._units(progress, asyncio.get_running_loop())
        loss = await asyncio.wrap_future(self.device.score(units))
        evaluation = Evaluation(report=EvaluationReport(step=step, version=version))
        if self.environment is not None:
            evaluation = await self.environment.evaluate(step, version, model, progress)
        report = replace(evaluation.report, loss=loss.mean, num_demonstrations=loss.num_completions)
        return replace(evaluation, report=report)

    def _units(self, progress: Progress, loop: asyncio.AbstractEventLoop) -> Iterator[TokenLoss]:
        """Runs on the device thread."""
        for loss in self.learner.losses(self.demonstrations):
            loop.call_soon_threadsafe(progress, loss.num_completions, len(self.demonstrations))
            yield loss


@dataclass(frozen=True, slots=True, kw_only=True)
class PairEvaluator:
    """Scores held-out pairs with the newest version. A pair is right if the chosen completion scores higher."""

    device: DeviceThread
    learner: RewardLearner
    pairs: Sequence[TrajectoryGroup]
    center: float
    """`learner.center_scores`."""

    async def evaluate(self, step: int, version: int, model: str, progress: Progress) -> Evaluation:
        """Accuracy, margin, loss and mean score. `model` and `progress` are unused here."""
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
        yield from self.learner.scorer().units([to_scoring_request(pair) for pair in self.pairs])
