"""`/v1/training/status`: the trainer's state, with what the catalog and the device know of its policies."""

import dataclasses

from fastapi import APIRouter
from pydantic_core import to_json
from starlette.responses import Response

from parallm.reports import TrainingStatus
from parallm.server.catalog import card_of, checkpoint_names, served_policy
from parallm.server.service import Service

FINAL_STATES = ("serving", "finished", "failed")
"""States without further steps."""


def training_status_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/training/status")
    @router.get("/debug/training")
    async def training_status() -> Response:
        """What the trainer does now, and the numbers of its last step."""
        return status_answer(service)

    return router


def status_answer(service: Service, **more: object) -> Response:
    """Return the status, and `more` fields of a route."""
    # a loss can be NaN, which JSON does not have; NumPy scalars become what their text says
    fields = to_json(_fields(_complete_status(service)) | more, inf_nan_mode="null", fallback=str)
    return Response(fields, media_type="application/json")


def _complete_status(service: Service) -> TrainingStatus:
    status = service.status()
    policies = {name: _complete(service, own, name) for name, own in status.policies.items()}
    return dataclasses.replace(_complete(service, status, served_policy(service)), policies=policies)


def _complete(service: Service, status: TrainingStatus, policy: str) -> TrainingStatus:
    card, traffic = card_of(policy, service.catalog()), service.trajectories.get(policy)
    return dataclasses.replace(
        status,
        training_enabled=status.state not in FINAL_STATES,
        current_lora=None if card is None else f"checkpoint-{card.version}",
        available_checkpoints=tuple(checkpoint_names(service, policy)),
        trajectories_collected=status.trajectories_collected if traffic is None else traffic.report().num_collected,
        shares={} if service.device is None else dict(service.device.shares()),
    )


def _fields(status: TrainingStatus) -> dict[str, object]:
    fields = {field.name: getattr(status, field.name) for field in dataclasses.fields(status)}
    policies = {name: _fields(policy) for name, policy in status.policies.items()}
    return fields | {"metrics": dict(status.metrics), "policies": policies}
