"""A server that trains nothing, with runs whose steps a test reports."""

import asyncio
import gc
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from parallm.metrics.live_run import LiveRun
from parallm.metrics.watching import Watching
from parallm.reports import TrainingStatus
from parallm.server.operation.http_server import HttpServer
from parallm.server.operation.sockets import bind
from parallm.server.settings import ServerSettings
from tests.server.conftest import CharacterTokenizer, EchoEngine, make_app

FREE_PORT = ServerSettings(port=0, drain_seconds=5)
RUN = "sums~2026-01-31_22-04-10"


@pytest.fixture
def live() -> LiveRun:
    return LiveRun("policy", Watching().news, None)


@pytest.fixture
def watching() -> Watching:
    """One policy in training."""
    watching = Watching(run_id=RUN)
    run = LiveRun("policy", watching.news, None)
    run.status = lambda: TrainingStatus(state="updating", step=len(run.history), total_steps=100)
    watching.runs = {"policy": run}
    return watching


@pytest.fixture
def no_collections() -> Iterator[None]:
    """Their pauses are those of all that other tests of this process have left."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def app(watching: Watching) -> FastAPI:
    return application(watching)


def application(watching: Watching, **fields: Any) -> FastAPI:
    settings = fields.pop("settings", FREE_PORT)
    return make_app(EchoEngine(), CharacterTokenizer(), settings=settings, watching=watching, **fields)


def row(step: int, **numbers: float) -> dict[str, Any]:
    return {"step": step, "time": 1_700_000_000.0 + step, "reward/mean": step / 8, **numbers}


@asynccontextmanager
async def served(app: FastAPI, settings: ServerSettings = FREE_PORT) -> AsyncIterator[httpx.AsyncClient]:
    """Serve on a free port and yield a client of it."""
    server = HttpServer(app, bind(settings), settings)
    await server.start()
    try:
        async with httpx.AsyncClient(base_url=server.url, timeout=20) as client:
            yield client
    finally:
        await server.stop()


class Page:
    """The events of one open stream, as a page reads them."""

    def __init__(self, response: httpx.Response) -> None:
        self._lines = response.aiter_lines()

    async def next(self, *kinds: str) -> Mapping[str, Any]:
        """Return the data of the next event, or of the next one of these kinds, with its kind as `event`."""
        kind = ""
        async with asyncio.timeout(20):
            async for line in self._lines:
                if line.startswith("event: "):
                    kind = line.removeprefix("event: ")
                elif line.startswith("data: ") and (not kinds or kind in kinds):
                    return {"event": kind, **json.loads(line.removeprefix("data: "))}
        raise EOFError("the stream has ended")


@asynccontextmanager
async def opened(client: httpx.AsyncClient, path: str = "/v1/events", **headers: str) -> AsyncIterator[Page]:
    async with client.stream("GET", path, headers=headers) as response:
        assert response.status_code == 200, (await response.aread()).decode()
        yield Page(response)
