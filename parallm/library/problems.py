"""An environment made of a program's problems and reward function."""

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from parallm.environment.environment import AnyEnvironment
from parallm.errors import ConfigError
from parallm.types import Message, Problem, Split

GivenProblem: TypeAlias = str | Mapping[str, Any] | Problem
"""A question; a question or a chat with an answer, `{"prompt": ..., "answer": ...}`; or a `Problem`."""
Parts: TypeAlias = float | Mapping[str, float]
Reward: TypeAlias = Callable[[Problem, str], Parts | Awaitable[Parts]]
"""Scores the text of a completion.

In a mapping, `reward` is the reward, `correct` (0 or 1) counts for the accuracy of evaluations; all parts are logged.
"""

REWARD = "reward"
KEYS = {"prompt", "answer", "id"}


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnProblems:
    """An environment of one turn. An error of `reward` fails one completion."""

    reward: Reward
    train: tuple[Problem, ...]
    test: tuple[Problem, ...]
    weights: Mapping[str, float] = field(default_factory=lambda: {REWARD: 1.0})

    def problems(self, split: Split) -> Sequence[Problem]:
        return self.train if split == "train" else self.test

    def score(self, problem: Problem, text: str) -> Mapping[str, float] | Awaitable[Mapping[str, float]]:
        given = self.reward(problem, text)
        return _awaited(given) if inspect.isawaitable(given) else _parts(given)


def own_environment(
    environment: AnyEnvironment | None,
    problems: Sequence[GivenProblem] | None,
    held_out: Sequence[GivenProblem],
    reward: Reward | None,
) -> AnyEnvironment | None:
    """Return the environment that a program has given in either form, if any. Raises ConfigError."""
    if (problems is None) != (reward is None):
        raise ConfigError("problems and reward belong together; give both, or an environment")
    if problems is None or reward is None:
        if held_out:
            raise ConfigError("held_out belongs to problems and reward; an environment has its own test split")
        return environment
    if environment is not None:
        raise ConfigError("environment and problems are both given; leave one of them out")
    return own_problems(problems, held_out, reward)


def own_problems(problems: Sequence[GivenProblem], held_out: Sequence[GivenProblem], reward: Reward) -> OwnProblems:
    """Raises ConfigError for a malformed problem and for repeated ids."""
    train = tuple(_problem(given, f"problems/{index}") for index, given in enumerate(problems))
    test = tuple(_problem(given, f"held_out/{index}") for index, given in enumerate(held_out))
    seen: set[str] = set()
    for problem in (*train, *test):
        if problem.problem_id in seen:
            raise ConfigError(f"two problems have the id {problem.problem_id!r}; give each an id of its own")
        seen.add(problem.problem_id)
    return OwnProblems(reward=reward, train=train, test=test)


def _problem(given: GivenProblem, problem_id: str) -> Problem:
    if isinstance(given, Problem):
        return given
    values = {"prompt": given} if isinstance(given, str) else given
    if not isinstance(values, Mapping) or "prompt" not in values or values.keys() - KEYS:
        raise ConfigError(
            f"{problem_id} is {given!r:.100} and must be a text, a Problem, or have prompt, answer and id"
        )
    prompt = values["prompt"]
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    try:
        messages = tuple(Message(role=str(turn["role"]), content=str(turn["content"])) for turn in turns)
    except (TypeError, KeyError) as error:
        raise ConfigError(f"{problem_id}: the prompt must be a text or turns with role and content") from error
    return Problem(
        problem_id=str(values.get("id", problem_id)), messages=messages, answer=str(values.get("answer", ""))
    )


async def _awaited(given: Awaitable[Parts]) -> Mapping[str, float]:
    return _parts(await given)


def _parts(given: Parts) -> Mapping[str, float]:
    parts = given if isinstance(given, Mapping) else {REWARD: given}
    if REWARD not in parts:
        raise ValueError(f"the reward function returned the parts {', '.join(parts)} without a part {REWARD!r}")
    return {name: float(part) for name, part in parts.items()}
