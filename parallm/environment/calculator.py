"""Word problems with a calculator: behind each sum that the model writes, its result is written for it."""

import re
from collections.abc import Mapping, Sequence

from parallm.environment.arithmetic import Arithmetic
from parallm.environment.settings import CalculatorSettings
from parallm.types import Message, Problem, Split

SUM = re.compile(
    r"(?:^|[^-+*.\d ]) ?(?P<first>-?\d{1,9})(?P<space> ?)(?P<sign>[-+*])(?P=space)(?P<second>\d{1,9}) ?= ?\Z",
    re.MULTILINE,
)
"""Two whole numbers and no third one before them, at the end of the text."""


class Calculator:
    """The problems and rewards of `Arithmetic`. A call is the beginning of a line such as `12 * 3 =`.

    The model stops at each equals sign. Where a sum stands before it, the result follows; the model goes on behind it.
    Part `calls`, which is not rewarded, counts the sums.
    """

    stop = ("=",)

    def __init__(self, settings: CalculatorSettings) -> None:
        self._arithmetic = Arithmetic(settings.problems)
        self.weights: Mapping[str, float] = self._arithmetic.weights

    def problems(self, split: Split) -> Sequence[Problem]:
        return self._arithmetic.problems(split)

    def reply(self, problem: Problem, turns: Sequence[Message]) -> Sequence[Message] | None:
        """The result of the sum at the end of the text; nothing where there is none; None where no `=` ends it."""
        text = "".join(turn.content for turn in turns)
        if not text.rstrip(" ").endswith("="):
            return None
        return [Message(role="assistant", content=result_after(text))]

    def score(self, problem: Problem, turns: Sequence[Message]) -> Mapping[str, float]:
        text = "".join(turn.content for turn in turns)
        calls = sum(bool(SUM.search(turn.content)) for turn in turns)
        return {**self._arithmetic.score(problem, text), "calls": float(calls)}


def result_after(text: str) -> str:
    """What a calculator writes behind `text`, with a space before it where the sum has spaces and none stands there."""
    found = SUM.search(text)
    if found is None:
        return ""
    first, second = int(found["first"]), int(found["second"])
    result = {"+": first + second, "-": first - second, "*": first * second}[found["sign"]]
    return f"{'' if text.endswith(' ') else found['space']}{result}"
