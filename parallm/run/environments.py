"""Builds the environment that settings choose. Called before the model of a run is loaded."""

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
