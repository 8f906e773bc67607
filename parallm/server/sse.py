"""Server-sent events: one `data:` line for each chunk, and a response that ends when the client goes."""

from collections.abc import AsyncGenerator, Iterable

from pydantic import BaseModel
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from parallm.server.connection import while_connected

DONE = b"data: [DONE]\n\n"


def encode_events(chunks: Iterable[BaseModel]) -> bytes:
    return b"".join(b"data: " + chunk.model_dump_json(exclude_unset=True).encode() + b"\n\n" for chunk in chunks)


class EventStream(Response):
    """Sends what `events` yields, until that ends or the client goes, whatever is first.

    Then it closes `events` and `source`, which `events` reads: a generator that never started closes nothing itself.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], source: AsyncGenerator[object, None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._source = source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._send_events(send))
        except ClientDisconnect:
            pass  # nobody is left to tell
        finally:
            await self._events.aclose()
            await self._source.aclose()

    async def _send_events(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
