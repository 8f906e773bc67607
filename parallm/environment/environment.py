"""What an environment is, several of them as one, and the one place where settings become one."""

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias, runtime_checkable

from parallm.environment.arithmetic import Arithmetic
from parallm.environment.calculator import Calculator
from parallm.environment.custom import make_custom
from parallm.environment.gsm8k import Gsm8k
from parallm.environment.settings import (
    ArithmeticSettings,
    CalculatorSettings,
    CustomSettings,
    EnvironmentSettings,
    Gsm8kSettings,
    MixedSettings,
    VerifiersSettings,
)
from parallm.integrations.verifiers.load import load_verifiers
from parallm.types import BASE, Message, Problem, Split

RewardParts: TypeAlias = Mapping[str, float]
"""Reward parts by name; reward = sum of weight * part."""


class Problems(Protocol):
    """What every environment has."""

    @property
    def weights(self) -> Mapping[str, float]:
        """Weight of each reward part. A part that is missing here is only logged."""

    def problems(self, split: Split) -> Sequence[Problem]:
        """Return all problems of `split`, in a fixed order. Raises ProblemError if they cannot be read."""


class Environment(Problems, Protocol):
    """Problems to solve and a judge of their answers. Both methods give the same result for the same arguments.

    `score` is called in a thread of its own, or may be `async`; what it raises costs one completion, not the run.
    """

    def score(self, problem: Problem, text: str) -> RewardParts | Awaitable[RewardParts]:
        """Return the reward parts of the completion `text`; any text should be survived, the empty one too."""


@runtime_checkable
class MultiTurnEnvironment(Problems, Protocol):
    """An environment that answers the model before it scores. An attribute `stop` may hold strings that end a turn."""

    def reply(
        self, problem: Problem, turns: Sequence[Message]
    ) -> Sequence[Message] | Awaitable[Sequence[Message] | None] | None:
        """Return what to say to the model's newest turn, the last of `turns`; None ends the episode.

        `turns` is everything after the problem's own messages. One message of the role `assistant` goes on in the
        model's own text; messages of other roles open a turn of their own, as the model's chat template writes them.
        """

    def score(self, problem: Problem, turns: Sequence[Message]) -> RewardParts | Awaitable[RewardParts]:
        """Return the reward parts of a whole episode."""


class EnvironmentSession(Protocol):
    """The environment's side of one episode, which it may keep in mind. Methods are called as an environment's are."""

    def reply(self, turns: Sequence[Message]) -> Sequence[Message] | Awaitable[Sequence[Message] | None] | None:
        """What to say to the newest turn, the last of `turns`; None ends the episode."""

    def score(self, turns: Sequence[Message], *, is_cut_off: bool) -> RewardParts | Awaitable[RewardParts]:
        """The reward parts of the episode. Its last turn may be one that `reply` has not seen, and may be cut off."""

    def close(self) -> None:
        """The episode will not be scored. Called on the asyncio thread, perhaps after a fault of its own; must return
        at once."""


@runtime_checkable
class StatefulEnvironment(Problems, Protocol):
    """An environment whose episodes have a state, which it makes when they begin."""

    def open(self, problem: Problem, count: int) -> Sequence[EnvironmentSession]:
        """One counterpart for each episode of a group. Called on the asyncio thread; must return at once."""


AnyEnvironment: TypeAlias = Environment | MultiTurnEnvironment | StatefulEnvironment


class Ask(Protocol):
    """Puts a question to the model that is being served: a judge that costs no second copy of the weights."""

    async def __call__(self, messages: Sequence[Message], *, model: str = BASE, max_tokens: int = 64) -> str:
        """Return the greedy answer of `model`: the frozen base, `policy`, or a version of it."""


@runtime_checkable
class AskingEnvironment(Protocol):
    """An environment whose methods put questions to the served model."""

    def connect(self, ask: Ask) -> None:
        """Keep `ask` for later; called once, before the first episode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixed:
    """Several environments as one. Each problem remembers its own, whose weights, replies and scores count for it."""

    environments: Mapping[str, AnyEnvironment]
    shares: Mapping[str, float]
    """How often each is drawn, in proportion to the others."""

    @property
    def weights(self) -> Mapping[str, float]:
        """Of all environments; where two give one part different weights, a problem still counts its own."""
        return {name: weight for one in self.environments.values() for name, weight in one.weights.items()}

    def problems(self, split: Split) -> Sequence[Problem]:
        """All problems, in such an order that any number of the first ones is mixed by the shares."""
        placed = [
            ((place + 0.5) / self.shares[name], replace(one, problem_id=f"{name}/{one.problem_id}", environment=name))
            for name, environment in self.environments.items()
            for place, one in enumerate(environment.problems(split))
        ]
        return [problem for _, problem in sorted(placed, key=lambda pair: pair[0])]

    def score(self, problem: Problem, text: str) -> RewardParts | Awaitable[RewardParts]:
        environment = self.environments[problem.environment]
        turns = [Message(role="assistant", content=text)]
        if isinstance(environment, StatefulEnvironment):
            return environment.open(problem, 1)[0].score(turns, is_cut_off=False)
        if isinstance(environment, MultiTurnEnvironment):
            return environment.score(problem, turns)
        return environment.score(problem, text)


def environment_of(environment: AnyEnvironment, problem: Problem) -> AnyEnvironment:
    """The one environment that `problem` comes from."""
    return environment.environments[problem.environment] if isinstance(environment, Mixed) else environment


def open_sessions(environment: AnyEnvironment, problem: Problem, count: int) -> Sequence[EnvironmentSession | None]:
    """A counterpart for each of `count` episodes of `problem`; None where episodes have no state."""
    own = environment_of(environment, problem)
    return own.open(problem, count) if isinstance(own, StatefulEnvironment) else [None] * count


def connect(environment: AnyEnvironment, ask: Ask) -> None:
    """Hand `ask` to every environment that wants it."""
    for one in environment.environments.values() if isinstance(environment, Mixed) else (environment,):
        if isinstance(one, AskingEnvironment):
            one.connect(ask)


def build_environment(settings: EnvironmentSettings) -> AnyEnvironment:
    """Make the environment that `settings` chooses. Raises ConfigError or ProblemError."""
    match settings:
        case ArithmeticSettings():
            return Arithmetic(settings)
        case CalculatorSettings():
            return Calculator(settings)
        case Gsm8kSettings():
            return Gsm8k(settings)
        case CustomSettings():
            environment: AnyEnvironment = make_custom(settings)
            return environment
        case VerifiersSettings():
            return load_verifiers(settings)
        case MixedSettings():
            return Mixed(
                environments={name: build_environment(part.environment) for name, part in settings.parts.items()},
                shares={name: part.weight for name, part in settings.parts.items()},
            )
