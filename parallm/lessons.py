"""What one policy or reward model learns from; read before the model, since a large one takes minutes to load."""

from collections.abc import Sequence
from dataclasses import dataclass

from parallm.config import RunConfig
from parallm.environment.environment import AnyEnvironment, build_environment
from parallm.learner.demonstrations import read_demonstrations
from parallm.learner.pairs import Pairs, read_pairs
from parallm.rollout.splits import Splits, read_splits
from parallm.trainer.reward_training import find_reward_model
from parallm.types import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Lessons:
    environment: AnyEnvironment
    splits: Splits
    demonstrations: Sequence[Problem] | None
    """Of a supervised run."""
    pairs: Pairs | None
    """Of a run that trains a reward model."""

    @property
    def has_held_out(self) -> bool:
        """Whether there is something to evaluate on."""
        return bool(self.splits.test if self.pairs is None else self.pairs.held_out)


def read_lessons(config: RunConfig) -> Lessons:
    """Raises ConfigError, ProblemError, and AdapterError for a reward model that is not there."""
    find_reward_model(config.rollout.reward_model)
    demonstrations, pairs = read_demonstrations(config.learner), read_pairs(config.learner)
    environment = build_environment(config.environment)
    splits = read_splits(environment, config.trainer.evaluate_problems)  # may download, so it comes last
    return Lessons(environment=environment, splits=splits, demonstrations=demonstrations, pairs=pairs)
