"""Settings of environments: one class per environment, chosen by `name`."""

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field

from parallm.settings import settings


@settings
class ArithmeticSettings:
    name: Literal["arithmetic"] = "arithmetic"
    seed: int = 0
    """Seed of the problems; the same seed makes the same problems."""
    levels: tuple[Literal[1, 2, 3], ...] = Field(default=(1, 2, 3), min_length=1)
    """Difficulties to mix: 1 has one step, 2 and 3 have two or three and more to overlook."""
    num_train: int = Field(default=4096, ge=1, le=50_000)
    """Problems to train on."""
    num_test: int = Field(default=512, ge=1, le=5_000)
    """Held-out problems."""


@settings
class Gsm8kSettings:
    name: Literal["gsm8k"] = "gsm8k"
    path: str = "openai/gsm8k"
    """Hub id of the dataset, a folder with train.jsonl and test.jsonl, or one jsonl file."""
    limit: int | None = Field(default=None, ge=1)
    """Use only the first problems of the train split."""
    reading: Literal["strict", "lenient"] = "strict"
    """strict: the number after `####`; lenient: else the last number of the text."""
    format_weight: float = Field(default=0.0, ge=0)
    """Weight of the reward part for the form of the answer; the correctness part weighs 1."""


@settings
class CustomSettings:
    name: Literal["custom"] = "custom"
    target: str
    """`package.module:Class`: an own environment, made as `Class(**options)`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the class, by name."""


@settings
class CalculatorSettings:
    name: Literal["calculator"] = "calculator"
    problems: ArithmeticSettings = ArithmeticSettings()
    """The word problems to solve with the calculator."""


@settings
class VerifiersSettings:
    name: Literal["verifiers"] = "verifiers"
    id: str
    """An installed environment of the package verifiers: its id, `owner/name` or the name of its module."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Values of the taskset's configuration, or arguments of its `load_environment`."""
    test_options: dict[str, Any] | None = None
    """Options that differ for held-out problems, such as {split: test}; null: the first problems of the same data are
    held out."""
    num_train: int | None = Field(default=None, ge=1)
    """Problems to train on; null: all that there are."""
    num_test: int = Field(default=100, ge=0)
    """Problems to hold out."""
    correct_at: float = 1.0
    """An episode counts as right from this reward on, where the environment has no reward of the name `correct`."""


SingleSettings: TypeAlias = ArithmeticSettings | Gsm8kSettings | CustomSettings | CalculatorSettings | VerifiersSettings


@settings
class MixedPart:
    weight: float = Field(default=1.0, gt=0)
    """How often it is drawn, in proportion to the other parts."""
    environment: Annotated[SingleSettings, Field(discriminator="name")]
    """Settings of one environment; its `name` chooses which."""


@settings
class MixedSettings:
    name: Literal["mixed"] = "mixed"
    parts: dict[str, MixedPart] = Field(min_length=1)
    """Environments by a name of your choice, under which their problems and metrics appear."""


EnvironmentSettings = Annotated[SingleSettings | MixedSettings, Field(discriminator="name")]
