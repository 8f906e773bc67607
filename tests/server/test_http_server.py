import asyncio
import signal
import socket
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from fastapi import FastAPI

from parallm.errors import ParallmError
from parallm.server.operation.http_server import HttpServer
from parallm.server.operation.sockets import bind
from parallm.server.settings import ServerSettings

FREE_PORT = ServerSettings(port=0)


def test_a_port_in_use_is_named_with_the_way_out() -> None:
    with bind(FREE_PORT) as taken, pytest.raises(ParallmError, match=r"127.0.0.1:\d+ is in use.*server.port=0"):
        bind(ServerSettings(port=urlsplit(taken.url).port))


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ParallmError, match=r"cannot listen on 192.0.2.1:0.*server.host="):
        bind(ServerSettings(host="192.0.2.1", port=0, control_routes=False))


def test_port_0_serves_on_a_free_port_until_stopped_and_leaves_signals_alone(app: FastAPI) -> None:
    async def run() -> tuple[int, object, int]:
        handler = signal.getsignal(signal.SIGINT)
        server = HttpServer(app, bind(FREE_PORT), ServerSettings(drain_seconds=5))
        await server.start()
        async with httpx.AsyncClient() as client:
            status = (await client.get(f"{server.url}/health")).status_code
        is_kept = signal.getsignal(signal.SIGINT) is handler
        await server.stop()
        await server.stop()
        port = urlsplit(server.url).port
        assert port is not None
        return status, is_kept, port

    status, is_kept, port = asyncio.run(run())
    assert (status, is_kept) == (200, True)
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0


def test_stopping_before_the_start_frees_the_port(app: FastAPI) -> None:
    server = HttpServer(app, bind(FREE_PORT), ServerSettings(drain_seconds=5))
    asyncio.run(server.stop())
    port = urlsplit(server.url).port
    assert port is not None
    bind(ServerSettings(port=port)).close()


@pytest.mark.parametrize("stream", [False, True])
def test_a_closed_connection_aborts_the_request(app: FastAPI, engine: Any, stream: bool) -> None:
    engine.is_endless = True

    async def run() -> None:
        server = HttpServer(app, bind(FREE_PORT), ServerSettings(drain_seconds=5))
        await server.start()
        body = {"model": "policy", "prompt": "a", "stream": stream}
        async with httpx.AsyncClient() as client:
            request = asyncio.create_task(client.post(f"{server.url}/v1/completions", json=body))
            while not engine.requests:
                await asyncio.sleep(0.01)
            request.cancel()
            await asyncio.gather(request, return_exceptions=True)
        async with asyncio.timeout(5):
            while not engine.num_aborted:
                await asyncio.sleep(0.01)
        await server.stop()

    asyncio.run(run())


def test_stopping_aborts_what_outlives_the_grace_without_a_traceback(
    app: FastAPI, engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    engine.is_endless = True

    async def run() -> None:
        server = HttpServer(app, bind(FREE_PORT), ServerSettings(drain_seconds=0))
        await server.start()
        body = {"model": "policy", "prompt": "a", "stream": True}
        async with httpx.AsyncClient() as client:
            request = asyncio.create_task(client.post(f"{server.url}/v1/completions", json=body))
            while not engine.requests:
                await asyncio.sleep(0.01)
            await server.stop()
            await request

    asyncio.run(run())
    assert engine.num_aborted == 1
    assert not [record for record in caplog.records if record.exc_info]
