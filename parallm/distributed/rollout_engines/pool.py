"""The rollout engines of a trainer: this process's own (`local`) and servers elsewhere, behind `Generate`.

A request goes to the engine with the largest share of free rows, and waits while none has a free row. What an engine
does not answer to its end is sampled again by another one, with the same seeds.
"""

import asyncio
import logging
import os
import socket
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Protocol

import httpx

from parallm.device.thread import DeviceThread
from parallm.distributed.rollout_engines.check import Rescorer
from parallm.distributed.rollout_engines.replica import Account, Replica, Trainer, Versions
from parallm.distributed.rollout_engines.replica_client import KEY_VARIABLE, EngineLost, EngineRefused, ReplicaClient
from parallm.errors import ConfigError
from parallm.model.adapters.table import AdapterTable
from parallm.model.shared_model import SharedModel
from parallm.rollout.settings import LOCAL
from parallm.server.control.replica_schemas import API, JoinBody
from parallm.types import Completion, EngineStats, GenerationRequest

LEAVE_SECONDS = 10.0
WARN_SECONDS = 30.0
"""Time between two warnings while requests wait and no engine is there."""

logger = logging.getLogger(__name__)


class LocalEngine(Protocol):
    """The part of `AsyncEngine` that a pool uses."""

    @property
    def max_context(self) -> int: ...

    def stats(self) -> EngineStats: ...

    def completions(self, requests: Sequence[GenerationRequest]) -> AsyncGenerator[tuple[int, Completion], None]: ...

    def generate_all(self, requests: Sequence[GenerationRequest]) -> Awaitable[list[list[Completion]]]: ...


class RolloutEngine(Protocol):
    """One engine of a pool."""

    name: str
    num_taken: int
    """Rows of requests under way; written by the pool."""
    reason: str
    """Why it is not there."""

    @property
    def capacity(self) -> int:
        """Rows that may be taken; 0 while it is not there."""

    def sample(self, request: GenerationRequest) -> AsyncGenerator[Completion, None]:
        """Yield each completion as soon as it ends. Raises EngineLost or EngineRefused where another engine may answer,
        and what generating raises."""

    def take_figures(self) -> Mapping[str, float]:
        """Return the figures since the last call."""


class Local:
    """The engine of this process."""

    name = LOCAL
    reason = ""

    def __init__(self, engine: LocalEngine) -> None:
        self.num_taken = 0
        self._engine = engine
        self._account = Account()

    @property
    def capacity(self) -> int:
        return self._engine.stats().max_rows

    async def sample(self, request: GenerationRequest) -> AsyncGenerator[Completion, None]:
        async with aclosing(self._engine.completions([request])) as completions:
            async for _, completion in completions:
                self._account.num_tokens += len(completion.tokens)
                yield completion

    def take_figures(self) -> Mapping[str, float]:
        account, self._account = self._account, Account()
        return {f"engines/{LOCAL}/tokens": account.num_tokens}


