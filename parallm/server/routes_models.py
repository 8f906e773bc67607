"""What this process serves and trains."""

import dataclasses

from fastapi import APIRouter
from pydantic_core import to_json
from starlette.responses import Response

from parallm.reports import TrainingStatus
from parallm.server.catalog import card_of, checkpoint_names, model_entry, model_list, served_policy
from parallm.server.connection import json_response
from parallm.server.service import Service

OVER = ("serving", "finished", "failed")
"""States without further steps."""


def status_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/models")
    @router.get("/models")
    async def models() -> Response:
        """Every name that `model` may be: the base, adapters, their versions and aliases."""
        return json_response(model_list(service))

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        """One of these names, or another that `model` may be."""
        return json_response(model_entry(name, service))

    @router.get("/v1/training/status")
    @router.get("/debug/training")
    async def training_status() -> Response:
        """What the trainer does now, and the numbers of its last step."""
        return status_answer(service)

    return router


def status_answer(service: Service, **more: object) -> Response:
    """Return the status, and `more` fields of a route."""
    return _json(_plain(told_status(service)) | more)


def told_status(service: Service) -> TrainingStatus:
    """Return the trainer's status with the fields that the catalog and the device know."""
    status = service.status()
    if not status.policies:
        return _with_page(service, status, served_policy(service))
    policies = {name: _with_page(service, own, name) for name, own in status.policies.items()}
    return dataclasses.replace(_with_page(service, status, served_policy(service)), policies=policies)


def _with_page(service: Service, status: TrainingStatus, policy: str) -> TrainingStatus:
    card, traffic = card_of(policy, service.catalog()), service.trajectories.get(policy)
    return dataclasses.replace(
        status,
        training_enabled=status.state not in OVER,
        current_lora=None if card is None else f"checkpoint-{card.version}",
        available_checkpoints=tuple(checkpoint_names(service, policy)),
        trajectories_collected=status.trajectories_collected if traffic is None else traffic.report().num_collected,
        shares={} if service.device is None else dict(service.device.shares()),
    )


def _plain(status: TrainingStatus) -> dict[str, object]:
    fields = {field.name: getattr(status, field.name) for field in dataclasses.fields(status)}
    policies = {name: _plain(one) for name, one in status.policies.items()}
    return fields | {"metrics": dict(status.metrics), "policies": policies}


def _json(value: dict[str, object]) -> Response:
    # a loss can be NaN, which JSON does not have; NumPy scalars become what their text says
    return Response(to_json(value, inf_nan_mode="null", fallback=str), media_type="application/json")
