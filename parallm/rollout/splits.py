"""The problems of a run, read once: what it trains on and what it is evaluated on."""

from collections.abc import Sequence
from dataclasses import dataclass

from parallm.environment.environment import AnyEnvironment
from parallm.errors import ProblemError
from parallm.types import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Splits:
    train: Sequence[Problem]
    test: Sequence[Problem]
    """Held out; empty where nothing is evaluated."""


def read_splits(environment: AnyEnvironment, num_test: int) -> Splits:
    """All training problems and the first `num_test` held-out ones; with 0 the test split is not asked for.

    Raises ProblemError if there is nothing to train on, and what reading raises.
    """
    train = environment.problems("train")
    if not train:
        raise ProblemError("the environment's train split has no problems, so there is nothing to train on")
    return Splits(train=train, test=environment.problems("test")[:num_test] if num_test else ())
