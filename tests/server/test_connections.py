"""Clients that open connections and send little or nothing on them, with real sockets."""

import asyncio
import gc
import json
import logging
import resource
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing, suppress
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from fastapi import FastAPI, Response

from parallm.server import connection as exchange
from parallm.server.operation import http_server
from parallm.server.operation.auth import ROLES
from parallm.server.operation.http_server import HttpServer
from parallm.server.operation.sockets import FILES_FOR_OTHERS, ListenError, bind, connection_limit
from parallm.server.settings import ServerSettings

BODY = json.dumps({"model": "policy", "prompt": "a", "max_tokens": 1}).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
WHOLE = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
KINDS = {
    "no byte": b"",
    "half a head": b"GET /health HTTP/1.1\r\nHost: loc",
    "half a body": HEAD + b"Content-Length: 70\r\n\r\n{",
    "half a chunk": HEAD + b"Transfer-Encoding: chunked\r\n\r\n40\r\n{",
    "the rest of a body that is refused": b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nContent-Length: 70\r\n\r\n{",
}
Open = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def serving(app: FastAPI, **settings: Any) -> AsyncIterator[int]:
    """A server on a free port."""
    found = ServerSettings(port=0, drain_seconds=0, **settings)
    server = HttpServer(app, bind(found), found)
    await server.start()
    try:
        port = urlsplit(server.url).port
        assert port is not None
        yield port
    finally:
        await server.stop()


async def opened(port: int, sent: bytes = b"") -> Open:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    await writer.drain()
    return reader, writer


async def answer_of(port: int, sent: bytes) -> bytes:
    """All that comes until the server closes the connection; empty if it is reset."""
    reader, writer = await opened(port, sent)
    with closing(writer), suppress(ConnectionError):
        return await reader.read()
    return b""


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "MAX_SECONDS", {"head": 0.1, "leftover": 0.1})
    monkeypatch.setattr(http_server, "SECONDS_BETWEEN_SWEEPS", 0.02)
    monkeypatch.setattr(exchange, "BODY_SECONDS", 0.1)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("sent", KINDS.values(), ids=KINDS)
def test_a_client_that_stands_still_is_closed(app: FastAPI, sent: bytes) -> None:
    async def run() -> bytes:
        async with serving(app) as port, asyncio.timeout(10):
            return await answer_of(port, sent)

    answer = asyncio.run(run())
    wanted = b"" if not sent else b"HTTP/1.1 404" if b"nowhere" in sent else b"HTTP/1.1 408"
    assert answer.startswith(wanted)
    assert bool(answer) == bool(sent)


@pytest.mark.usefixtures("impatient")
def test_a_head_that_trickles_in_has_no_more_time(app: FastAPI) -> None:
    async def run() -> bytes:
        async with serving(app) as port, asyncio.timeout(10):
            reader, writer = await opened(port, b"GET /health HTTP/1.1\r\n")
            answer = asyncio.create_task(reader.read())
            while not answer.done():
                writer.write(b"x: y\r\n")
                await asyncio.sleep(0.01)
            writer.close()
            return b"" if answer.exception() else answer.result()

    assert asyncio.run(run())[:12] in (b"HTTP/1.1 408", b"")


@pytest.mark.usefixtures("impatient")
def test_bytes_of_a_body_give_time_for_more(app: FastAPI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "MIN_BYTES_PER_SECOND", 1)

    async def run() -> bytes:
        async with serving(app) as port, asyncio.timeout(10):
            reader, writer = await opened(port, WHOLE[:-30])
            await asyncio.sleep(4 * exchange.BODY_SECONDS)
            writer.write(WHOLE[-30:])
            with closing(writer):
                return await reader.readline()

    assert asyncio.run(run()).startswith(b"HTTP/1.1 200")


def test_a_client_that_takes_no_answer_is_closed(app: FastAPI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "SECONDS_BETWEEN_SWEEPS", 0.02)
    asked = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n"

    async def run() -> None:
        async with serving(app, stall_seconds=0.2) as port, asyncio.timeout(20):
            with socket.socket() as unread:
                unread.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                unread.connect(("127.0.0.1", port))
                unread.setblocking(False)
                while True:  # pipelined, until neither side's buffers take more
                    with suppress(BlockingIOError):
                        unread.send(asked)
                    await asyncio.sleep(0.001)

    with pytest.raises(ConnectionError):
        asyncio.run(run())


def test_half_open_connections_beyond_the_limit_make_room_for_clients(app: FastAPI) -> None:
    async def run() -> list[int]:
        async with serving(app, max_connections=20) as port, asyncio.timeout(20):
            base = f"http://127.0.0.1:{port}"
            async with httpx.AsyncClient(base_url=base) as idle:
                assert (await idle.get("/health")).status_code == 200
                half = [await opened(port, list(KINDS.values())[place % 4]) for place in range(60)]
                statuses = []
                for _ in range(10):
                    async with httpx.AsyncClient(base_url=base) as client:
                        answer = await client.post("/v1/completions", content=BODY)
                        statuses.append(answer.status_code)
                # it has waited between two requests all the while, which is no reason to close it as long as others are
                (kept,) = idle._transport._pool.connections  # type: ignore[attr-defined]
                statuses.append((await idle.get("/health")).status_code)
                assert idle._transport._pool.connections == [kept]  # type: ignore[attr-defined]
                for _, writer in half:
                    writer.close()
                return statuses

    assert asyncio.run(run()) == [200] * 11


