"""The ASGI application: routes, and one place where exceptions become responses."""

import re
import time
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import cache, partial

import fastapi.dependencies.models
from fastapi import Depends, FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from parallm.errors import ParallmError
from parallm.reports import TrainingStatus
from parallm.server.connection import error_response
from parallm.server.control.routes_adapter_aliases import adapter_alias_routes
from parallm.server.control.routes_adapters import adapter_list_routes, adapter_routes
from parallm.server.control.routes_engine import engine_routes, queue_routes, warm_up_routes
from parallm.server.control.routes_scores import score_routes
from parallm.server.control.routes_shares import share_routes
from parallm.server.control.routes_splits import reward_routes, split_routes, statistics_routes
from parallm.server.control.routes_training import training_routes
from parallm.server.control.routes_trajectories import trajectory_routes
from parallm.server.control.traffic_splits import TrafficSplits
from parallm.server.control.version_statistics import VersionStatistics
from parallm.server.control.witnesses import Witness, told_to
from parallm.server.dialects.routes_generate import generate_routes
from parallm.server.dialects.routes_identity import absent_routes, identity_routes
from parallm.server.engine_gateway import EngineGateway
from parallm.server.failures import failure, failure_of
from parallm.server.interfaces import EngineClient
from parallm.server.openai.routes_generation import generation_routes
from parallm.server.openai.routes_responses import response_routes
from parallm.server.openapi import openapi_document
from parallm.server.operation.auth import ROLES, StoredKey, auth_dependency, check_roles
from parallm.server.operation.collectors import ServiceCollector, SplitCollector
from parallm.server.operation.metered_engine import MeteredEngine
from parallm.server.operation.middleware import CLIENT_CLOSED_REQUEST, Drain, Origins, RequestMiddleware
from parallm.server.operation.request_metrics import RequestMetrics
from parallm.server.operation.routes_operation import operation_routes
from parallm.server.operation.tracing import Traces
from parallm.server.reference.page import docs_page
from parallm.server.request_limits import BodyBudget
from parallm.server.routes_models import status_routes
from parallm.server.service import (
    Adapters,
    Device,
    RewardModels,
    Service,
    Tokenizer,
    Training,
    Trajectories,
)
from parallm.server.settings import ServerSettings
from parallm.types import POLICY, AdapterCard


