"""A server that runs in the background."""

import weakref
from types import TracebackType
from typing import TypeVar

from parallm.library.loop_thread import LoopThread
from parallm.library.session import Session
from parallm.server.operation.http_server import HttpServer

Self = TypeVar("Self", bound="Server")


class Server:
    """An HTTP server of a `Model`, open until `close` or the model's end. A context manager."""

    def __init__(self, runtime: LoopThread[Session], server: HttpServer) -> None:
        self._runtime = runtime
        self._server = weakref.ref(server)  # a reference would keep the model in memory
        self.url = server.url
        """Address such as `http://127.0.0.1:8000`; clients of OpenAI need `/v1` after it."""

    def close(self) -> None:
        """Let running answers end for `server.drain_seconds` and free the port. The model stays."""
        server = self._server()
        if server is not None and self._runtime.is_open:
            self._runtime.call(self._runtime.session.stop_listening(server))

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<parallm server at {self.url}>"
