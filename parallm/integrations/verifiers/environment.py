"""Environments of the package `verifiers` as environments of ParaLLM, whatever their kind.

An environment plays its own episodes in an event loop of its own; `VerifiersEnvironment` hands their questions to the
rollout runner. `TasksetSource` and `ClassicSource` are the two kinds, which `load_verifiers` chooses from.
"""

import asyncio
import atexit
import importlib
import importlib.metadata
import importlib.util
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, Protocol, TypeVar

from parallm.environment.settings import VerifiersSettings
from parallm.errors import ConfigError, ProblemError
from parallm.integrations.verifiers.exchange import Drive, Exchange
from parallm.types import Message, Problem, Split

T = TypeVar("T")
SHIPPED = "verifiers.v1.tasksets"
INSTALL = "pip install 'parallm[verifiers]'"
CLOSE_SECONDS = 10.0
MODEL = "policy"
"""The model's name, as environments know it."""
TOTAL = "verifiers/reward"
"""Reward part with the environment's own reward, by its own weights. The parts beside it are only logged."""
WEIGHTS: Mapping[str, float] = {TOTAL: 1.0}
CORRECT = "correct"


class EpisodeFailed(Exception):
    """The environment has ended an episode with an error instead of a reward."""


class BackgroundLoop:
    """An event loop in a thread of its own, since coroutines of environments may block.

    It runs until the process ends, and can be used from any thread and from any other event loop.
    """

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self.stack = AsyncExitStack()  # servers that live as long as the process, entered and closed on this loop
        # a daemon: an environment that hangs must not hold up the end of the process
        threading.Thread(target=self.loop.run_forever, name=name, daemon=True).start()
        atexit.register(self._close)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`. Blocks the calling thread, which must not be this loop's own."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    async def get(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`, awaited on the caller's loop and cancelled with it."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.loop))

    def _close(self) -> None:
        with suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(self.stack.aclose(), self.loop).result(CLOSE_SECONDS)


class TaskSource(Protocol):
    """An environment of the package with its tasks."""

    @property
    def is_endless(self) -> bool: ...

    @property
    def has_test_split(self) -> bool:
        """Whether the environment has held-out tasks of its own."""

    def tasks(self, split: Split, start: int, count: int | None) -> Sequence[Any]:
        """Return the tasks from `start` on, `count` or all of them. May raise anything."""

    def opening(self, task: Any) -> tuple[Message, ...]:
        """Return the conversation that the task names as its begin; empty if it names none."""

    def tools(self, task: Any) -> str:
        """Return the functions of the task, as `Problem.tools` holds them."""

    def drives(self, task: Any, count: int) -> Sequence[Drive]:
        """Return what plays each episode of a group."""


@dataclass(frozen=True, slots=True)
class VerifiersSession:
    """An `EnvironmentSession` whose exchange lives on the environment's event loop."""

    exchange: Exchange
    loop: BackgroundLoop
    correct_at: float

    async def reply(self, turns: Sequence[Message]) -> list[Message] | None:
        return await self.loop.get(self.exchange.reply(turns))

    async def score(self, turns: Sequence[Message], *, is_cut_off: bool) -> Mapping[str, float]:
        parts = await self.loop.get(self.exchange.score(turns, is_cut_off=is_cut_off))
        return {CORRECT: float(parts[TOTAL] >= self.correct_at), **parts}  # a part `correct` of its own wins

    def close(self) -> None:
        self.loop.loop.call_soon_threadsafe(self.exchange.close)