def create_app(
    *,
    engine: EngineClient,
    tokenizer: Tokenizer,
    catalog: Callable[[], tuple[AdapterCard, ...]],
    status: Callable[[], TrainingStatus],
    settings: ServerSettings,
    base_name: str,
    policies: tuple[str, ...] = (POLICY,),
    keys: tuple[StoredKey, ...] = (),
    device: Device | None = None,
    traces: Traces | None = None,
    adapters: Adapters | None = None,
    training: Training | None = None,
    trajectories: Mapping[str, Trajectories] | None = None,
    witnesses: Mapping[str, Witness] | None = None,
    swaps: Callable[[], Mapping[str, int]] = dict,
    reward_models: Callable[[], RewardModels] = dict,
    sampling_defaults: Mapping[str, float] | None = None,
) -> FastAPI:
    """OpenAI-compatible HTTP over `engine`. All routes run on the event loop and none blocks it for long.

    `policies` can be asked for before they have a version, and answer as the base then. Without `adapters` or
    `training` the routes about them answer that this process has none. `trajectories`: of policies that learn from what
    clients ask for. `witnesses` are told what a policy has answered, by its name.
    """
    request_metrics, drain = RequestMetrics(base_name), Drain()
    statistics = VersionStatistics(catalog)
    splits = TrafficSplits(catalog, policies)
    if adapters is not None:
        splits = TrafficSplits(catalog, policies, adapters.set_splits, adapters.splits)
    gateway = EngineGateway(engine, told_to(witnesses or {}, catalog, policies, statistics.count))
    service = Service(
        engine=MeteredEngine(gateway, request_metrics, settings, traces, catalog),
        tokenizer=tokenizer,
        catalog=catalog,
        status=status,
        settings=settings,
        base_name=base_name,
        policies=policies,
        started=int(time.time()),
        bodies=BodyBudget(settings.max_body_bytes),
        trajectories=trajectories or {},
        routed=splits.routed,
        device=device,
        note_trajectory=statistics.note_trajectory,
        swaps=swaps,
        reward_models=reward_models,
        sampling_defaults=sampling_defaults or {},
    )
    for taker in service.trajectories.values():
        taker.listen(statistics.reward_trajectory)
    app = FastAPI(
        title="ParaLLM",
        docs_url="/docs/try",
        redoc_url=None,
        redirect_slashes=False,
        generate_unique_id_function=_operation_id,
        dependencies=[Depends(auth_dependency(keys, settings, drain))],
    )
    app.state.drain = drain
    # bodies are read by parse.py: FastAPI alone has nothing to show on them
    setattr(app, "openapi", cache(partial(openapi_document, app, has_keys=bool(keys))))  # noqa: B010
    app.add_route("/docs", _docs)
    request_metrics.registry.register(ServiceCollector(service))
    request_metrics.registry.register(SplitCollector(splits, statistics))
    routers = (
        generation_routes(service),
        response_routes(service),
        status_routes(service),
        operation_routes(service, drain, request_metrics.registry, gateway),
        generate_routes(service),
        identity_routes(service),
        absent_routes(),
        adapter_list_routes(service),
        adapter_routes(service, adapters),
        adapter_alias_routes(service, adapters),
        training_routes(service, training),
        trajectory_routes(service),
        queue_routes(gateway),
        engine_routes(service, gateway),
        warm_up_routes(service),
        split_routes(service, splits, statistics),
        statistics_routes(splits, statistics),
        share_routes(service),
        score_routes(service),
        reward_routes(service, statistics),
    )
    check_roles(routers)
    for router in routers:
        app.include_router(router)
    _allow_origins(app, settings)
    origins = Origins(settings, has_keys=bool(keys))
    app.add_middleware(
        RequestMiddleware, request_metrics=request_metrics, drain=drain, origins=origins
    )  # added last, so it is outermost
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
    return Response(docs_page(http.app.openapi()), media_type="text/html")


def _operation_id(route: APIRoute) -> str:
    """One for each path: FastAPI's own is the same for `/generate` and `/generate/`."""
    return re.sub(r"\W", "_", "".join(sorted(route.methods or ())) + route.path)


def _allow_origins(app: FastAPI, settings: ServerSettings) -> None:
    if settings.cors_origins:
        origins = list(settings.cors_origins)
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])


async def _on_error(http: Request, error: Exception) -> Response:
    return error_response(failure_of(error))


async def _on_http_error(http: Request, error: Exception) -> Response:
    """Unknown paths and wrong methods, which Starlette finds."""
    assert isinstance(error, HTTPException)
    asked = f"{http.method} {http.url.path[:200]}"
    if error.status_code == 404:
        return error_response(failure(404, f"{asked}: no such route{_way_out(http)}", code="unknown_url"))
    if error.status_code == 405:
        known = (error.headers or {}).get("Allow", "another method")
        told = failure(405, f"{asked}: this route takes {known}", code="wrong_method", headers=error.headers)
        return error_response(told)
    return error_response(failure(error.status_code, f"{asked}: {error.detail}", headers=error.headers))


def _way_out(http: Request) -> str:
    paths = [row.partition(" ")[2] for row in ROLES]
    close = get_close_matches(http.url.path[:200], paths, 1, cutoff=0.8)
    return f"; did you mean {close[0]}?" if close else "; GET /docs shows what there is"


async def _on_wrong_parameter(http: Request, error: Exception) -> Response:
    """Parameters of paths and queries, which FastAPI reads."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    name = str(first["loc"][-1])
    return error_response(failure(400, f"{name}: {first['msg']}", param=name, code="invalid_value"))


async def _on_disconnect(http: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)
