"""The pool: models in memory that requests lease, and the one place where they are loaded and unloaded.

It is an actor: `_tell` gives each message to `lifecycle.decide` at once, on the event loop, and nothing else changes
the state. What takes time, a load or an unload, is a task whose end is a message again.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Protocol

from starlette.types import ASGIApp

from parallm.errors import EngineStopped, ModelError, NotStored, ParallmError, Unavailable
from parallm.registry.catalogue import Catalogue
from parallm.registry.lifecycle import (
    Effect,
    Grant,
    Leave,
    Loaded,
    LoadFailed,
    Message,
    PoolState,
    Refuse,
    Released,
    StartLoad,
    StartUnload,
    Tick,
    Unload,
    Unloaded,
    Want,
    decide,
    next_time,
)
from parallm.registry.records import Loaded as LoadedModel
from parallm.registry.records import Named, Overlay
from parallm.registry.settings import RegistrySettings

logger = logging.getLogger(__name__)


class OpenModel(Protocol):
    """A model in memory."""

    @property
    def app(self) -> ASGIApp:
        """Return the application that answers requests for it."""

    @property
    def num_bytes(self) -> int:
        """Return what it takes at most, with its keys and values."""

    def call(self, name: str) -> None:
        """Let requests call it so."""

    async def close(self) -> None:
        """Give its memory back. It answers nothing just now."""


class Loader(Protocol):
    """Makes models; interface of `run.models.ModelLoader`."""

    def num_bytes(self, named: Named, loaded: int | None) -> int:
        """Return what a load would take; the last one took `loaded`, if it is known."""

    async def open(self, named: Named) -> OpenModel:
        """Load. Raises ParallmError, MemoryError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnModel:
    """The process's own model, which is always in memory."""

    folders: tuple[Path, ...]
    """Folders or files that it is read from, resolved."""
    user: str
    """What keeps it there, such as `run NAME, which trains on it`."""
    call: Callable[[str], None]
    """Lets requests call it by a name."""


@dataclass(frozen=True, slots=True)
class Lease:
    """A model that stays in memory until `release`."""

    app: ASGIApp | None
    """None: the process's own application."""
    seconds: float
    """Time that it took to load, or to wait."""
    release: Callable[[], None]


