"""Shares of the device, between serving and rollouts and between engine and learner, or the latency target of serving:
wire types and routes."""

from math import isfinite
from typing import Annotated

from fastapi import APIRouter
from pydantic import AfterValidator, Field
from starlette.requests import Request
from starlette.responses import Response

from parallm.errors import InvalidRequest, Unavailable
from parallm.server.connection import body_of, json_response
from parallm.server.interfaces import Device
from parallm.server.schemas import Wire
from parallm.server.service import Service

Share = Annotated[float, Field(ge=0, le=1)]


def _check_target(target: float) -> float:
    if target == 0 or (target >= 1 and isfinite(target)):
        return target
    raise ValueError("must be at least 1, or 0 for none")


class SharesBody(Wire):
    serving_share: Share | None = None
    """Share of the engine's time for serving while rollouts run, too."""
    engine_share: Share | None = None
    """Share of the device's time for the engine while requests and an update run."""
    serving_latency_target: Annotated[float, AfterValidator(_check_target)] | None = None
    """In place of the shares: the factor, at least 1, by which other work may slow serving's tokens; 0 ends it."""


class SharesAnswer(Wire):
    serving_share: float
    engine_share: float
    serving_latency_target: float | None = None


def share_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/shares")
    async def shares() -> Response:
        """Shares of the device for serving and for the engine, while rollouts or an update run, too."""
        return json_response(SharesAnswer(**_device(service).shares()))

    @router.put("/v1/shares")
    async def set_shares(http: Request) -> Response:
        """Change shares or the latency target, from the next unit of work on until the process ends."""
        body = await body_of(service, http, SharesBody)
        changes = body.model_dump()
        if all(value is None for value in changes.values()):
            raise InvalidRequest(f"send one of {', '.join(changes)}", "serving_share")
        device = _device(service)
        device.set_shares(**changes)
        return json_response(SharesAnswer(**device.shares()))

    return router


def _device(service: Service) -> Device:
    if service.device is None:
        raise Unavailable("this process schedules no device, so it has no shares")
    return service.device
