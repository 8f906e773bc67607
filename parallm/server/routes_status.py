"""What this process is and does: health, models, training."""

import dataclasses

from fastapi import APIRouter
from pydantic_core import to_json
from starlette.responses import Response

from parallm.errors import EngineStopped
from parallm.reports import TrainingStatus
from parallm.server.catalog import model_entry, model_list
from parallm.server.generation import json_response
from parallm.server.service import Service


def status_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.get("/health")
    async def health() -> Response:
        if not service.engine.is_alive:
            raise EngineStopped("the engine has stopped; restart the process")
        load = service.engine.stats()
        return _json({"status": "ok", "num_running": load.num_running, "num_waiting": load.num_waiting})

    @router.get("/v1/models")
    async def models() -> Response:
        return json_response(model_list(service))

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        return json_response(model_entry(name, service))

    @router.get("/v1/training/status")
    async def training_status() -> Response:
        return _json(_plain(service.status()))

    return router


def _plain(status: TrainingStatus) -> dict[str, object]:
    fields = {field.name: getattr(status, field.name) for field in dataclasses.fields(status)}
    policies = {name: _plain(one) for name, one in status.policies.items()}
    return fields | {"metrics": dict(status.metrics), "policies": policies}


def _json(value: dict[str, object]) -> Response:
    # a loss can be NaN, which JSON does not have; NumPy scalars become what their text says
    return Response(to_json(value, inf_nan_mode="null", fallback=str), media_type="application/json")
