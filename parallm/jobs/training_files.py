"""Training files in OpenAI's form: chats to imitate, and problems with what a grader reads. Errors name the line.

A line of a supervised job is {"messages": [..., {"role": "assistant", "content": "..."}]}: each turn of the assistant
is learned, but those with `"weight": 0`. {"prompt": "...", "completion": "..."} is the older form. A line of a
reinforcement job is {"messages": [...], "reference_answer": ...}; the grader's templates read any of its fields.

All functions block; call them on a thread.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from parallm.errors import InvalidRequest, ProblemError
from parallm.jobs.graders import Grader, check_item, grade
from parallm.types import Message, Problem, Split

ROLES = ("system", "developer", "user", "assistant")
REWARD, CORRECT = "reward", "correct"


@dataclass(frozen=True, slots=True, kw_only=True)
class GradedProblems:
    """An environment of the lines of two files. Its reward is that of the grader, and a completion is right at 1."""

    grader: Grader
    train: Sequence[Problem]
    test: Sequence[Problem]
    weights: Mapping[str, float] = field(default_factory=lambda: {REWARD: 1.0})

    def problems(self, split: Split) -> Sequence[Problem]:
        return self.train if split == "train" else self.test

    def score(self, problem: Problem, text: str) -> Mapping[str, float]:
        reward = grade(self.grader, json.loads(problem.answer), text)
        return {REWARD: reward, CORRECT: float(reward >= 1)}


def write_demonstrations(file: Path, target: Path) -> int:
    """Write each turn to learn as a line of messages and completion, and return their number. Raises ProblemError."""
    number = 0
    with target.open("w", encoding="utf-8") as lines:
        for where, row in _rows(file):
            for example in _demonstrations(row, where):
                lines.write(json.dumps(example) + "\n")
                number += 1
    if not number:
        raise ProblemError("the file has no turn of the assistant to learn from")
    return number


def read_problems(file: Path, grader: Grader, split: Split) -> list[Problem]:
    """Raises ProblemError."""
    problems = []
    for where, row in _rows(file):
        messages = _messages(row.get("messages"), where)
        if messages[-1].role == "assistant":
            raise ProblemError(f"{where}: the last message is the assistant's; end with the user's, which it answers")
        try:
            check_item(grader, row)
        except InvalidRequest as error:
            raise ProblemError(f"{where}: {error}") from error
        item = {name: value for name, value in row.items() if name != "messages"}
        problems.append(Problem(problem_id=f"{split}/{where}", messages=messages, answer=json.dumps(item)))
    if not problems:
        raise ProblemError("the file has no problems")
    return problems


def _rows(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"line {number}"
            try:
                row = from_json(line)  # nested less deeply than what reads it again can bear
            except ValueError as error:
                raise ProblemError(f"{where} is no JSON: {error}") from error
            if not isinstance(row, dict):
                raise ProblemError(f"{where} is no JSON object")
            yield where, row


def _demonstrations(row: Mapping[str, Any], where: str) -> Iterator[dict[str, Any]]:
    if "prompt" in row:
        _check_fields(row, {"prompt", "completion"}, where)
        if not all(isinstance(row.get(name), str) and row[name] for name in ("prompt", "completion")):
            raise ProblemError(f"{where}: prompt and completion should be texts")
        yield {"prompt": row["prompt"], "completion": row["completion"]}
        return
    _check_fields(row, {"messages"}, where)
    messages = _messages(row.get("messages"), where)
    turns = [{"role": message.role, "content": message.content} for message in messages]
    weights = [message.get("weight", 1) for message in row["messages"]]
    if any(weight not in (0, 1) for weight in weights):
        raise ProblemError(f"{where}: a weight is 0 or 1")
    if messages[0].role == "assistant" and weights[0]:
        raise ProblemError(f"{where}: the first message is the assistant's; begin with one that it answers")
    for place, (turn, weight) in enumerate(zip(turns, weights, strict=True)):
        if turn["role"] == "assistant" and weight:
            yield {"messages": turns[:place], "completion": turn["content"]}


def _messages(given: object, where: str) -> tuple[Message, ...]:
    if not isinstance(given, list) or not given:
        raise ProblemError(f"{where} has no messages: a list of turns with role and content")
    messages = []
    for turn in given:
        if not isinstance(turn, dict):
            raise ProblemError(f"{where}: a message is an object with role and content")
        _check_fields(turn, {"role", "content", "weight", "name"}, where)
        if turn.get("role") not in ROLES:
            raise ProblemError(f"{where}: role is {turn.get('role')!r:.50}; choose one of {', '.join(ROLES)}")
        if not isinstance(turn.get("content"), str) or not turn["content"]:
            raise ProblemError(f"{where}: the content of a message should be a text; images are not learned from")
        if turn.get("name"):
            raise ProblemError(f"{where}: the model's chat template writes no names; leave name out")
        role = "system" if turn["role"] == "developer" else turn["role"]
        messages.append(Message(role=role, content=turn["content"]))
    return tuple(messages)


def _check_fields(row: Mapping[str, Any], known: set[str], where: str) -> None:
    if unknown := sorted(row.keys() - known):
        raise ProblemError(f"{where} has a field {unknown[0][:50]!r}, which is not learned from; leave it out")
