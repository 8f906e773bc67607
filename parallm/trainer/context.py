"""The parts of one training run. `run/build_trainer.py` makes it, the trainer drives it."""

from collections.abc import Callable
from dataclasses import dataclass

from parallm.checkpoint.manager import CheckpointManager
from parallm.checkpoint.state import Fingerprint, RunFacts
from parallm.device.thread import DeviceThread
from parallm.engine.async_engine import AsyncEngine
from parallm.learner.learner import Learner
from parallm.learner.reward_model import RewardLearner
from parallm.metrics.display import Display
from parallm.metrics.record import RunRecorder
from parallm.model.adapters.table import AdapterTable
from parallm.rollout.collector import Collector
from parallm.rollout.evaluation import Evaluator
from parallm.tasks.encoder_learner import EncoderLearner
from parallm.trainer.encoder_evaluators import EncoderEvaluator
from parallm.trainer.evaluators import DemonstrationEvaluator, PairEvaluator
from parallm.trainer.pacing import Evaluate, Pacing, Save
from parallm.trainer.rollout_record import RolloutRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerContext:
    """Parts that touch arrays are called through `device`."""

    device: DeviceThread
    engine: AsyncEngine
    learner: Learner | RewardLearner | EncoderLearner
    adapters: AdapterTable
    collector: Collector
    evaluator: Evaluator | PairEvaluator | DemonstrationEvaluator | EncoderEvaluator | None
    checkpoints: CheckpointManager
    fingerprint: Fingerprint
    facts: RunFacts
    recorder: RunRecorder
    display: Display
    rollouts: RolloutRecord | None = None
    """What keeps the completions of each step for people to read; None: `metrics.rollouts=off`."""
    make_pacing: Callable[[Save, Evaluate], Pacing] = Pacing
    """Called with what saves and what evaluates between two steps."""

    @property
    def policy(self) -> str:
        """Name of the trained adapter."""
        return self.learner.adapter.name
