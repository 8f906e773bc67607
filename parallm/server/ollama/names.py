"""Names with tags: `policy:latest` is `policy`, `policy:12` is `policy@12`; and errors in Ollama's form."""

from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from parallm.errors import ParallmError, UnknownModel
from parallm.server.catalog import model_names
from parallm.server.connection import error_response
from parallm.server.failures import failure_of
from parallm.server.ollama.schemas import OllamaError
from parallm.server.service import Service
from parallm.types import LATEST

STATUSES = {429: 503}
"""Ollama's status of an error, by ours, where they differ."""


class OllamaRoute(APIRoute):
    """A route whose errors, those of keys and limits included, are `{"error": "text"}`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def answer(http: Request) -> Response:
            try:
                return await handle(http)
            except ParallmError as error:
                return ollama_error_response(error)

        return answer


def ollama_error_response(error: ParallmError) -> Response:
    """Return the response of a failed request in Ollama's form."""
    failure = failure_of(error)
    status = STATUSES.get(failure.status, failure.status)
    return error_response(replace(failure, status=status), OllamaError(error=failure.message))


def own_name(service: Service, name: str) -> str:
    """Return the name by which this service knows `name`; names of other models stay as they are."""
    stem, colon, tag = name.rpartition(":")
    names = model_names(service)
    if not colon or name in names or stem not in names:
        return name
    return stem if tag == LATEST else f"{stem}@{tag}"


def tagged(name: str) -> str:
    """Return a name of this service as Ollama writes it: `policy:latest`, `policy:12`."""
    stem, at, version = name.partition("@")
    return f"{stem}:{version if at else LATEST}"


@contextmanager
def model_called(name: str) -> Iterator[None]:
    """Make the error of an unknown model name it as the request does."""
    try:
        yield
    except UnknownModel as error:
        raise UnknownModel(f"model '{name[:200]}' not found; GET /api/tags lists those that are here") from error