class Pool:
    """Interface of `server.interfaces.Models`. For the event loop only."""

    def __init__(
        self, catalogue: Catalogue, settings: RegistrySettings, loader: Loader, budget: int, own: OwnModel
    ) -> None:
        self._catalogue = catalogue
        self._settings = settings
        self._loader = loader
        self._own = own
        self._state = PoolState(budget=budget, wait_seconds=settings.wait_seconds)
        self._numbers = itertools.count(1)
        self._futures: dict[int, tuple[asyncio.Future[None], str | None]] = {}
        """Those that wait, by number, with the model that a grant leases."""
        self._named: dict[str, Named] = {}
        """The newest name that each model was asked for by."""
        self._open: dict[str, OpenModel] = {}
        self._names: dict[str, set[str]] = {}
        """Names that each model in memory was asked for by."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    @property
    def folder(self) -> Path:
        return self._catalogue.folder

    async def names(self) -> tuple[Named, ...]:
        return await self._catalogue.names()

    async def describe(self, name: str) -> Named:
        return await self._catalogue.find(name)

    def loaded(self) -> tuple[LoadedModel, ...]:
        passed = time.time() - time.monotonic()
        return tuple(
            LoadedModel(
                name=self._named[key].name,
                names=tuple(sorted(self._names.get(key, {self._named[key].name}))),
                state=slot.phase,
                num_bytes=slot.num_bytes,
                expires_at=None if slot.deadline is None or slot.is_pinned else slot.deadline + passed,
                is_pinned=slot.is_pinned,
                num_leases=slot.num_leases,
            )
            for key, slot in self._state.slots.items()
            if slot.phase in ("loading", "ready", "draining", "unloading")
        )

    def is_loaded(self, named: Named) -> bool:
        return self._is_own(named) or named.key in self._open

    async def load(self, name: str, *, keep_alive: float | None = None, is_pinned: bool | None = None) -> None:
        named = await self._catalogue.find(name)
        if is_pinned is not None:
            await self._catalogue.pin(named.name, is_pinned=is_pinned)
        lease = await self._lease(
            named, keep_alive, is_pinned=named.is_pinned or None if is_pinned is None else is_pinned
        )
        lease.release()

    async def unload(self, name: str) -> None:
        named = await self._catalogue.find(name)
        if self._is_own(named):
            raise Unavailable(f"{named.name} cannot be unloaded: it is the base of {self._own.user}")
        if named.is_pinned:
            await self._catalogue.pin(named.name, is_pinned=False)
        await self._unload(named.key)

    async def copy(self, source: str, destination: str) -> None:
        await self._catalogue.copy(source, destination)

    async def delete(self, name: str) -> None:
        named = await self._catalogue.find(name)
        await self._catalogue.delete(name)
        if all(other.key != named.key for other in await self._catalogue.names()):
            await self._unload(named.key)

    async def create(self, name: str, source: str, overlay: Overlay | None = None) -> Named:
        return await self._catalogue.create(name, source, overlay)

    async def scan(self) -> tuple[str, ...]:
        return await self._catalogue.scan()

    async def lease(self, named: Named, keep_alive: float | None = None) -> Lease:
        """Return a model for a request, loaded if need be. A caller that is cancelled takes its wish along.

        Raises Unavailable for a name that requests may not load, and what a load raises: ModelError, NoMemory.
        """
        allowed = [pattern if ":" in pattern else f"{pattern}:*" for pattern in self._settings.allowed]
        is_allowed = not allowed or any(fnmatchcase(named.name.lower(), pattern.lower()) for pattern in allowed)
        if not is_allowed and not self.is_loaded(named):
            raise Unavailable(
                f"{named.name} is not loaded, and registry.allowed does not let requests load it; an operator loads "
                "it by POST /v1/models/load"
            )
        return await self._lease(named, keep_alive, is_pinned=named.is_pinned or None)

    async def close(self) -> None:
        """Unload everything, whoever uses it."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        for future, _ in self._futures.values():
            if not future.done():
                future.set_exception(EngineStopped("the server ends"))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for model in self._open.values():
            await model.close()
        self._open.clear()
        self._catalogue.close()

    def _is_own(self, named: Named) -> bool:
        has_adapter = named.overlay is not None and named.overlay.adapter is not None
        return not has_adapter and Path(named.model.folder).resolve() in self._own.folders

    async def _lease(self, named: Named, keep_alive: float | None, *, is_pinned: bool | None) -> Lease:
        if self._is_own(named):
            self._own.call(named.name)
            return Lease(None, 0.0, lambda: None)
        if named.model.is_missing and named.key not in self._open:
            raise ModelError(
                f"{named.name}: {named.model.folder} is not there any more; delete the name, or scan again"
            )
        began, key, number = time.monotonic(), named.key, next(self._numbers)
        num_bytes = self._loader.num_bytes(named, await self._catalogue.loaded_bytes(named.model))
        seconds = self._keep_alive(key) if keep_alive is None else keep_alive
        self._named[key] = named
        await self._ask(Want(key, number, num_bytes, seconds, is_pinned), number, key)
        model = self._open[key]
        self._names[key].add(named.name)
        model.call(named.name)
        return Lease(model.app, time.monotonic() - began, lambda: self._tell(Released(key)))

    def _keep_alive(self, key: str) -> float:
        """What a request before has asked for, as long as the model is in memory, else the settings' value."""
        slot = self._state.slots.get(key)
        return self._settings.keep_alive if slot is None or key not in self._open else slot.keep_alive

    async def _unload(self, key: str) -> None:
        number = next(self._numbers)
        await self._ask(Unload(key, number), number, None)

    async def _ask(self, message: Want | Unload, number: int, leases: str | None) -> None:
        """Tell a message and wait for its grant. Raises the error of a refusal."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._futures[number] = future, leases
        self._tell(message)
        try:
            await future
        except asyncio.CancelledError:
            if self._futures.pop(number, None) is not None:
                self._tell(Leave(number))
            elif not future.cancelled() and leases is not None:  # granted at the moment of the cancellation
                self._tell(Released(leases))
            raise

    def _tell(self, message: Message) -> None:
        if self._is_closed:
            return
        self._state, effects = decide(self._state, message, time.monotonic())
        for effect in effects:
            self._carry_out(effect)
        if self._timer is not None:
            self._timer.cancel()
        when = next_time(self._state)
        delay = None if when is None else max(0.0, when - time.monotonic())
        loop = asyncio.get_running_loop()
        self._timer = None if delay is None else loop.call_later(delay, self._tell, Tick())

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case StartLoad(key=key):
                self._begin(self._load(key, self._named[key]))
            case StartUnload(key=key):
                del self._names[key]
                self._begin(self._close(key, self._open.pop(key)))
            case Grant(number=number):
                future, leases = self._futures.pop(number)
                if not future.done():
                    future.set_result(None)
                elif leases is not None:  # its client has left
                    asyncio.get_running_loop().call_soon(self._tell, Released(leases))
            case Refuse(number=number, error=error):
                future, _ = self._futures.pop(number)
                if not future.done():
                    future.set_exception(error)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _load(self, key: str, named: Named) -> None:
        began = time.monotonic()
        logger.info("loading %s", named.name)
        try:
            model = await self._loader.open(named)
        except Exception as error:  # whatever it is: those that wait get it
            failure = (
                error if isinstance(error, ParallmError) else ModelError(f"{named.name} cannot be loaded: {error}")
            )
            logger.warning("%s is not loaded: %s", named.name, failure, exc_info=failure is not error)
            await self._note(named, began, error=str(failure))
            self._tell(LoadFailed(key, failure, is_memory=isinstance(error, MemoryError)))
            return
        self._open[key], self._names[key] = model, {named.name}
        await self._note(named, began, num_bytes=model.num_bytes)
        logger.info("%s is loaded after %.1f s", named.name, time.monotonic() - began)
        self._tell(Loaded(key, model.num_bytes))

    async def _note(
        self, named: Named, began: float, *, num_bytes: int | None = None, error: str | None = None
    ) -> None:
        try:
            await self._catalogue.note_load(named.model, time.monotonic() - began, num_bytes=num_bytes, error=error)
        except NotStored as failure:
            logger.warning("%s", failure)

    async def _close(self, key: str, model: OpenModel) -> None:
        try:
            await model.close()
        except Exception:
            logger.exception("%s was not unloaded as it should be", self._named[key].name)
        del model
        logger.info("%s is unloaded", self._named[key].name)
        self._tell(Unloaded(key))
