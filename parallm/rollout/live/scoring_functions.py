"""Functions that reward clients' completions: the user's own, and environments. Used by `ScoringDispatcher`.

Clients name a function; the configuration names one of the user's as `package.module:function`.
"""

import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from inspect import isawaitable
from typing import Any, TypeAlias

from parallm.environment.arithmetic import Arithmetic, Calculator
from parallm.environment.custom import import_callable
from parallm.environment.environment import (
    AnyEnvironment,
    Environment,
    Mixed,
    MultiTurnEnvironment,
    RewardParts,
    is_multi_turn,
    is_stateful,
)
from parallm.environment.gsm8k import Gsm8k
from parallm.environment.math_answer import marked_number, parse_number
from parallm.environment.settings import ArithmeticSettings, CalculatorSettings, Gsm8kSettings
from parallm.errors import InvalidRequest
from parallm.types import FinishReason, Message, Problem

ANSWER = "answer"
"""Key of a client's metadata that holds the reference answer."""
MAX_SHOWN = 50
Scorable: TypeAlias = Environment | MultiTurnEnvironment

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringInput:
    """The argument of a scoring function."""

    prompt: str
    """The prompt as the model read it, special tokens included."""
    text: str
    finish_reason: FinishReason
    metadata: Mapping[str, Any] = field(repr=False)
    """The metadata of the client's request."""


Rewards: TypeAlias = float | Mapping[str, float]
"""A number, or parts by name."""
ScoringFunction: TypeAlias = Callable[[ScoringInput], Rewards | Awaitable[Rewards | None] | None]
"""Returns a reward; None leaves it to the client."""


def load_scoring_functions(targets: Mapping[str, str]) -> dict[str, ScoringFunction]:
    return {
        name: import_callable(target, f"rollout.live.scoring_functions.{name}={target!r}", "function")
        for name, target in targets.items()
    }


class EnvironmentScoring:
    """A scoring function that returns an environment's reward parts, each times its weight."""

    def __init__(self, name: str, environment: Scorable) -> None:
        self._name = name
        self._environment = environment
        self._num_unknown = 0

    def __call__(self, scoring_input: ScoringInput) -> RewardParts | Awaitable[RewardParts] | None:
        answer = self.answer(scoring_input.metadata)
        if answer is None:
            self._log_unknown()
            return None
        question = Message(role="user", content=scoring_input.prompt)
        parts = self._score(Problem(problem_id="live", messages=(question,), answer=answer), scoring_input.text)
        return self._awaited(parts) if isawaitable(parts) else self._weighted(parts)

    def _score(self, problem: Problem, text: str) -> RewardParts | Awaitable[RewardParts]:
        if is_multi_turn(self._environment):
            return self._environment.score(problem, [Message(role="assistant", content=text)])
        return self._environment.score(problem, text)

    async def _awaited(self, parts: Awaitable[RewardParts]) -> RewardParts:
        return self._weighted(await parts)

    def _weighted(self, parts: RewardParts) -> RewardParts:
        """Return the parts with a weight, each times it."""
        weights = self._environment.weights
        return {name: weights[name] * part for name, part in parts.items() if weights.get(name)}

    def answer(self, metadata: Mapping[str, Any]) -> str | None:
        """Return the reference answer, if there is one.

        Raises InvalidRequest for one that the environment cannot compare with.
        """
        value = metadata.get(ANSWER)
        if value is None:
            return None
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        answer: str | None = str(value) if is_number or isinstance(value, str) else None
        form = "a number or a text"
        if isinstance(self._environment, Arithmetic | Calculator | Gsm8k):
            form = "a number, or a text that ends with `#### NUMBER`"
            answer = None if answer is None else as_number(answer)
        if answer is None:
            shown = str(value)[:MAX_SHOWN]
            raise InvalidRequest(f"metadata.{ANSWER} is {shown!r}; {self._name} compares with {form}", "metadata")
        return answer

    def _log_unknown(self) -> None:
        """Log the 1st, 2nd, 4th, 8th time and so on."""
        self._num_unknown += 1
        if self._num_unknown & (self._num_unknown - 1) == 0:
            logger.warning(
                "scoring function %s: no metadata.%s, so the reward is left to the client; so far %d times",
                self._name,
                ANSWER,
                self._num_unknown,
            )


def shipped_scoring_functions() -> dict[str, EnvironmentScoring]:
    """Return the scores of ParaLLM's own environments, with their default settings."""
    environments: dict[str, Scorable] = {
        "arithmetic": Arithmetic(ArithmeticSettings()),
        "calculator": Calculator(CalculatorSettings()),
        "gsm8k": Gsm8k(Gsm8kSettings()),
    }
    return {name: EnvironmentScoring(name, environment) for name, environment in environments.items()}


def environment_scoring_functions(name: str, environment: AnyEnvironment) -> dict[str, EnvironmentScoring]:
    """Return the scores of a run's environment, or of a mixture's parts by name; none for stateful environments."""
    environments = environment.environments if isinstance(environment, Mixed) else {name: environment}
    return {
        name: EnvironmentScoring(name, single)
        for name, single in environments.items()
        if not isinstance(single, Mixed) and not is_stateful(single)
    }


def as_number(answer: str) -> str | None:
    """Return the number that `answer` is, or that follows its last `####`, in its shortest form."""
    number = parse_number(answer)
    number = marked_number(answer) if number is None else number
    if number is None:
        return None
    text = f"{number:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
