"""One HTTP connection: uvicorn's, which also tells what it waits for and can be dropped.

uvicorn closes connections that are idle after an answer and no others. `connections.py` closes the rest.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Literal

import h11
from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

Phase = Literal["head", "body", "answer", "unread", "rest", "idle"]
"""The next event: the head of a request, its body, our answer, the client reads what was sent, the rest of a body that
was answered early, another request."""

TIMED_OUT = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class HttpConnection(H11Protocol):
    """Made when a socket is accepted, before TLS. `opening` is the task that sets it up."""

    opening: asyncio.Task[None]

    def __init__(
        self, config: Config, server_state: ServerState, app_state: dict[str, Any], on_lost: Callable[[Any], None]
    ) -> None:
        super().__init__(config, server_state, app_state)
        self.heard = self.loop.time()
        """When bytes came last, on the clock of the event loop."""
        self._is_open = False
        self._on_lost = on_lost

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        self._is_open = True
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        self.heard = self.loop.time()
        super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._on_lost(self)

    @property
    def phase(self) -> Phase:
        if not self._is_open:
            return "head"
        if self.transport.is_closing() or self.flow.write_paused:
            return "unread"
        if self.conn.their_state is h11.IDLE:
            return "head" if self.cycle is None or self._has_begun else "idle"
        if self.conn.their_state is h11.SEND_BODY:
            return "rest" if self.cycle.response_complete else "body"
        return "answer"

    @property
    def progress(self) -> object:
        """Changes as long as the connection gets on."""
        num_unsent = self.transport.get_write_buffer_size() if self._is_open else 0
        return self.phase, id(self.cycle), num_unsent

    def time_out(self) -> None:
        """Close it, with a 408 if a request has begun."""
        if self._is_open and self.phase == "head":
            if self._has_begun:
                self.transport.write(TIMED_OUT)
            self.transport.close()
        else:
            self.drop()

    def drop(self) -> None:
        if self._is_open:
            self.transport.abort()
        else:
            self.opening.cancel()

    @property
    def _has_begun(self) -> bool:
        return bool(self.conn.trailing_data[0])
