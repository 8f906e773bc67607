"""The ASGI application: routes, and one place where exceptions become responses."""

import time
from collections.abc import Callable

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from parallm.errors import ParallmError
from parallm.reports import TrainingStatus
from parallm.server.failures import Failure, failure, failure_of
from parallm.server.generation import json_response
from parallm.server.routes_generation import generation_routes
from parallm.server.routes_responses import response_routes
from parallm.server.routes_status import status_routes
from parallm.server.service import Engine, Service, Tokenizer
from parallm.server.settings import ServerSettings
from parallm.types import POLICY, AdapterCard

CLIENT_CLOSED_REQUEST = 499  # nobody reads it; access logs of proxies know the number


def create_app(
    *,
    engine: Engine,
    tokenizer: Tokenizer,
    catalog: Callable[[], tuple[AdapterCard, ...]],
    status: Callable[[], TrainingStatus],
    settings: ServerSettings,
    base_name: str,
    policies: tuple[str, ...] = (POLICY,),
) -> FastAPI:
    """OpenAI-compatible HTTP over `engine`. All routes run on the event loop and none blocks it for long.

    `policies` can be asked for before they have a version, and answer as the base then.
    """
    service = Service(
        engine=engine,
        tokenizer=tokenizer,
        catalog=catalog,
        status=status,
        settings=settings,
        base_name=base_name,
        policies=policies,
        started=int(time.time()),
    )
    # no schema pages: bodies are read by parse.py, so FastAPI has nothing to show on them
    app = FastAPI(title="ParaLLM", openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.include_router(generation_routes(service))
    app.include_router(response_routes(service))
    app.include_router(status_routes(service))
    app.add_exception_handler(ParallmError, _on_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_exception_handler(Exception, _on_error)
    return app


async def _on_error(http: Request, error: Exception) -> Response:
    return _response(failure_of(error))


async def _on_http_error(http: Request, error: Exception) -> Response:
    """Unknown paths and wrong methods, which Starlette finds."""
    assert isinstance(error, HTTPException)
    message = f"{http.method} {http.url.path[:200]}: {error.detail}"
    return _response(failure(error.status_code, message, headers=error.headers))


async def _on_disconnect(http: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


def _response(told: Failure) -> Response:
    response = json_response(told.answer, told.status)
    response.headers.update(told.headers)
    return response
