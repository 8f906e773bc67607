"""What a reward model says about held-out pairs."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from parallm.device.thread import DeviceThread
from parallm.learner.pairs import to_prompted
from parallm.learner.reward_learner import RewardLearner
from parallm.reports import EvaluationReport
from parallm.rollout.estimates import mean_estimate, wilson_interval
from parallm.types import TrajectoryGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class PairEvaluator:
    """Scores every pair with the learner's newest version. A pair counts as right if the chosen score is the higher."""

    device: DeviceThread
    learner: RewardLearner
    pairs: Sequence[TrajectoryGroup]

    async def evaluate(self, step: int, version: int, model: str) -> EvaluationReport:
        """Accuracy, margin and mean score; `model` names the same version for whoever asks an engine."""
        scores = await asyncio.wrap_future(self.device.score(self._units()))
        assert scores is not None, "scoring ends with the scores"
        chosen, rejected = scores[0::2], scores[1::2]
        margins = [one - other for one, other in zip(chosen, rejected, strict=True)]
        num_right = sum(margin > 0 for margin in margins)
        low, high = wilson_interval(num_right, len(margins))
        return EvaluationReport(
            step=step,
            version=version,
            num_problems=len(margins),
            accuracy=num_right / len(margins),
            low=low,
            high=high,
            reward=mean_estimate(scores),
            reward_parts={},
            margin=mean_estimate(margins),
        )

    def _units(self) -> Iterator[list[float] | None]:
        yield from self.learner.scorer().units([to_prompted(pair) for pair in self.pairs])