class EnginePool:
    """Used on the asyncio thread.

    Loop contract: consumes requests / waits for an engine with a free row / produces completions / ends with `close`.
    """

    def __init__(self, engines: Sequence[RolloutEngine]) -> None:
        self._engines = engines
        self._replicas = [engine for engine in engines if isinstance(engine, Replica)]
        self._waiting: deque[tuple[int, asyncio.Future[RolloutEngine]]] = deque()
        self._tasks: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()

    async def start(self) -> None:
        """Ask all servers once, then keep them joined. Raises ConfigError for those that do not fit this trainer."""
        asked = await asyncio.gather(*(replica.sync() for replica in self._replicas), return_exceptions=True)
        refusals = [str(error) for error in asked if isinstance(error, EngineRefused)]
        if refusals:
            raise ConfigError("\n".join(f"rollout.engines: {refusal}" for refusal in refusals))
        for error in asked:
            if isinstance(error, BaseException) and not isinstance(error, EngineLost):
                raise error
        self._tasks = [asyncio.create_task(replica.run(self._changed)) for replica in self._replicas]
        self._tasks += [asyncio.create_task(self._assign_on_change()), asyncio.create_task(self._warn())]

    async def close(self) -> None:
        """Leave the servers, which go on with the last version."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_SECONDS):
                await asyncio.gather(*(replica.leave() for replica in self._replicas), return_exceptions=True)

    async def completions(self, requests: Sequence[GenerationRequest]) -> AsyncGenerator[tuple[int, Completion], None]:
        """Yield each completion as soon as it ends, with the index of its request; closing it aborts the requests.

        Raises what generating raises, but not for a lost server.
        """
        ended: asyncio.Queue[tuple[int, Completion] | Exception] = asyncio.Queue()
        tasks = [asyncio.create_task(self._sample(*numbered, ended)) for numbered in enumerate(requests)]
        try:
            for _ in range(sum(request.n for request in requests)):
                completion = await ended.get()
                if isinstance(completion, Exception):
                    raise completion
                yield completion
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def take_figures(self) -> dict[str, float]:
        """Return the figures of all engines since the last call."""
        figures: dict[str, float] = {"engines/present": sum(engine.capacity > 0 for engine in self._engines)}
        for engine in self._engines:
            figures |= engine.take_figures()
        return figures

    async def _sample(
        self, index: int, request: GenerationRequest, ended: "asyncio.Queue[tuple[int, Completion] | Exception]"
    ) -> None:
        """Sample one request, by as many engines as it takes."""
        missing = set(range(request.n))
        try:
            while missing:
                engine = await self._free_engine(request.n)
                num_taken = request.n
                try:
                    async with aclosing(engine.sample(request)) as completions:
                        async for completion in completions:
                            num_taken -= 1
                            self._release(engine, 1)
                            if completion.index in missing:
                                missing.remove(completion.index)
                                ended.put_nowait((index, completion))
                except (EngineLost, EngineRefused):
                    pass  # the engine has logged it, and is not there any more
                finally:
                    self._release(engine, num_taken)
        except Exception as error:  # noqa: BLE001  belongs to the caller of `completions`
            ended.put_nowait(error)

    async def _free_engine(self, num_rows: int) -> RolloutEngine:
        """Wait for an engine with a free row, and take `num_rows` of its rows."""
        future: asyncio.Future[RolloutEngine] = asyncio.get_running_loop().create_future()
        self._waiting.append((num_rows, future))
        self._assign()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self._release(future.result(), num_rows)
            raise

    def _release(self, engine: RolloutEngine, num_rows: int) -> None:
        engine.num_taken -= num_rows
        self._assign()

    def _assign(self) -> None:
        """Give waiting requests, in the order of their coming, to engines with free rows."""
        while self._waiting:
            num_rows, future = self._waiting[0]
            if future.done():  # cancelled
                self._waiting.popleft()
                continue
            free = [engine for engine in self._engines if engine.num_taken < engine.capacity]
            if not free:
                return
            engine = min(free, key=lambda engine: (engine.num_taken + num_rows) / engine.capacity)
            engine.num_taken += num_rows
            future.set_result(engine)
            self._waiting.popleft()

    async def _assign_on_change(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            self._assign()

    async def _warn(self) -> None:
        """Say why nothing is sampled, while no engine is there."""
        while True:
            await asyncio.sleep(WARN_SECONDS)
            if self._waiting and not any(engine.capacity for engine in self._engines):
                reasons = "; ".join(f"{engine.name}: {engine.reason}" for engine in self._engines)
                logger.warning("%d requests wait for a rollout engine: %s", len(self._waiting), reasons)


async def open_pool(
    urls: Sequence[str],
    engine: LocalEngine,
    model: SharedModel,
    table: AdapterTable,
    device: DeviceThread,
    *,
    policy: str,
    folder: Path,
    defer: Callable[[Callable[[], Awaitable[None]]], object],
) -> EnginePool:
    """Return a pool of the engines in `rollout.engines`, which `defer`red functions close. Raises ConfigError.

    `folder`: that of the run, by which servers know it again after a restart.
    """
    trainer = Trainer(
        facts=JoinBody(
            api=API,
            session=uuid.uuid4().hex,
            owner=f"{socket.gethostname()}:{folder.absolute()}"[:1024],
            policy=policy,
            base=model.name,
            base_sha256=model.sha256,
            tokenizer_sha256=model.tokenizer.sha256,
            max_context=engine.max_context,
        ),
        versions=Versions(table, policy, device),
        rescorer=Rescorer(engine.generate_all, policy),
        vocabulary_size=model.vocabulary_size,
        dtype=str(model.dtype).removeprefix("mlx.core."),
    )
    key = os.environ.get(KEY_VARIABLE, "").strip()
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    http = httpx.AsyncClient(limits=httpx.Limits(max_connections=None, max_keepalive_connections=None))
    defer(http.aclose)
    engines: list[RolloutEngine] = [
        Local(engine) if url == LOCAL else Replica(ReplicaClient(url, http, headers=headers), trainer) for url in urls
    ]
    pool = EnginePool(engines)
    defer(pool.close)
    await pool.start()
    return pool
