"""The loop of training on what clients have rewarded, of which nothing is lost and nothing is trained on twice."""

from collections.abc import Sequence

from parallm.metrics.step import StepMetrics
from parallm.rollout.live.traffic import LiveTraffic
from parallm.rollout.settings import RolloutSettings
from parallm.trainer.guard import Verdict
from parallm.trainer.live_trainer import LiveTrainer
from parallm.trainer.parts import Parts
from parallm.trainer.settings import TrainerSettings
from parallm.types import TrajectoryGroup


class ClientTrainer(LiveTrainer):
    """Reports to `traffic` what became of the trajectories that a step took: saved, failed or undone."""

    def __init__(
        self,
        parts: Parts,
        traffic: LiveTraffic,
        settings: TrainerSettings,
        rollout: RolloutSettings,
        *,
        save_every: int,
    ) -> None:
        super().__init__(parts, traffic, settings, rollout, save_every=save_every)
        self._traffic = traffic

    def _on_save(self, step: int) -> None:
        self._traffic.saved(step)

    async def _one_step(self) -> Verdict:
        try:
            return await super()._one_step()
        except Exception:  # it ends the run, which must not begin with the same for ever
            self._traffic.failed(self._step + 1, ())
            raise

    async def _judge(
        self, metrics: StepMetrics, *, trained: Sequence[TrajectoryGroup], sampled: Sequence[TrajectoryGroup] = ()
    ) -> Verdict:
        before, update = self._parts.learner.adapter, metrics.update
        verdict = await super()._judge(metrics, trained=trained, sampled=sampled)
        if update is not None and update.fault is not None:
            self._traffic.failed(metrics.step, [(one.group, one.index) for one in update.culprits])
        elif update is not None and update.skipped is None and update.has_moved:
            self._traffic.learned()
        after = self._parts.learner.adapter
        if after is not before:
            assert after.parent is not None, "a roll-back goes back to a version"
            self._traffic.undone(after.parent, after.version)
        return verdict
