"""Word problems with a calculator: the result of each sum that the model writes is appended for it."""

import re
from collections.abc import Mapping, Sequence

from parallm.environment.arithmetic import Arithmetic
from parallm.environment.settings import CalculatorSettings
from parallm.types import Message, Problem, Split

SUM = re.compile(
    r"(?:^|[^-+*.\d ]) ?(?P<first>-?\d{1,9})(?P<space> ?)(?P<sign>[-+*])(?P=space)(?P<second>\d{1,9}) ?= ?\Z",
    re.MULTILINE,
)
"""A sum of two whole numbers, without a third one before them, at the end of the text."""


class Calculator:
    """The problems and rewards of `Arithmetic`. A call is the beginning of a line such as `12 * 3 =`.

    The model stops at each equals sign. If a sum stands before it, the result is appended, and the model goes on.
    The part `calls`, which is not rewarded, counts the sums.
    """

    stop = ("=",)

    def __init__(self, settings: CalculatorSettings) -> None:
        self._arithmetic = Arithmetic(settings.problems)
        self.weights: Mapping[str, float] = self._arithmetic.weights

    def problems(self, split: Split) -> Sequence[Problem]:
        return self._arithmetic.problems(split)

    def reply(self, problem: Problem, turns: Sequence[Message]) -> Sequence[Message] | None:
        """Return the result of the sum at the end of the text, empty without a sum; None unless `=` ends the text."""
        text = "".join(turn.content for turn in turns)
        if not text.rstrip(" ").endswith("="):
            return None
        return [Message(role="assistant", content=result_after(text))]

    def score(self, problem: Problem, turns: Sequence[Message]) -> Mapping[str, float]:
        text = "".join(turn.content for turn in turns)
        calls = sum(bool(SUM.search(turn.content)) for turn in turns)
        return {**self._arithmetic.score(problem, text), "calls": float(calls)}


def result_after(text: str) -> str:
    """Return what a calculator appends to `text`, after a space if the sum has spaces and `text` ends in none."""
    match = SUM.search(text)
    if match is None:
        return ""
    first, second = int(match["first"]), int(match["second"])
    result = {"+": first + second, "-": first - second, "*": first * second}[match["sign"]]
    return f"{'' if text.endswith(' ') else match['space']}{result}"
