"""The loss of held-out demonstrations, and what the trained policy does in an environment where one was asked for."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from parallm.device.thread import DeviceThread
from parallm.learner.learner import Learner
from parallm.learner.token_loss import TokenLoss
from parallm.reports import Evaluation, EvaluationReport
from parallm.rollout.evaluation import Evaluator, Progress
from parallm.types import TrajectoryGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class DemonstrationEvaluator:
    """Scores every demonstration with the learner's newest version, without sampling."""

    device: DeviceThread
    learner: Learner
    demonstrations: Sequence[TrajectoryGroup]
    environment: Evaluator | None
    """Its held-out problems are played after the demonstrations were scored."""

    async def evaluate(self, step: int, version: int, model: str, progress: Progress) -> Evaluation:
        """The loss in nats per token, together with the environment's evaluation if there is one."""
        units = self._units(progress, asyncio.get_running_loop())
        loss = await asyncio.wrap_future(self.device.score(units))
        found = Evaluation(report=EvaluationReport(step=step, version=version))
        if self.environment is not None:
            found = await self.environment.evaluate(step, version, model, progress)
        report = replace(found.report, loss=loss.mean, num_demonstrations=loss.num_completions)
        return replace(found, report=report)

    def _units(self, progress: Progress, loop: asyncio.AbstractEventLoop) -> Iterator[TokenLoss]:
        """Runs on the device thread."""
        for loss in self.learner.losses(self.demonstrations):
            loop.call_soon_threadsafe(progress, loss.num_completions, len(self.demonstrations))
            yield loss
