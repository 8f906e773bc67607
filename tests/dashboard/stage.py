"""The page on a real port: the real application in a thread of its own, before which made-up answers may stand."""

import asyncio
import json
import socket
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Any
from urllib.parse import parse_qsl

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from tests.dashboard.answers import Answers, event
from tests.server.conftest import CharacterTokenizer, EchoEngine, make_app

POLL_SECONDS = 0.01


class Stage:
    """`with Stage(answers) as stage` serves the page at `stage.url`. Its methods may be called from any thread.

    `answers` replaces what the page reads; None leaves all of it to the real application. `refusals` holds the answer
    for a path in place of both: status and message.
    """

    def __init__(self, answers: Answers | None = None, app: ASGIApp | None = None) -> None:
        self.answers = answers
        self.refusals: dict[str, tuple[int, str]] = {}
        self.asked: list[tuple[str, str, Mapping[str, str]]] = []
        """Method, path and headers of each request."""
        self._app = app if app is not None else make_app(EchoEngine(), CharacterTokenizer())
        self._news: list[str] = []
        self._num_told = 0
        self._epoch = 0
        config = uvicorn.Config(
            self._serve, interface="asgi3", log_config=None, lifespan="off", ws="none", timeout_graceful_shutdown=1
        )
        self._server = uvicorn.Server(config)
        self._socket = socket.socket()
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def url(self) -> str:
        host, port = self._socket.getsockname()
        return f"http://{host}:{port}/dashboard/"

    def __enter__(self) -> "Stage":
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", 0))
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.hang_up()
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()

    def _run(self) -> None:
        asyncio.run(self._serve_until_told())

    async def _serve_until_told(self) -> None:
        await self._server.serve(sockets=[self._socket])
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()  # a busy browser has not taken the last bytes in time
        await asyncio.sleep(0)

    def tell(self, kind: str, data: object) -> None:
        """Send an event to every page that watches."""
        self._news.append(event(kind, data))
        self._num_told += 1

    def hang_up(self) -> None:
        """End all streams; pages connect anew."""
        self._epoch += 1

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path, query = scope["path"], dict(parse_qsl(scope["query_string"].decode()))
        headers = {name.decode(): value.decode("latin-1") for name, value in scope["headers"]}
        self.asked.append((scope["method"], path, headers))
        if path in self.refusals:
            status, message = self.refusals[path]
            await _answer(send, status, {"error": {"message": message}})
        elif self.answers is not None and path == "/v1/events":
            await self._stream(receive, send)
        elif self.answers is not None and (found := self.answers.answer(path, query)) is not None:
            await _answer(send, 200, found)
        else:
            await self._app(scope, receive, send)

    async def _stream(self, receive: Receive, send: Send) -> None:
        assert self.answers is not None
        epoch, at = self._epoch, self._num_told
        await _begin(send, 200, "text/event-stream")
        await send({"type": "http.response.body", "body": self.answers.hello().encode(), "more_body": True})
        gone = asyncio.create_task(_until_gone(receive))
        while epoch == self._epoch and not gone.done():
            while at < self._num_told:
                text = self._news[at]
                at += 1
                await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
            await asyncio.sleep(POLL_SECONDS)
        gone.cancel()
        await send({"type": "http.response.body", "body": b""})


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _begin(send: Send, status: int, kind: str, length: int | None = None) -> None:
    headers: list[Any] = [(b"content-type", kind.encode())]
    headers += [] if length is None else [(b"content-length", str(length).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def _answer(send: Send, status: int, value: object) -> None:
    body = json.dumps(value).encode()
    await _begin(send, status, "application/json", len(body))
    await send({"type": "http.response.body", "body": body})
