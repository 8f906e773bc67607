"""An event loop in a thread of its own, for environments whose coroutines may block: HTTP is answered meanwhile."""

import asyncio
import atexit
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from parallm.environment.settings import VerifiersSettings
from parallm.errors import ConfigError, ProblemError
from parallm.integrations.verifiers.exchange import Drive, Exchange
from parallm.integrations.verifiers.parts import WEIGHTS, add_correct
from parallm.types import Message, Problem, Split

T = TypeVar("T")
CLOSE_SECONDS = 10.0


class BackgroundLoop:
    """Runs coroutines until the process ends. Usable from any thread and from any other event loop."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self.stack = AsyncExitStack()  # entered and closed on this loop: servers that live as long as the process
        # a daemon: an environment that hangs must not hold up the end of the process
        threading.Thread(target=self._loop.run_forever, name=name, daemon=True).start()
        atexit.register(self._close)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`. Blocks the calling thread, which must not be this loop's own."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def get(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, awaited on the caller's loop; cancelled with it."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def soon(self, function: Callable[[], object]) -> None:
        """Call `function` on this loop, some time."""
        self._loop.call_soon_threadsafe(function)

    def _close(self) -> None:
        with suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(self.stack.aclose(), self._loop).result(CLOSE_SECONDS)


class TaskSource(Protocol):
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
class VerifiersSession:
    """An exchange as the rollout side meets it, from another event loop: a `EnvironmentSession`."""

    exchange: Exchange
    loop: BackgroundLoop
    correct_at: float

    async def reply(self, turns: Sequence[Message]) -> list[Message] | None:
        return await self.loop.get(self.exchange.reply(turns))

    async def score(self, turns: Sequence[Message], *, is_cut_off: bool) -> Mapping[str, float]:
        parts = await self.loop.get(self.exchange.score(turns, is_cut_off=is_cut_off))
        return add_correct(parts, self.correct_at)

    def close(self) -> None:
        self.loop.soon(self.exchange.close)


class VerifiersEnvironment:
    """A `StatefulEnvironment` whose counterparts run on an event loop of their own."""

    def __init__(
        self, settings: VerifiersSettings, make_source: Callable[[Mapping[str, Any], BackgroundLoop], TaskSource]
    ) -> None:
        """Raises ConfigError."""
        self.weights = WEIGHTS
        self._settings = settings
        self._loop = BackgroundLoop("verifiers")
        self._source = make_source(settings.options, self._loop)
        self._make_source = make_source
        self._tasks: dict[str, tuple[TaskSource, Any]] = {}
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

    def open(self, problem: Problem, count: int) -> Sequence[VerifiersSession]:
        source, task = self._tasks[problem.answer]
        opening = self._openings[problem.answer]
        correct_at = self._settings.correct_at
        return [
            VerifiersSession(Exchange(drive, opening), self._loop, correct_at) for drive in source.drives(task, count)
        ]

    def _problem(self, source: TaskSource, key: str, task: Any, opening: tuple[Message, ...]) -> Problem:
        self._tasks[key], self._openings[key] = (source, task), opening
        return Problem(problem_id=key, messages=opening, answer=key, tools=source.tools(task))


async def openings_of(source: TaskSource, tasks: Sequence[Any]) -> list[tuple[Message, ...]]:
    """What the model is asked first in each of `tasks`: what they say, where the first one's episode begins so.

    Raises ProblemError where an episode cannot begin.
    """
    written = [source.opening(task) for task in tasks]
    if not tasks or (all(written) and written[0] == await played_opening(source, tasks[0])):
        return written
    return [await played_opening(source, task) for task in tasks]


async def played_opening(source: TaskSource, task: Any) -> tuple[Message, ...]:
    exchange = Exchange(source.drives(task, 1)[0])
    try:
        return await exchange.opening()
    except Exception as error:  # an environment may raise anything
        raise ProblemError(f"the environment's episode cannot begin: {error!r}") from error
    finally:
        exchange.close()
