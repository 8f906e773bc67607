"""A server in this process whose engine answers from the request alone."""

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from parallm.server.operation.http_server import HttpServer
from parallm.server.operation.sockets import bind
from parallm.server.settings import ServerSettings
from tests.server.conftest import CharacterTokenizer, EchoEngine, application


@dataclass
class Answering:
    """A server at `url`, and the engine behind it."""

    url: str
    engine: EchoEngine
    loop: asyncio.AbstractEventLoop


@pytest.fixture
def answering() -> Iterator[Answering]:
    """A server on a free port, from its first answer to its end."""
    engine, loop = EchoEngine(), asyncio.new_event_loop()
    settings = ServerSettings(port=0, drain_seconds=0)
    server = HttpServer(application(engine, CharacterTokenizer()), bind(settings), settings)
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def do(coroutine: Any) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, loop).result(20)

    do(server.start())
    try:
        yield Answering(server.url, engine, loop)
    finally:
        do(server.stop())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.fixture(autouse=True)
def _no_server_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    for name in ("PARALLM_HOST", "PARALLM_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
