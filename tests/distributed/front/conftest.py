"""A front before workers without models, all in one process."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from bench.fake_worker import FakeWorker

from parallm.distributed.front.process import open_front
from parallm.distributed.front.workers import Workers
from parallm.distributed.settings import FrontSettings
from parallm.server.operation.auth import read_keys
from parallm.server.operation.sockets import bind
from parallm.server.settings import ServerSettings

SECONDS = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fronted:
    client: httpx.AsyncClient
    workers: Workers
    url: str

    async def chat(self, text: str = "hello", **fields: Any) -> httpx.Response:
        turns = [{"role": "user", "content": text}]
        return await self.client.post(
            "/v1/chat/completions", json={"model": "policy", "messages": turns, "max_tokens": 4} | fields
        )

    async def forget_workers(self) -> None:
        """Open no further connection to a server that the test is about to end."""
        self.workers.set({})
        await asyncio.sleep(0.05)

    async def until_up(self, number: int) -> None:
        while len(self.workers.up) != number:
            await asyncio.sleep(0.005)


@asynccontextmanager
async def fronted(
    *fakes: FakeWorker, settings: ServerSettings | None = None, hold_seconds: float = 10.0
) -> AsyncIterator[Fronted]:
    settings = settings or ServerSettings(port=0, drain_seconds=0)
    keys, bound = read_keys(settings), bind(settings)
    url = bound.url
    async with (
        open_front(settings, FrontSettings(hold_seconds=hold_seconds), keys, bound) as (workers, _),
        httpx.AsyncClient(base_url=url, timeout=SECONDS, trust_env=False) as client,
    ):
        for fake in fakes:
            await fake.start()
        workers.set({rank: fake.url for rank, fake in enumerate(fakes)})
        found = Fronted(client=client, workers=workers, url=url)
        await found.until_up(sum(fake.answers["GET /ready"][0] == 200 for fake in fakes))
        yield found
        for fake in fakes:
            fake.stop()


Test = Callable[[Fronted], Awaitable[None]]


@pytest.fixture
def with_front() -> Callable[..., None]:
    """Run a coroutine function on a front before these workers: `with_front(test, worker, worker, hold_seconds=1)`."""

    def run(test: Test, *fakes: FakeWorker, **options: Any) -> None:
        async def inside() -> None:
            async with asyncio.timeout(SECONDS), fronted(*fakes, **options) as front:
                await test(front)
            await asyncio.sleep(0.05)  # closed transports need a turn of the loop

        asyncio.run(inside())

    return run


def bodies(fake: FakeWorker) -> Sequence[Any]:
    return [body for _, _, _, body in fake.requests]


def paths(fake: FakeWorker) -> Sequence[str]:
    return [f"{method} {path}" for method, path, _, _ in fake.requests]
