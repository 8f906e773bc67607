"""Graders of OpenAI's form: what they read, and the reward from 0 to 1 (of `multi`: any number) that they give.

Run here are string_check, text_similarity by ROUGE and GLEU, and multi; `environment` names an environment that this
server has registered. A grader that would run a client's code or ask another model is refused by name.

ROUGE: Lin, 2004, https://aclanthology.org/W04-1013. GLEU: Wu et al., 2016, https://arxiv.org/abs/1609.08144.
"""

import ast
import json
import math
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from parallm.errors import InvalidRequest

MAX_FORMULA = 1000
MAX_TEXT = 10_000
"""Characters of a filled template: comparing two texts takes the product of their lengths."""
MAX_SAMPLES = 8
"""Places of a template where the completion stands, whose length nobody knows before."""
VARIABLE = re.compile(r"\{\{\s*(item|sample)\.([A-Za-z0-9_.-]+)\s*\}\}")
SAMPLE = ("output_text", "output_json")
WORD = re.compile(r"[a-z0-9]+")
FUNCTIONS: Mapping[str, Callable[..., float]] = {
    "min": min,
    "max": max,
    "abs": abs,
    "floor": math.floor,
    "ceil": math.ceil,
    "exp": math.exp,
    "sqrt": math.sqrt,
    "log": math.log,
}
OPERATORS: Mapping[type, Callable[..., float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: math.pow,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
REFUSED: Mapping[str, str] = {
    "python": "it runs a client's code, which this server does not do; register an environment in jobs.environments",
    "score_model": "it asks another model; register an environment that asks the served one in jobs.environments",
    "label_model": "it asks another model; register an environment that asks the served one in jobs.environments",
    "endpoint": "it asks another server; register an environment in jobs.environments",
}
Item: TypeAlias = Mapping[str, Any]
"""A line of the training file."""


class GraderForm(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: str = Field(default="", max_length=200)


class StringCheck(GraderForm):
    type: Literal["string_check"]
    input: str
    reference: str
    operation: Literal["eq", "ne", "like", "ilike"]
    """`like`: the input contains the reference; `ilike`: in any case of its letters."""


class TextSimilarity(GraderForm):
    type: Literal["text_similarity"]
    input: str
    reference: str
    evaluation_metric: Literal["gleu", "rouge_1", "rouge_2", "rouge_3", "rouge_4", "rouge_5", "rouge_l"]


class MultiGrader(GraderForm):
    type: Literal["multi"]
    graders: dict[str, Annotated[StringCheck | TextSimilarity, Field(discriminator="type")]] = Field(min_length=1)
    calculate_output: str = Field(max_length=MAX_FORMULA)
    """Formula of the graders' names with + - * / ^, min, max, abs, floor, ceil, exp, sqrt and log."""


class EnvironmentGrader(GraderForm):
    """An environment of `jobs.environments`, by its name there: problems and rewards."""

    type: Literal["environment"]
    name: str


Grader: TypeAlias = StringCheck | TextSimilarity | MultiGrader | EnvironmentGrader
_GRADER: TypeAdapter[Grader] = TypeAdapter(Annotated[Grader, Field(discriminator="type")])
PARAMETER = "method.reinforcement.grader"


def read_grader(given: Mapping[str, Any]) -> Grader:
    """Raises InvalidRequest that names what is wrong."""
    for grader in (given, *_parts(given)):
        kind = grader.get("type")
        if isinstance(kind, str) and kind in REFUSED:
            raise InvalidRequest(f"the grader {kind} is refused: {REFUSED[kind]}", PARAMETER)
    try:
        read = _GRADER.validate_python(given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise InvalidRequest(
            f"the grader is wrong{f' at {where}' if where else ''}: {first['msg']}", PARAMETER
        ) from error
    if isinstance(read, MultiGrader):
        _check_formula(read)
    for template in _templates(read):
        _check_template(template)
    return read


def check_item(grader: Grader, item: Item) -> None:
    """Raise InvalidRequest if `item` lacks what the grader reads, or has too much of it."""
    for template in _templates(grader):
        for space, path in VARIABLE.findall(template):
            if space == "item" and _at(item, path.split(".")) is None:
                raise InvalidRequest(f"there is no {path}, which the grader reads")
        if (size := len(_fill(template, item, ""))) > MAX_TEXT:
            raise InvalidRequest(f"what the grader reads has {size} characters, the limit is {MAX_TEXT}")


def grade(grader: Grader, item: Item, text: str) -> float:
    """Return the reward of the completion `text`. Raises ArithmeticError and ValueError for a formula without value."""
    match grader:
        case StringCheck():
            return _check(grader.operation, _fill(grader.input, item, text), _fill(grader.reference, item, text))
        case TextSimilarity():
            return _similarity(
                grader.evaluation_metric, _fill(grader.input, item, text), _fill(grader.reference, item, text)
            )
        case MultiGrader():
            values = {name: grade(part, item, text) for name, part in grader.graders.items()}
            return _value(_formula(grader.calculate_output), values)
        case EnvironmentGrader():
            raise AssertionError("an environment has rewards of its own")


def _parts(given: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    parts = given.get("graders")
    if isinstance(parts, Mapping):
        yield from (part for part in parts.values() if isinstance(part, Mapping))


def _templates(grader: Grader) -> Iterator[str]:
    match grader:
        case StringCheck() | TextSimilarity():
            yield from (grader.input, grader.reference)
        case MultiGrader():
            for part in grader.graders.values():
                yield from _templates(part)
        case EnvironmentGrader():
            return


def _check_template(template: str) -> None:
    for space, path in VARIABLE.findall(template):
        if space == "sample" and path.split(".")[0] not in SAMPLE:
            raise InvalidRequest(f"a sample has no {path!r}; it has {' and '.join(SAMPLE)}", PARAMETER)
    if (count := sum(space == "sample" for space, _ in VARIABLE.findall(template))) > MAX_SAMPLES:
        raise InvalidRequest(f"a template names the sample {count} times, the limit is {MAX_SAMPLES}", PARAMETER)
    if "{{" in VARIABLE.sub("", template):
        raise InvalidRequest(
            f"{template[:200]!r} has a variable that is none of item.FIELD, sample.output_text and "
            "sample.output_json.FIELD",
            PARAMETER,
        )


def _fill(template: str, item: Item, text: str) -> str:
    """Return the template with its variables; what the JSON of a completion lacks is empty."""

    def value(match: re.Match[str]) -> str:
        space, path = match[1], match[2].split(".")
        if space == "item":
            return _text(_at(item, path))
        if path[0] == "output_text":
            return text
        try:
            return _text(_at(json.loads(text), path[1:]))
        except (ValueError, RecursionError):
            return ""

    return VARIABLE.sub(value, template)


def _at(value: Any, path: Sequence[str]) -> Any:
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _text(value: Any) -> str:
    return "" if value is None else value if isinstance(value, str) else json.dumps(value)


def _check(operation: str, given: str, reference: str) -> float:
    match operation:
        case "eq":
            return float(given == reference)
        case "ne":
            return float(given != reference)
        case "like":
            return float(reference in given)
        case _:
            return float(reference.lower() in given.lower())


def _similarity(metric: str, given: str, reference: str) -> float:
    ours, theirs = WORD.findall(given.lower()), WORD.findall(reference.lower())
    if metric == "gleu":
        return _gleu(ours, theirs)
    if metric == "rouge_l":
        return _f1(_longest_common(ours, theirs), len(ours), len(theirs))
    size = int(metric[-1])
    mine, others = _ngrams(ours, size), _ngrams(theirs, size)
    return _f1((mine & others).total(), mine.total(), others.total())


def _gleu(ours: Sequence[str], theirs: Sequence[str]) -> float:
    """Matching n-grams of 1 to 4 words over those of the longer text."""
    mine = sum((_ngrams(ours, size, marked=True) for size in range(1, 5)), Counter[tuple[object, ...]]())
    others = sum((_ngrams(theirs, size, marked=True) for size in range(1, 5)), Counter[tuple[object, ...]]())
    longer = max(mine.total(), others.total())
    return (mine & others).total() / longer if longer else 0.0


def _ngrams(words: Sequence[str], size: int, *, marked: bool = False) -> Counter[tuple[object, ...]]:
    found = [tuple(words[start : start + size]) for start in range(len(words) - size + 1)]
    return Counter((size, *gram) for gram in found) if marked else Counter(found)


def _longest_common(ours: Sequence[str], theirs: Sequence[str]) -> int:
    """Return the length of the longest common subsequence."""
    row = [0] * (len(theirs) + 1)
    for word in ours:
        above = 0
        for place, other in enumerate(theirs, start=1):
            above, row[place] = row[place], above + 1 if word == other else max(row[place], row[place - 1])
    return row[-1]


def _f1(common: int, ours: int, theirs: int) -> float:
    return 2 * common / (ours + theirs) if common else 0.0


def _formula(text: str) -> ast.expr:
    try:
        return ast.parse(text.replace("^", "**").strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InvalidRequest(f"calculate_output {text[:200]!r} is no formula: {error}", PARAMETER) from error


def _check_formula(grader: MultiGrader) -> None:
    """Compute it once, with each grader at 1, so that an unknown name or part is found before training."""
    try:
        _value(_formula(grader.calculate_output), dict.fromkeys(grader.graders, 1.0))
    except (ArithmeticError, TypeError, RecursionError) as error:
        raise InvalidRequest(f"calculate_output has no value if every grader gives 1: {error}", PARAMETER) from error


def _value(part: ast.expr, values: Mapping[str, float]) -> float:
    """Compute a formula of numbers, names, operators and functions; nothing else is in it."""
    match part:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return float(number)
        case ast.Name(id=name) if name in values:
            return values[name]
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in OPERATORS:
            return float(OPERATORS[type(sign)](_value(left, values), _value(right, values)))
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in OPERATORS:
            return float(OPERATORS[type(sign)](_value(operand, values)))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in FUNCTIONS:
            return float(FUNCTIONS[name](*(_value(argument, values) for argument in arguments)))
    raise InvalidRequest(
        f"calculate_output has {ast.unparse(part)[:100]!r}; it may have numbers, the graders {', '.join(values)}, "
        f"+ - * / ^ and {', '.join(FUNCTIONS)}",
        PARAMETER,
    )
