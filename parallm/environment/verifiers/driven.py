"""Environments that play their own episodes, as one of ours. Knows neither of the package's two kinds."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from parallm.environment.settings import VerifiersSettings
from parallm.environment.verifiers.background import BackgroundLoop
from parallm.environment.verifiers.exchange import Drive, Exchange
from parallm.environment.verifiers.parts import WEIGHTS, with_correct
from parallm.errors import ConfigError, ProblemError
from parallm.types import Message, Problem, Split


class Source(Protocol):
    """An environment of the package, with its tasks."""

    @property
    def is_endless(self) -> bool: ...

    @property
    def has_test_split(self) -> bool:
        """Whether it holds tasks out by itself."""

    def tasks(self, split: Split, start: int, count: int | None) -> Sequence[Any]:
        """Tasks from `start` on, `count` or all of them. May raise anything."""

    def opening(self, task: Any) -> tuple[Message, ...]:
        """The conversation that the task is written down with; empty where there is none."""

    def tools(self, task: Any) -> str:
        """Functions of the task, as `Problem.tools`."""

    def drives(self, task: Any, count: int) -> Sequence[Drive]:
        """What plays each episode of a group."""


@dataclass(frozen=True, slots=True)
class Side:
    """An exchange as the rollout side meets it, from another event loop: a `Counterpart`."""

    exchange: Exchange
    loop: BackgroundLoop
    correct_at: float

    async def reply(self, turns: Sequence[Message]) -> list[Message] | None:
        return await self.loop.get(self.exchange.reply(turns))

    async def score(self, turns: Sequence[Message], *, is_cut_off: bool) -> Mapping[str, float]:
        parts = await self.loop.get(self.exchange.score(turns, is_cut_off=is_cut_off))
        return with_correct(parts, self.correct_at)

    def close(self) -> None:
        self.loop.soon(self.exchange.close)


class DrivenEnvironment:
    """A `StatefulEnvironment` whose counterparts run on an event loop of their own."""

    def __init__(
        self, settings: VerifiersSettings, make_source: Callable[[Mapping[str, Any], BackgroundLoop], Source]
    ) -> None:
        """Raises ConfigError."""
        self.weights = WEIGHTS
        self._settings = settings
        self._loop = BackgroundLoop("verifiers")
        self._source = make_source(settings.options, self._loop)
        self._make_source = make_source
        self._tasks: dict[str, tuple[Source, Any]] = {}
        self._openings: dict[str, tuple[Message, ...]] = {}

    def problems(self, split: Split) -> Sequence[Problem]:
        """Raises ConfigError where options do not fit, ProblemError where the data cannot be read."""
        settings, source = self._settings, self._source
        if split == "test" and settings.test_options is not None:
            source = self._make_source({**settings.options, **settings.test_options}, self._loop)
        count = settings.num_train if split == "train" else settings.num_test
        if count is None and source.is_endless:
            raise ConfigError(f"environment.id={settings.id!r} has problems without end: set environment.num_train")
        are_apart = settings.test_options is not None or source.has_test_split
        start = settings.num_test if split == "train" and not are_apart else 0
        try:
            tasks = source.tasks(split, start, count)
        except Exception as error:  # an environment may raise anything
            raise ProblemError(f"environment.id={settings.id!r} cannot load its problems: {error!r}") from error
        openings = self._loop.run(openings_of(source, tasks))
        return [
            self._problem(source, f"{settings.id}/{split}/{start + place}", task, opening)
            for place, (task, opening) in enumerate(zip(tasks, openings, strict=True))
        ]

    def open(self, problem: Problem, count: int) -> Sequence[Side]:
        source, task = self._tasks[problem.answer]
        opening = self._openings[problem.answer]
        correct_at = self._settings.correct_at
        return [Side(Exchange(drive, opening), self._loop, correct_at) for drive in source.drives(task, count)]

    def _problem(self, source: Source, key: str, task: Any, opening: tuple[Message, ...]) -> Problem:
        self._tasks[key], self._openings[key] = (source, task), opening
        return Problem(problem_id=key, messages=opening, answer=key, tools=source.tools(task))


async def openings_of(source: Source, tasks: Sequence[Any]) -> list[tuple[Message, ...]]:
    """What the model is asked first in each of `tasks`: what they say, where the first one's episode begins so.

    Raises ProblemError where an episode cannot begin.
    """
    written = [source.opening(task) for task in tasks]
    if not tasks or (all(written) and written[0] == await played_opening(source, tasks[0])):
        return written
    return [await played_opening(source, task) for task in tasks]


async def played_opening(source: Source, task: Any) -> tuple[Message, ...]:
    exchange = Exchange(source.drives(task, 1)[0])
    try:
        return await exchange.opening()
    except Exception as error:  # an environment may raise anything
        raise ProblemError(f"the environment's episode cannot begin: {error!r}") from error
    finally:
        exchange.close()
