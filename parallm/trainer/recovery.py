"""Acts on the guard's verdicts: says what was wrong, keeps the trajectories to blame, rolls back."""

import asyncio
import logging
from collections.abc import Sequence

from parallm.learner.faults import named_culprits
from parallm.metrics.step import StepMetrics
from parallm.trainer.fault_files import write_faults
from parallm.trainer.guard import Guard, Verdict
from parallm.trainer.parts import Parts
from parallm.trainer.publication import Publication
from parallm.types import TrajectoryGroup

logger = logging.getLogger(__name__)


class Recovery:
    """Runs on the asyncio thread, after the update of a step and before the step counts as finished."""

    def __init__(self, parts: Parts, guard: Guard, publication: Publication) -> None:
        self._parts = parts
        self._guard = guard
        self._publication = publication

    async def after(
        self, metrics: StepMetrics, *, trained: Sequence[TrajectoryGroup], sampled: Sequence[TrajectoryGroup] = ()
    ) -> Verdict:
        """Judge the step and act on it, but for stopping the run, which is the caller's to do.

        `trained` are the groups that the update has seen, `sampled` all groups if the policy has sampled any.
        """
        verdict = self._guard.judge(metrics, sampled)
        for text in verdict.warnings:
            logger.warning("step %d: %s", metrics.step, text)
        if metrics.update is not None and metrics.update.left_out:
            left_out = metrics.update.left_out
            logger.warning(
                "step %d: %d completions were left out of training, whose rewards float32 cannot hold (%s)",
                metrics.step,
                len(left_out),
                named_culprits(left_out),
            )
        if metrics.update is not None and metrics.update.fault is not None:
            logger.warning("step %d: %s", metrics.step, verdict.reason)
        folder = self._parts.recorder.folder
        file = write_faults(folder, metrics.step, update=metrics.update, trained=trained, sampled=sampled)
        if file is not None:
            logger.warning("step %d: the trajectories to blame are in %s", metrics.step, file)
        if verdict.action == "roll_back":
            await self._roll_back(metrics.step)
        return verdict

    async def _roll_back(self, step: int) -> None:
        bad = self._parts.learner.adapter
        good = await asyncio.wrap_future(self._parts.device.call(self._parts.learner.roll_back))
        if good is bad:
            logger.warning("step %d: there is no update to undo; training goes on with version %d", step, bad.version)
            return
        self._publication.roll_back(good)
        logger.warning(
            "step %d: rolled back from version %d to the weights of version %s, which are version %d now; requests "
            "that run finish on the version they began with",
            step,
            bad.version,
            good.parent,
            good.version,
        )
