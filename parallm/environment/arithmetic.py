"""Short word problems of one to three steps, made from a seed. An answer ends with a line `#### N`.

`Calculator` has the same problems in several turns: the result of each sum that the model writes is appended for it.
"""

import hashlib
import operator
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from parallm.environment.settings import ArithmeticSettings, CalculatorSettings
from parallm.types import Message, Problem, Split

MAX_NUMBER = 99
"""Largest number of a problem, results on the way to its answer included."""
NAMES = ("Tom", "Ann", "Ben", "Eva", "Max", "Mia", "Sam", "Zoe")
ITEMS = ("apples", "books", "cards", "cups", "eggs", "pens", "shells", "stamps")
TOGETHER = " How many {item} do they have together?"
SUM = re.compile(
    r"(?:^|[^-+*.\d ]) ?(?P<first>-?\d{1,9})(?P<space> ?)(?P<sign>[-+*])(?P=space)(?P<second>\d{1,9}) ?= ?\Z",
    re.MULTILINE,
)
"""A sum of two whole numbers, without a third one before them, at the end of the text."""
OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
FINAL_LINE = re.compile(r"^#### (-?\d+)[ \t]*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Kind:
    """A story with gaps and the plan that solves it: steps such as `b*c`, whose results are named x, y, z in turn."""

    level: int
    plan: tuple[str, ...]
    story: str


KINDS: Mapping[str, Kind] = {
    "gain": Kind(1, ("a+b",), "{name} has {a} {item} and gets {b} more. How many {item} does {name} have now?"),
    "loss": Kind(1, ("a-b",), "{name} has {a} {item} and gives away {b}. How many {item} are left?"),
    "bags": Kind(1, ("b*c",), "{name} buys {b} bags of {c} {item}. How many {item} does {name} buy?"),
    "refill": Kind(
        2, ("b*c", "a+x"), "{name} has {a} {item} and buys {b} bags of {c}. How many {item} does {name} have now?"
    ),
    "shop": Kind(
        2, ("b*c", "a-x"), "{name} has {a} coins and buys {b} {item} for {c} coins each. How many coins are left?"
    ),
    "trade": Kind(2, ("a+b", "x-c"), "{name} has {a} {item}, finds {b} more and loses {c}. How many {item} are left?"),
    "more": Kind(2, ("a+b", "a+x"), "{name} has {a} {item}. {friend} has {b} more than {name}." + TOGETHER),
    "fewer": Kind(3, ("a-b", "a+x"), "{name} has {a} {item}. {friend} has {b} fewer than {name}." + TOGETHER),
    "times": Kind(3, ("b*c", "b+x"), "{name} has {b} {item}. {friend} has {c} times as many." + TOGETHER),
    "pair": Kind(
        3, ("b*c", "d*e", "x+y"), "{name} buys {b} bags of {c} {item} and {friend} buys {d} bags of {e}." + TOGETHER
    ),
    "wages": Kind(
        3,
        ("b*c", "a-x", "y+d"),
        "{name} has {a} coins, buys {b} {item} for {c} coins each and then earns {d} coins. "
        "How many coins does {name} have now?",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemDraft:
    """One problem before it gets an id."""

    kind: str
    numbers: Mapping[str, int]
    question: str

    @property
    def split(self) -> Split:
        """The split that follows from kind and numbers alone, so no sum is in both splits under different names."""
        digest = hashlib.sha256(repr((self.kind, sorted(self.numbers.items()))).encode()).digest()
        return "test" if digest[0] % 8 == 0 else "train"


def work_out(plan: Sequence[str], numbers: Mapping[str, int]) -> tuple[list[str], list[int]]:
    """Return the written lines and the results of the steps of `plan`."""
    values, lines, results = dict(numbers), [], []
    for name, step in zip("xyz", plan, strict=False):
        first, second = values[step[0]], values[step[2]]
        result = OPERATIONS[step[1]](first, second)
        values[name] = result
        lines.append(f"{first} {step[1]} {second} = {result}")
        results.append(result)
    return lines, results


def drafts(generator: random.Random, kinds: Sequence[str]) -> Iterator[ProblemDraft]:
    """Yield problems of `kinds` without end, of both splits, with every result between 1 and `MAX_NUMBER`."""
    while True:
        kind = generator.choice(kinds)
        plan = KINDS[kind].plan
        factors = {letter for step in plan if "*" in step for letter in step}
        letters = sorted({letter for step in plan for letter in step} & set("abcde"))
        numbers = {letter: generator.randint(2, 9 if letter in factors else 60) for letter in letters}
        name, friend = generator.sample(NAMES, 2)
        item = generator.choice(ITEMS)
        if all(0 < result <= MAX_NUMBER for result in work_out(plan, numbers)[1]):
            question = KINDS[kind].story.format(name=name, friend=friend, item=item, **numbers)
            yield ProblemDraft(kind=kind, numbers=numbers, question=question)


class Arithmetic:
    """Different problems of the levels that `settings` names; training and held-out problems never share numbers."""

    weights: Mapping[str, float] = {"correct": 0.9, "format": 0.1}

    def __init__(self, settings: ArithmeticSettings) -> None:
        self._settings = settings

    def problems(self, split: Split) -> Sequence[Problem]:
        """Return the problems of `split`; the same settings give the same problems."""
        kinds = [name for name, kind in KINDS.items() if kind.level in self._settings.levels]
        number = self._settings.num_train if split == "train" else self._settings.num_test
        problems: dict[str, Problem] = {}
        for draft in drafts(random.Random(f"{split} {self._settings.seed}"), kinds):
            if draft.split == split and draft.question not in problems:
                problems[draft.question] = Problem(
                    problem_id=f"arithmetic-{split}-{len(problems)}",
                    messages=(Message(role="user", content=draft.question),),
                    answer=str(work_out(KINDS[draft.kind].plan, draft.numbers)[1][-1]),
                    level=KINDS[draft.kind].level,
                )
            if len(problems) == number:
                break
        return tuple(problems.values())

    def score(self, problem: Problem, text: str) -> Mapping[str, float]:
        """`correct`: the last line `#### N` holds the answer. `format`: there is one such line, at the very end."""
        finals = list(FINAL_LINE.finditer(text))
        correct = bool(finals) and finals[-1][1] == problem.answer
        well_formed = len(finals) == 1 and not text[finals[0].end() :].strip()
        return {"correct": float(correct), "format": float(well_formed)}


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
    result = OPERATIONS[match["sign"]](int(match["first"]), int(match["second"]))
    return f"{'' if text.endswith(' ') else match['space']}{result}"