def test_when_all_connections_wait_for_answers_new_ones_are_told_and_probes_answered(
    app: FastAPI, engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    engine.is_endless = True
    probe = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"

    async def run() -> tuple[bytes, bytes, bytes]:
        async with serving(app, max_connections=4) as port, asyncio.timeout(20):
            streams = [await opened(port, WHOLE) for _ in range(4)]
            while len(engine.requests) < 4:
                await asyncio.sleep(0.001)
            refused, healthy = await answer_of(port, WHOLE), await answer_of(port, probe)
            more = [await opened(port) for _ in range(200)]
            still_healthy = await answer_of(port, probe)
            for _, writer in (*streams, *more):
                writer.close()
            return refused, healthy, still_healthy

    refused, healthy, still_healthy = asyncio.run(run())
    assert refused.startswith(b"HTTP/1.1 503")
    assert b"server.max_connections" in refused
    assert healthy.startswith(b"HTTP/1.1 200")
    assert still_healthy.startswith(b"HTTP/1.1 200")
    assert [record.message for record in caplog.records if "4 connections are open" in record.message]


def test_without_room_for_probes_a_connection_is_refused_unread(
    app: FastAPI, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "RESERVE", 0)
    engine.is_endless = True

    async def run() -> bytes:
        async with serving(app, max_connections=1) as port, asyncio.timeout(20):
            _, stream = await opened(port, WHOLE)
            while not engine.requests:
                await asyncio.sleep(0.001)
            answer = await answer_of(port, WHOLE)
            stream.close()
            return answer

    assert asyncio.run(run()) in (http_server.REFUSAL, b"")  # a reset may overtake it


def test_without_a_file_left_the_server_waits_and_says_so_once(
    app: FastAPI, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(http_server, "SECONDS_BETWEEN_SWEEPS", 0.01)
    accept = socket.socket.accept
    tries: list[float] = []

    def fail(listener: socket.socket) -> tuple[socket.socket, Any]:
        tries.append(time.monotonic())
        if len(tries) <= 20:
            raise OSError(24, "Too many open files")
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", fail)

    async def run() -> int:
        async with serving(app) as port, httpx.AsyncClient() as client:
            return (await client.get(f"http://127.0.0.1:{port}/health")).status_code

    assert asyncio.run(run()) == 200
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [record.message for record in warnings] == ["no connection can be accepted: [Errno 24] Too many open files"]
    assert min(after - before for before, after in pairwise(tries[:21])) > 0.009


def test_a_limit_that_the_open_files_do_not_allow_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    limit: Callable[[int], tuple[int, int]] = lambda _: (600, 600)  # noqa: E731
    monkeypatch.setattr(resource, "getrlimit", limit)
    assert connection_limit(ServerSettings()) == 300
    assert connection_limit(ServerSettings(max_connections=600 - FILES_FOR_OTHERS)) == 344
    with pytest.raises(ListenError, match=r"server.max_connections=345 needs 601 open files.*have 600.*=344"):
        bind(ServerSettings(port=0, max_connections=345))


@pytest.mark.parametrize("turns", range(5))
def test_a_connection_that_comes_as_the_server_ends_is_closed(app: FastAPI, turns: int) -> None:
    """A turn of the event loop lies between the arrival of a connection, its acceptance, and its first callback."""

    async def run() -> None:
        server = HttpServer(app, bind(ServerSettings(port=0)), ServerSettings(port=0, drain_seconds=0))
        await server.start()
        port = urlsplit(server.url).port
        with socket.create_connection(("127.0.0.1", port or 0)):
            for _ in range(turns):
                await asyncio.sleep(0)
            accepting = server._server._connections
            assert accepting is not None
            accepting.cancel()
            await asyncio.gather(accepting, return_exceptions=True)
            server._server._connections = None
        await server.stop()

    asyncio.run(run())
    gc.collect()  # a socket that nobody closed warns as it is freed


def test_a_connection_that_takes_no_answer_is_closed_as_the_server_ends(
    app: FastAPI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "LAST_BYTES_SECONDS", 0.1)
    asked = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n"

    async def run() -> None:
        with socket.socket() as unread:
            unread.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            async with serving(app) as port, asyncio.timeout(20):
                unread.connect(("127.0.0.1", port))
                unread.setblocking(False)
                for _ in range(200):  # pipelined, more than both sides' buffers take
                    with suppress(BlockingIOError):
                        unread.send(asked)
                    await asyncio.sleep(0.001)
            unread.setblocking(True)
            unread.settimeout(5)
            with suppress(ConnectionResetError):
                while unread.recv(65_536):  # what was on its way, then the end
                    pass

    asyncio.run(run())
    gc.collect()  # a socket that nobody closed warns as it is freed


def test_a_client_that_takes_its_answer_slowly_gets_all_of_it_as_the_server_ends(
    app: FastAPI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "LAST_BYTES_SECONDS", 0.2)
    size = 32 * 1024 * 1024  # more than the buffers of the system hold
    monkeypatch.setitem(ROLES, "GET /large", "public")
    app.add_api_route("/large", lambda: Response(bytes(size)))

    async def run() -> tuple[int, float]:
        settings = ServerSettings(port=0, drain_seconds=20)
        server = HttpServer(app, bind(settings), settings)
        await server.start()
        reader, writer = await opened(urlsplit(server.url).port or 0, b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n")
        with closing(writer):
            await reader.readuntil(b"\r\n\r\n")
            began = time.monotonic()
            end, num_received = asyncio.create_task(server.stop()), 0
            while received := await reader.read(256 * 1024):
                num_received += len(received)
                await asyncio.sleep(0.01)
            await end
        return num_received, time.monotonic() - began

    num_received, seconds = asyncio.run(run())
    assert num_received == size
    assert seconds > 0.5, "it took no longer than a client that takes nothing may"
