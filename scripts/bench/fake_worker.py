"""A worker without a model, for measurements and tests of the front: it answers as a server does, at hardly any cost.

`python -m bench.fake_worker PORT [SECONDS_PER_TOKEN]` runs one; tests run several in their own process.
"""

import asyncio
import json
import sys
import uuid
from collections.abc import Callable, Mapping
from typing import Any

Answers = Mapping[str, tuple[int, Any]]
READY: tuple[int, Any] = (200, {"status": "ready"})


class FakeWorker:
    """Answers chats with one token for each of `max_tokens`, and `answers`, status and value by `METHOD PATH`."""

    def __init__(self, name: str = "", *, seconds_per_token: float = 0.0, answers: Answers | None = None) -> None:
        self.name = name
        self.seconds_per_token = seconds_per_token
        self.answers: dict[str, tuple[int, Any]] = {"GET /ready": READY, **(answers or {})}
        self.requests: list[tuple[str, str, dict[str, str], Any]] = []
        """Method, path, headers and JSON of each request but probes."""
        self.dies: Callable[[int], bool] = lambda _: False
        """Whether to end the connection after so many tokens of an answer; 0: before its head."""
        self.route_of_chats = "/v1/chat/completions"
        self.num_left = 0
        """Requests whose connection ended before their answer."""
        self._connections: set[_Connection] = set()
        self._server: asyncio.Server | None = None
        self.port = 0

    async def start(self, port: int = 0) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self), "127.0.0.1", port)
        self.port = self._server.sockets[0].getsockname()[1]

    def stop(self) -> None:
        """End as a killed process would."""
        assert self._server is not None, "started before"
        self._server.close()
        for connection in tuple(self._connections):
            connection.transport.abort()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


class _Connection(asyncio.Protocol):
    def __init__(self, worker: FakeWorker) -> None:
        self._worker = worker
        self._data = b""
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._worker._connections.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._worker._connections.discard(self)
        if self._task is not None and not self._task.done():
            self._worker.num_left += 1
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        self._data += data
        while (end := self._data.find(b"\r\n\r\n")) >= 0:
            first, *lines = self._data[:end].decode("latin-1").split("\r\n")
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
            stop = end + 4 + int(headers.get("content-length", 0))
            if len(self._data) < stop:
                return
            body, self._data = self._data[end + 4 : stop], self._data[stop:]
            method, path, _ = first.split(" ")
            self._respond(method, path, headers, body)

    def _respond(self, method: str, path: str, headers: dict[str, str], body: bytes) -> None:
        value = json.loads(body) if body else None
        if path != "/ready":
            self._worker.requests.append((method, path, headers, value))
        if (own := self._worker.answers.get(f"{method} {path}")) is not None:
            self._send(*own)
        elif path == self._worker.route_of_chats:
            self._task = asyncio.ensure_future(self._chat(value))
        else:
            self._send(404, {"error": {"message": "no such route", "code": "unknown_url"}})

    async def _chat(self, body: dict[str, Any]) -> None:
        number = body.get("max_tokens", 16)
        answer = f"chatcmpl-{body.get('request_id') or uuid.uuid4().hex}"
        if self._ends(0):
            return
        if not body.get("stream"):
            await asyncio.sleep(number * self._worker.seconds_per_token)
            choice = {"index": 0, "message": {"role": "assistant", "content": "x" * number}, "finish_reason": "length"}
            self._send(200, {"id": answer, "model": self._worker.name, "choices": [choice]})
            return
        head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
        self.transport.write(head.encode())
        for token in range(1, number + 1):
            choice = {"index": 0, "delta": {"content": "x"}, "finish_reason": None}
            event = {"id": answer, "object": "chat.completion.chunk", "model": self._worker.name, "choices": [choice]}
            self._send_chunk(b"data: " + json.dumps(event).encode() + b"\n\n")
            await asyncio.sleep(self._worker.seconds_per_token)
            if self._ends(token):
                return
        self._send_chunk(b"data: [DONE]\n\n")
        self.transport.write(b"0\r\n\r\n")

    def _ends(self, num_tokens: int) -> bool:
        if self._worker.dies(num_tokens):
            self.transport.abort()
            return True
        return False

    def _send_chunk(self, data: bytes) -> None:
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def _send(self, status: int, value: Any) -> None:
        kind, body = ("text/plain", value.encode()) if isinstance(value, str) else ("application/json", encoded(value))
        head = f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n"
        self.transport.write(head.encode() + body)


def encoded(value: Any) -> bytes:
    return json.dumps(value).encode()


async def run(port: int, seconds_per_token: float) -> None:
    await FakeWorker(str(port), seconds_per_token=seconds_per_token).start(port)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(run(int(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 0.0))
