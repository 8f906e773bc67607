"""The protocols of environments, and several environments as one."""

from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias, runtime_checkable

from typing_extensions import TypeIs  # part of Python from 3.13 on

from parallm.types import BASE, Message, Problem, Split

RewardParts: TypeAlias = Mapping[str, float]
"""Reward parts by name; reward = sum of weight * part."""


class Problems(Protocol):
    """The part that every environment has."""

    @property
    def weights(self) -> Mapping[str, float]:
        """Weight of each reward part. A part without a weight is only logged."""

    def problems(self, split: Split) -> Sequence[Problem]:
        """Return all problems of `split`, in a fixed order. Raises ProblemError if they cannot be read."""


class Environment(Problems, Protocol):
    """Problems to solve and a judge of their answers. Both methods give the same result for the same arguments.

    `score` is called in a thread of its own, or may be `async`; an exception in it costs one completion, not the run.
    """

    def score(self, problem: Problem, text: str) -> RewardParts | Awaitable[RewardParts]:
        """Return the reward parts of the completion `text`, which may be any text, even an empty one."""


class MultiTurnEnvironment(Problems, Protocol):
    """An environment that answers the model before it scores. An attribute `stop` may hold strings that end a turn."""

    def reply(
        self, problem: Problem, turns: Sequence[Message]
    ) -> Sequence[Message] | Awaitable[Sequence[Message] | None] | None:
        """Return the reply to the model's newest turn, the last of `turns`; None ends the episode.

        `turns` is everything after the problem's own messages. One message of the role `assistant` goes on in the
        model's own text; messages of other roles open a turn of their own, as the model's chat template writes them.
        """

    def score(self, problem: Problem, turns: Sequence[Message]) -> RewardParts | Awaitable[RewardParts]:
        """Return the reward parts of a whole episode."""


class EnvironmentSession(Protocol):
    """The environment's side of one episode, with its state. Methods are called as an environment's are."""

    def reply(self, turns: Sequence[Message]) -> Sequence[Message] | Awaitable[Sequence[Message] | None] | None:
        """Return the reply to the newest turn, the last of `turns`; None ends the episode."""

    def score(self, turns: Sequence[Message], *, is_cut_off: bool) -> RewardParts | Awaitable[RewardParts]:
        """Return the reward parts of the episode. `reply` may not have seen the last turn, which may be cut off."""

    def close(self) -> None:
        """End an episode that will not be scored. Called on the asyncio thread; must return at once."""


class StatefulEnvironment(Problems, Protocol):
    """An environment whose episodes have a state, which begins with them."""

    def open(self, problem: Problem, count: int) -> Sequence[EnvironmentSession]:
        """Return a session for each episode of a group. Called on the asyncio thread; must return at once."""


SingleEnvironment: TypeAlias = Environment | MultiTurnEnvironment | StatefulEnvironment


class Ask(Protocol):
    """Asks the served model: a judge that costs no second copy of the weights."""

    async def __call__(self, messages: Sequence[Message], *, model: str = BASE, max_tokens: int = 64) -> str:
        """Return the greedy answer of `model`: the frozen base, `policy`, or a version of it."""


@runtime_checkable
class AskingEnvironment(Protocol):
    """An environment whose methods put questions to the served model."""

    def connect(self, ask: Ask) -> None:
        """Keep `ask` for later; called once, before the first episode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixed:
    """Several environments as one. Replies and scores of a problem are those of its own: `environment_of`."""

    environments: Mapping[str, "AnyEnvironment"]
    """None of them a mixture itself."""
    shares: Mapping[str, float]
    """How often each is drawn, in proportion to the others, such as `{"easy": 3, "tool": 1}`."""

    @property
    def weights(self) -> Mapping[str, float]:
        """Weights of all environments; a problem still counts by its own where two differ."""
        return {
            name: weight for environment in self.environments.values() for name, weight in environment.weights.items()
        }

    def problems(self, split: Split) -> Sequence[Problem]:
        """Return all problems, in an order in which any number of the first ones is mixed by the shares."""
        keyed = [
            (
                (index + 0.5) / self.shares[name],
                replace(problem, problem_id=f"{name}/{problem.problem_id}", environment=name),
            )
            for name, environment in self.environments.items()
            for index, problem in enumerate(environment.problems(split))
        ]
        return [problem for _, problem in sorted(keyed, key=lambda pair: pair[0])]


AnyEnvironment: TypeAlias = SingleEnvironment | Mixed


def environment_of(environment: AnyEnvironment, problem: Problem) -> SingleEnvironment:
    own = environment.environments[problem.environment] if isinstance(environment, Mixed) else environment
    assert not isinstance(own, Mixed)
    return own


def is_multi_turn(environment: AnyEnvironment) -> TypeIs[MultiTurnEnvironment]:
    """Whether it answers between turns. Each episode asks this, and `isinstance` of a protocol takes long."""
    return getattr(environment, "reply", None) is not None


def is_stateful(environment: AnyEnvironment) -> TypeIs[StatefulEnvironment]:
    """Whether its episodes have a state."""
    return getattr(environment, "open", None) is not None


def open_sessions(environment: AnyEnvironment, problem: Problem, count: int) -> Sequence[EnvironmentSession | None]:
    """Return a session for each of `count` episodes of `problem`; None for each if episodes have no state."""
    own = environment_of(environment, problem)
    return own.open(problem, count) if is_stateful(own) else [None] * count


def connect(environment: AnyEnvironment, ask: Ask) -> None:
    parts: Iterable[object] = environment.environments.values() if isinstance(environment, Mixed) else (environment,)
    for part in parts:
        if isinstance(part, AskingEnvironment):
            part.connect(ask)
