"""The ASGI application: routes, and one place where exceptions become responses."""

import re
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import cache, partial

import fastapi.dependencies.models
from fastapi import APIRouter, Depends, FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from parallm.errors import ParallmError
from parallm.registry.pool import Pool
from parallm.server.connection import error_response
from parallm.server.control.routes_adapters import adapter_alias_routes, adapter_routes
from parallm.server.control.routes_engine import engine_routes, load_routes
from parallm.server.control.routes_models import model_routes as registry_routes
from parallm.server.control.routes_replicas import replica_routes
from parallm.server.control.routes_splits import split_routes
from parallm.server.control.routes_training import training_routes
from parallm.server.control.routes_trajectories import trajectory_routes
from parallm.server.dashboard.answers import PageHost, PageParts
from parallm.server.dashboard.measurement import measure
from parallm.server.dashboard.routes_device import device_routes
from parallm.server.dashboard.routes_events import event_routes
from parallm.server.dashboard.routes_page import page_routes
from parallm.server.dashboard.routes_rollouts import rollout_routes
from parallm.server.dashboard.routes_runs import run_routes
from parallm.server.dashboard.routes_session import session_routes
from parallm.server.dialects.kserve import kserve_routes
from parallm.server.dialects.routes_generate import generate_routes
from parallm.server.dialects.routes_identity import absent_routes, identity_routes
from parallm.server.dialects.routes_tokenize import tokenize_routes
from parallm.server.dialects.tei import tei_routes
from parallm.server.failures import Failure, failure_of
from parallm.server.jobs.routes_batches import batch_routes
from parallm.server.jobs.routes_files import file_routes
from parallm.server.jobs.routes_fine_tuning import fine_tuning_routes
from parallm.server.model_router import ModelRouter
from parallm.server.ollama.routes_catalogue import catalogue_routes
from parallm.server.ollama.routes_embed import embed_routes
from parallm.server.ollama.routes_generate import generation_routes
from parallm.server.ollama.routes_models import model_routes
from parallm.server.ollama.schemas import OllamaError
from parallm.server.openai.routes import openai_routes
from parallm.server.openapi import openapi_document
from parallm.server.operation.acts import ActLog
from parallm.server.operation.auth import ROLES, StoredKey, auth_dependency, check_roles
from parallm.server.operation.collectors import ServiceCollector
from parallm.server.operation.middleware import CLIENT_CLOSED_REQUEST, Drain, Origins, RequestMiddleware
from parallm.server.operation.request_metrics import HttpMetrics
from parallm.server.operation.routes_operation import operation_routes
from parallm.server.service import Service
from parallm.server.settings import ServerSettings
from parallm.server.tasks.routes_classify import classify_routes
from parallm.server.tasks.routes_embeddings import embedding_routes
from parallm.server.tasks.routes_predict import predict_routes
from parallm.server.tasks.routes_rank import rank_routes
from parallm.server.tasks.routes_rewards import reward_routes
from parallm.server.tasks.routes_rl import rl_routes

OLLAMA, COHERE = "/api/", "/v2/rerank"
"""Beginning of the paths of Ollama's routes, which exist with `server.ollama` alone."""
ROUTES: Sequence[Callable[[Service], APIRouter]] = (
    registry_routes,  # before OpenAI's, one of which takes any name
    openai_routes,
    embedding_routes,
    rank_routes,
    classify_routes,
    tei_routes,
    generate_routes,
    tokenize_routes,
    identity_routes,
    absent_routes,
    adapter_routes,
    adapter_alias_routes,
    training_routes,
    replica_routes,
    trajectory_routes,
    engine_routes,
    load_routes,
    split_routes,
    reward_routes,
    rl_routes,
    predict_routes,
    kserve_routes,
    file_routes,
    batch_routes,
    fine_tuning_routes,
)
PAGE_ROUTES: Sequence[Callable[[PageHost], APIRouter]] = (page_routes, run_routes, rollout_routes)
"""Routes that need no model."""
DASHBOARD_ROUTES: Sequence[Callable[[Service], APIRouter]] = (
    *PAGE_ROUTES,
    session_routes,
    device_routes,
)
"""Routes that exist with `server.dashboard` alone."""
OLLAMA_ROUTES: Sequence[Callable[[Service], APIRouter]] = (
    generation_routes,
    embed_routes,
    model_routes,
    catalogue_routes,
)
MODEL_ROUTES: Sequence[Callable[[Service], APIRouter]] = (
    openai_routes,
    embedding_routes,
    rank_routes,
    classify_routes,
    predict_routes,
    generate_routes,
    tokenize_routes,
)
OLLAMA_MODEL_ROUTES: Sequence[Callable[[Service], APIRouter]] = (generation_routes, embed_routes)
"""Routes with the paths of `model_router.LEASING`."""


