"""`/health`, `/ready`, `/v1/status` and `/metrics`, for programs that watch the process."""

import asyncio
import os
import time
from typing import Any

from fastapi import APIRouter
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from parallm import __version__
from parallm.errors import EngineStopped
from parallm.server.catalog import served_version
from parallm.server.failures import Draining
from parallm.server.operation.middleware import Drain
from parallm.server.service import Service

SECONDS_TO_ANSWER = 5.0
"""Time that the device thread may take between two units of work before the server counts as not ready."""


def operation_routes(service: Service, drain: Drain) -> APIRouter:
    router, registry = APIRouter(), service.request_metrics.registry

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
        if drain.is_draining:
            raise Draining("the server is finishing its last answers", 1)
        try:
            async with asyncio.timeout(SECONDS_TO_ANSWER):
                await service.engine.ping()
        except TimeoutError as error:
            raise EngineStopped(f"the engine has not answered for {SECONDS_TO_ANSWER:.0f} s") from error
        return _json({"status": "ready"})

    @router.get("/v1/status")
    async def status() -> Response:
        """The process: its id, version and age, and how many requests it has."""
        load = service.engine.stats()
        return _json(
            {
                "status": "draining" if drain.is_draining else "running",
                "pid": os.getpid(),
                "version": __version__,
                "uptime_seconds": round(time.time() - service.started, 1),
                "num_running": load.num_running,
                "num_waiting": load.num_waiting,
            }
        )

    @router.get("/metrics")
    async def metrics(http: Request) -> Response:
        """Counters for Prometheus, as text; as OpenMetrics or as JSON where `Accept` asks for it."""
        accept = http.headers.get("accept", "")
        if _wants_json(accept):
            return _json(_metric_values(service, registry))
        encode, content_type = choose_encoder(accept)
        return Response(encode(registry), headers={"Content-Type": content_type})

    @router.get("/v1/metrics")
    async def metrics_as_json() -> Response:
        """The numbers of `/metrics` as JSON."""
        return _json(_metric_values(service, registry))

    return router


def _json(value: dict[str, Any]) -> Response:
    return Response(to_json(value, inf_nan_mode="null"), media_type="application/json")


def _metric_values(service: Service, registry: CollectorRegistry) -> dict[str, Any]:
    """Return every sample, and some numbers under names of their own. `num_held` requests wait for `/resume`."""
    load = service.engine.stats()
    samples: dict[str, list[dict[str, Any]]] = {}
    for family in registry.collect():
        for sample in family.samples:
            samples.setdefault(sample.name, []).append({"labels": sample.labels, "value": sample.value})
    return {
        "current_policy_version": served_version(service),
        "queue_depth": load.num_waiting + service.gateway.num_held,
        "max_batch_size": load.max_rows,
        # requests join the running ones at the next step: nothing waits for a batch to fill
        "flush_interval_ms": 0.0,
        "num_running": load.num_running,
        "metrics": samples,
    }


def _wants_json(accept: str) -> bool:
    """Return whether an `Accept` header names JSON, which neither Prometheus nor browsers do."""
    return any(kind.partition(";")[0].strip() == "application/json" for kind in accept.lower().split(","))
