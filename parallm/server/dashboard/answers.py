"""JSON for the page: NaN as null, large answers made and compressed on a thread."""

import gzip
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from parallm.metrics.json_lines import encode_json
from parallm.metrics.watching import Watching
from parallm.server.request_limits import WorkerPool
from parallm.server.settings import ServerSettings

MIN_COMPRESSED = 1024
"""Bytes below which compressing costs more than it saves."""
LEVEL = 5


class PageHost(Protocol):
    """The part of `Service` that the routes of runs need."""

    @property
    def settings(self) -> ServerSettings: ...
    @property
    def workers(self) -> WorkerPool: ...
    @property
    def watching(self) -> Watching: ...


def json_answer(http: Request, value: Mapping[str, Any]) -> Response:
    """Return the JSON of a small value."""
    return _response(http, encode_json(value))


def answer_made(http: Request, make: Callable[[], Mapping[str, Any]]) -> Response:
    """Return the JSON of what `make` returns, which may take long: for a thread. Raises what `make` raises."""
    return _response(http, encode_json(make()))


def _response(http: Request, content: bytes) -> Response:
    headers = {"Cache-Control": "no-store", "Vary": "Accept-Encoding"}
    if len(content) >= MIN_COMPRESSED and "gzip" in http.headers.get("accept-encoding", ""):
        content = gzip.compress(content, LEVEL, mtime=0)
        headers["Content-Encoding"] = "gzip"
    return Response(content, media_type="application/json", headers=headers)