def create_app(service: Service, pool: Pool | None = None) -> FastAPI:
    """Return an OpenAI-compatible application. All routes run on the event loop and none blocks it for long.

    Requests for models of the catalogue go to those of `pool`.
    """
    settings, drain, has_keys = service.settings, Drain(), bool(service.keys)
    app = _create(service.keys, settings, drain)
    # routes read bodies by hand: FastAPI alone has nothing to show on them
    setattr(app, "openapi", cache(partial(openapi_document, app, has_keys=has_keys)))  # noqa: B010
    app.add_route("/docs", _docs)
    service.request_metrics.registry.register(ServiceCollector(service))
    chosen = [
        *ROUTES,
        *(DASHBOARD_ROUTES if settings.dashboard else ()),
        *(OLLAMA_ROUTES if settings.ollama else ()),
    ]
    routers = [*(routes(service) for routes in chosen), operation_routes(service, drain)]
    if settings.dashboard:
        service.watching.measure = partial(measure, service)
        routers.append(event_routes(service, drain))
    check_roles(routers)
    for router in routers:
        app.include_router(router)
    if pool is not None:
        app.add_middleware(ModelRouter, service=service, pool=pool, drain=drain)
    if settings.cors_origins:
        origins = list(settings.cors_origins)
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    app.add_middleware(  # added last, so it is outermost
        RequestMiddleware,
        request_metrics=service.request_metrics,
        drain=drain,
        origins=Origins(settings, has_keys=has_keys),
        acts=ActLog(service.on_act),
    )
    return app


def create_model_app(service: Service) -> ASGIApp:
    """Return the application of a model of the catalogue; `ModelRouter` and what is around it come first."""
    app = _create(service.keys, service.settings, Drain())
    for routes in (*MODEL_ROUTES, *(OLLAMA_MODEL_ROUTES if service.settings.ollama else ())):
        app.include_router(routes(service))
    stack = app.build_middleware_stack()
    assert isinstance(stack, ServerErrorMiddleware), "Starlette's outermost, whose part RequestMiddleware plays"

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await stack.app({**scope, "app": app}, receive, send)

    return answer


def create_page_app(parts: PageParts, more: Sequence[APIRouter]) -> FastAPI:
    """Return the application of the page alone, over runs on the disk, with `more` routes."""
    drain = Drain()
    app = _create((), parts.settings, drain)
    routers = [*(routes(parts) for routes in PAGE_ROUTES), *more]
    check_roles(routers)
    for router in routers:
        app.include_router(router)
    app.add_middleware(
        RequestMiddleware,
        request_metrics=HttpMetrics(),
        drain=drain,
        origins=Origins(parts.settings, has_keys=False),
        acts=ActLog(lambda _: None),
    )
    return app


def _create(keys: tuple[StoredKey, ...], settings: ServerSettings, drain: Drain) -> FastAPI:
    """Return an application without routes."""
    app = FastAPI(
        title="ParaLLM",
        docs_url="/docs/try",
        redoc_url=None,
        redirect_slashes=False,
        generate_unique_id_function=_operation_id,
        dependencies=[Depends(auth_dependency(keys, settings, drain))],
    )
    app.state.drain = drain
    app.add_exception_handler(ParallmError, _on_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(RequestValidationError, _on_wrong_parameter)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    return app


def forget_applications() -> None:
    """Let FastAPI's caches forget the functions of routes, which hold an application and the model behind it."""
    for value in vars(fastapi.dependencies.models).values():
        if hasattr(value, "cache_clear"):
            value.cache_clear()


async def _docs(http: Request) -> Response:
    return RedirectResponse("/openapi.json")


def _operation_id(route: APIRoute) -> str:
    """Return an id of its own for each path: FastAPI's is the same for `/generate` and `/generate/`."""
    return re.sub(r"\W", "_", "".join(sorted(route.methods or ())) + route.path)


async def _on_error(http: Request, error: Exception) -> Response:
    return error_response(failure_of(error))


async def _on_http_error(http: Request, error: Exception) -> Response:
    """Answer unknown paths and wrong methods, which Starlette finds."""
    assert isinstance(error, HTTPException)
    request, status, headers = f"{http.method} {http.url.path[:200]}", error.status_code, error.headers or {}
    if status == 404:
        failure = Failure(404, "unknown_url", message=f"{request}: no such route{_way_out(http)}")
    elif status == 405:
        message = f"{request}: this route takes {headers.get('Allow', 'another method')}"
        failure = Failure(405, "wrong_method", message=message, headers=headers)
    else:
        failure = Failure(status, message=f"{request}: {error.detail}", headers=headers)
    has_text = http.url.path.startswith(OLLAMA) or _is_of_kserve(http)  # their errors are texts
    return error_response(failure, OllamaError(error=failure.message) if has_text else None)


def _is_of_kserve(http: Request) -> bool:
    path = http.url.path
    return path.startswith("/v2/") and not path.startswith(COHERE)


def _way_out(http: Request) -> str:
    if _is_of_kserve(http):
        return (
            "; of KServe's protocol this server has /v2, /v2/health/live, /v2/health/ready and /v2/models/NAME with "
            "/ready, /infer and /versions/VERSION; names are listed at /v1/models and /v1/rl/policies, and models are "
            "loaded at /v1/models/load"
        )
    paths = [row.partition(" ")[2] for row in ROLES]
    if http.url.path.startswith(OLLAMA) and http.url.path in paths:
        return "; the server runs with server.ollama=false"
    close = get_close_matches(http.url.path[:200], paths, 1, cutoff=0.8)
    return f"; did you mean {close[0]}?" if close else "; GET /openapi.json shows what there is"


async def _on_wrong_parameter(http: Request, error: Exception) -> Response:
    """Answer wrong parameters of paths and queries, which FastAPI reads."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    name = str(first["loc"][-1])
    return error_response(Failure(400, "invalid_value", param=name, message=f"{name}: {first['msg']}"))


async def _on_disconnect(http: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)
