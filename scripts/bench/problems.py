"""Problems and environments of measurements."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

from parallm.environment.arithmetic import Arithmetic
from parallm.environment.gsm8k import Gsm8k
from parallm.environment.settings import ArithmeticSettings, Gsm8kSettings
from parallm.types import Problem, Split


def make_environment(data: str | None, limit: int) -> Arithmetic | Gsm8k:
    """The environment whose train split is the `limit` problems of a measurement."""
    if data is None:
        return Arithmetic(ArithmeticSettings(num_train=limit))
    return Gsm8k(Gsm8kSettings(path=data, limit=limit))


def load_problems(data: str | None, limit: int) -> Sequence[Problem]:
    return make_environment(data, limit).problems("train")


def questions(data: str | None, limit: int) -> list[str]:
    return [problem.messages[-1].content for problem in load_problems(data, limit)]


def environment_overrides(data: str | None, limit: int) -> list[str]:
    """The same problems as overrides of `python -m parallm.train`."""
    if data is None:
        return ["environment=arithmetic", f"environment.num_train={limit}"]
    return ["environment=gsm8k", f"environment.path={data}", f"environment.limit={limit}"]


class Ragged(Arithmetic):
    """Arithmetic problems whose answers are rewarded by a bit of their text: every group has signal, at any length."""

    weights: ClassVar[Mapping[str, float]] = {"even": 1.0}

    def __init__(self) -> None:
        super().__init__(ArithmeticSettings(num_train=1024))

    def score(self, problem: Problem, text: str) -> Mapping[str, float]:
        return {"even": float(sum(text.encode()) % 2 == 0)}


class Lottery(Arithmetic):
    """Arithmetic problems that are rewarded at random: every group has signal, even where no text makes sense."""

    weights: ClassVar[Mapping[str, float]] = {"luck": 1.0}

    def __init__(self) -> None:
        super().__init__(ArithmeticSettings(num_train=1024))

    def score(self, problem: Problem, text: str) -> Mapping[str, float]:
        return {"luck": random.random()}


class Anonymous(Lottery):
    """Such problems that share one id."""

    def problems(self, split: Split) -> Sequence[Problem]:
        return [replace(problem, problem_id="any") for problem in super().problems(split)]


class Unpaid(Arithmetic):
    """Arithmetic that says which answers are right and pays nothing for them."""

    weights: ClassVar[Mapping[str, float]] = {}

    def __init__(self) -> None:
        super().__init__(ArithmeticSettings(num_test=256))
