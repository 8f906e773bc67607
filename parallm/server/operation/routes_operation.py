"""For those who run the process: alive, ready, and what to measure."""

import asyncio

from fastapi import APIRouter
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from parallm.errors import EngineStopped
from parallm.server.control.steered_engine import SteeredEngine
from parallm.server.failures import Draining
from parallm.server.operation.doors import Doors
from parallm.server.operation.metrics_json import metrics_values, wants_json
from parallm.server.service import Service

SECONDS_TO_ANSWER = 5.0
"""How long the device thread may take between two units of work before the server counts as not ready."""


def operation_routes(service: Service, doors: Doors, registry: CollectorRegistry, steering: SteeredEngine) -> APIRouter:
    router = APIRouter()

    @router.get("/health")
    async def health() -> Response:
        """Alive: answers 200 as long as the engine can, also while it drains; otherwise a restart helps."""
        if not service.engine.is_alive:
            raise EngineStopped("the engine has stopped; restart the process")
        load = service.engine.stats()
        return _json(
            {"status": "ok", "model_loaded": True, "num_running": load.num_running, "num_waiting": load.num_waiting}
        )

    @router.get("/ready")
    async def ready() -> Response:
        """Ready for requests: the model is loaded, the engine has just answered, and the server is not about to end."""
        if doors.is_closed:
            raise Draining("the server is finishing its last answers", 1)
        try:
            async with asyncio.timeout(SECONDS_TO_ANSWER):
                await service.engine.ping()
        except TimeoutError as error:
            raise EngineStopped(f"the engine has not answered for {SECONDS_TO_ANSWER:.0f} s") from error
        return _json({"status": "ready"})

    @router.get("/metrics")
    async def metrics(http: Request) -> Response:
        """Counters for Prometheus, as text; as OpenMetrics or as JSON where `Accept` asks for it."""
        accept = http.headers.get("accept", "")
        if wants_json(accept):
            return _json(metrics_values(service, registry, steering.num_held))
        encode, content_type = choose_encoder(accept)
        return Response(encode(registry), headers={"Content-Type": content_type})

    @router.get("/v1/metrics")
    async def metrics_as_json() -> Response:
        """The numbers of `/metrics` as JSON."""
        return _json(metrics_values(service, registry, steering.num_held))

    return router


def _json(value: dict[str, object]) -> Response:
    return Response(to_json(value, inf_nan_mode="null"), media_type="application/json")
