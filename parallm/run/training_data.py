"""The training data of one policy or reward model, read before the model, which may take minutes to load."""

from dataclasses import dataclass

from parallm.config.run_kinds import plays_environment
from parallm.config.schema import RunConfig
from parallm.environment.arithmetic import Arithmetic, Calculator
from parallm.environment.custom import make_custom
from parallm.environment.environment import AnyEnvironment, Mixed
from parallm.environment.gsm8k import Gsm8k
from parallm.environment.settings import (
    ArithmeticSettings,
    CalculatorSettings,
    CustomSettings,
    EnvironmentSettings,
    Gsm8kSettings,
    MixedSettings,
    VerifiersSettings,
)
from parallm.integrations.verifiers.environment import load_verifiers
from parallm.learner.datasets import Dataset, read_dataset
from parallm.rollout.problems import ProblemSplits, load_problems
from parallm.trainer.reward_training import find_reward_model


def build_environment(settings: EnvironmentSettings) -> AnyEnvironment:
    """Make the environment that `settings` chooses. Raises ConfigError or ProblemError."""
    match settings:
        case ArithmeticSettings():
            return Arithmetic(settings)
        case CalculatorSettings():
            return Calculator(settings)
        case Gsm8kSettings():
            return Gsm8k(settings)
        case CustomSettings():
            environment: AnyEnvironment = make_custom(settings)
            return environment
        case VerifiersSettings():
            return load_verifiers(settings)
        case MixedSettings():
            return Mixed(
                environments={name: build_environment(part.environment) for name, part in settings.parts.items()},
                shares={name: part.weight for name, part in settings.parts.items()},
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingData:
    environment: AnyEnvironment
    splits: ProblemSplits
    given: Dataset | None
    """Demonstrations of a supervised run, or pairs of one that trains a reward model."""

    @property
    def has_held_out(self) -> bool:
        """Whether there is something to evaluate on."""
        return bool(self.splits.test) or (self.given is not None and bool(self.given.held_out))


def read_training_data(config: RunConfig, environment: AnyEnvironment | None = None) -> TrainingData:
    """Read the data that `config` names; `environment` replaces the one that it names.

    Raises ConfigError, ProblemError, and AdapterError for a missing reward model.
    """
    find_reward_model(config.rollout.reward_model)
    num_held_out = config.trainer.evaluate_problems
    given = read_dataset(config.learner, holds_out=num_held_out > 0)
    environment = build_environment(config.environment) if environment is None else environment
    num_played = num_held_out if plays_environment(config) else 0
    splits = load_problems(environment, num_played)  # last, since it may download
    return TrainingData(environment=environment, splits=splits, given=given)