class VerifiersEnvironment:
    """A `StatefulEnvironment` whose sessions run on an event loop of their own."""

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

    def problems(self, split: Split) -> Sequence[Problem]:
        """Raises ConfigError where options do not fit, ProblemError where the data cannot be read."""
        settings, source = self._settings, self._source
        if split == "test" and settings.test_options is not None:
            source = self._make_source({**settings.options, **settings.test_options}, self._loop)
        count = settings.num_train if split == "train" else settings.num_test
        if count is None and source.is_endless:
            raise ConfigError(f"environment.id={settings.id!r} has problems without end: set environment.num_train")
        has_test_data = settings.test_options is not None or source.has_test_split
        start = settings.num_test if split == "train" and not has_test_data else 0
        try:
            tasks = source.tasks(split, start, count)
        except Exception as error:  # an environment may raise anything
            raise ProblemError(f"environment.id={settings.id!r} cannot load its problems: {error!r}") from error
        openings = self._loop.run(openings_of(source, tasks))
        return [
            self._problem(source, f"{settings.id}/{split}/{index}", task, opening)
            for index, (task, opening) in enumerate(zip(tasks, openings, strict=True), start)
        ]

    def open(self, problem: Problem, count: int) -> Sequence[VerifiersSession]:
        source, task = self._tasks[problem.answer]
        exchanges = [Exchange(drive, problem.messages) for drive in source.drives(task, count)]
        return [VerifiersSession(exchange, self._loop, self._settings.correct_at) for exchange in exchanges]

    def _problem(self, source: TaskSource, key: str, task: Any, opening: tuple[Message, ...]) -> Problem:
        self._tasks[key] = source, task
        return Problem(problem_id=key, messages=opening, answer=key, tools=source.tools(task))


async def openings_of(source: TaskSource, tasks: Sequence[Any]) -> list[tuple[Message, ...]]:
    """Return what the model is asked first in each of `tasks`.

    The tasks' own openings count if the first episode begins with its own; else every episode is begun once. Raises
    ProblemError for an episode that cannot begin.
    """
    openings = [source.opening(task) for task in tasks]
    if not tasks or (all(openings) and openings[0] == await played_opening(source, tasks[0])):
        return openings
    return [await played_opening(source, task) for task in tasks]


async def played_opening(source: TaskSource, task: Any) -> tuple[Message, ...]:
    exchange = Exchange(source.drives(task, 1)[0])
    try:
        return await exchange.opening()
    except Exception as error:  # an environment may raise anything
        raise ProblemError(f"the environment's episode cannot begin: {error!r}") from error
    finally:
        exchange.close()


def load_verifiers(settings: VerifiersSettings) -> VerifiersEnvironment:
    """Make the environment that `settings` names. Raises ConfigError for a package that is missing or does not fit."""
    version, module = installed_version(), environment_module(settings.id)
    where, installed = f"environment.id={settings.id!r}", importlib.metadata.version("verifiers")
    # the module of a kind is imported when it is needed, since each fits other versions of the package
    if hasattr(module, "load_environment"):
        if version >= (0, 4):
            raise ConfigError(
                f"{where} is of the kind with load_environment, which verifiers {installed} does not have any more: "
                "pip install 'verifiers>=0.3.1,<0.4'"
            )
        kind = importlib.import_module("parallm.integrations.verifiers.classic").ClassicSource
    else:
        if version < (0, 4):
            raise ConfigError(
                f"{where} has no load_environment; tasksets, the newer kind of environments, need verifiers 0.4, and "
                f"{installed} is installed: {INSTALL}"
            )
        kind = importlib.import_module("parallm.integrations.verifiers.taskset").TasksetSource
    return VerifiersEnvironment(settings, partial(kind, settings.id))


def installed_version() -> tuple[int, ...]:
    """The package's major and minor version. Raises ConfigError without the package."""
    try:
        version = importlib.metadata.version("verifiers")
    except importlib.metadata.PackageNotFoundError as error:
        raise ConfigError(f"environment=verifiers needs the package verifiers: {INSTALL}") from error
    return tuple(int(part) for part in version.split(".")[:2])


def environment_module(environment_id: str) -> ModuleType:
    """Import the module of an id such as `owner/some-name@1.0`, as the package does. Raises ConfigError."""
    name = environment_id.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower()
    try:
        return importlib.import_module(f"{SHIPPED}.{name}" if is_shipped(name) else name)
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name == name:
            raise ConfigError(
                f"environment.id={environment_id!r}: no module {name} is installed; install the environment's package "
                "(`prime env install OWNER/NAME`, or pip install its folder), or add its folder to PYTHONPATH"
            ) from error
        raise ConfigError(f"environment.id={environment_id!r} cannot be imported: {error}") from error


def is_shipped(name: str) -> bool:
    try:
        return importlib.util.find_spec(f"{SHIPPED}.{name}") is not None
    except ModuleNotFoundError:
        return False
