"""Shares of the device, between serving and rollouts and between engine and learner: wire types and routes."""

from typing import Annotated

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from parallm.errors import InvalidRequest, Unavailable
from parallm.server.connection import body_of, json_response
from parallm.server.interfaces import Device
from parallm.server.schemas import Wire
from parallm.server.service import Service

Share = Annotated[float, Field(ge=0, le=1)]


class SharesBody(Wire):
    serving_share: Share | None = None
    """Share of the engine's time for serving while rollouts run, too."""
    engine_share: Share | None = None
    """Share of the device's time for the engine while requests and an update run."""


class SharesAnswer(Wire):
    serving_share: float
    engine_share: float


def share_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/shares")
    async def shares() -> Response:
        """Shares of the device for serving and for the engine, while rollouts or an update run, too."""
        return json_response(SharesAnswer(**_device(service).shares()))

    @router.put("/v1/shares")
    async def set_shares(http: Request) -> Response:
        """Change one of the shares or both, from the next unit of work on until the process ends."""
        body = await body_of(service, http, SharesBody)
        if body.serving_share is None and body.engine_share is None:
            raise InvalidRequest("send serving_share, engine_share or both", "serving_share")
        device = _device(service)
        device.set_shares(serving_share=body.serving_share, engine_share=body.engine_share)
        return json_response(SharesAnswer(**device.shares()))

    return router


def _device(service: Service) -> Device:
    if service.device is None:
        raise Unavailable("this process schedules no device, so it has no shares")
    return service.device
