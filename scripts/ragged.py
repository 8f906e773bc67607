"""An environment whose completions are of very different lengths, and of which about half are rewarded."""

from collections.abc import Mapping, Sequence

from parallm.environment.arithmetic import Arithmetic
from parallm.environment.settings import ArithmeticSettings
from parallm.types import Problem, Split


class Ragged:
    """Arithmetic problems whose answers are rewarded by a bit of their text: every group has a signal, at any length.

    The lengths come from sampling the embedded model at a high temperature: most completions end soon, some go on.
    """

    weights: Mapping[str, float] = {"even": 1.0}

    def __init__(self) -> None:
        self._arithmetic = Arithmetic(ArithmeticSettings(num_train=1024))

    def problems(self, split: Split) -> Sequence[Problem]:
        return self._arithmetic.problems(split)

    def score(self, problem: Problem, text: str) -> Mapping[str, float]:
        return {"even": float(sum(text.encode()) % 2 == 0)}
