"""A hand on training: pause, resume, one step, a checkpoint."""

from typing import Annotated

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from parallm.errors import Unavailable
from parallm.server.connection import body_of, json_response, while_connected
from parallm.server.routes_status import status_answer
from parallm.server.schemas import Wire
from parallm.server.service import Service, Training


class TrainingBody(Wire):
    policy: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    """One of several policies; without it all of them."""


class CheckpointAnswer(Wire):
    folders: dict[str, str]
    """Of each policy's checkpoint, on the server's disk."""


def training_routes(service: Service, given: Training | None) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/training/pause")
    async def pause(http: Request) -> Response:
        """Begin no further step. The present one ends first; then the status says `paused`."""
        body = await body_of(service, http, TrainingBody)
        training(given).pause(body.policy)
        return status_answer(service)

    @router.post("/v1/training/resume")
    async def resume(http: Request) -> Response:
        """Begin steps again."""
        body = await body_of(service, http, TrainingBody)
        training(given).resume(body.policy)
        return status_answer(service)

    @router.post("/v1/training/update")
    async def update(http: Request) -> Response:
        """Wait for one more step: a new one where training is paused, which it stays, else the one at work."""
        body = await body_of(service, http, TrainingBody)
        await while_connected(http.receive, training(given).step(body.policy))
        return status_answer(service)

    @router.post("/v1/training/checkpoint")
    @router.post("/training/checkpoint")
    async def checkpoint(http: Request) -> Response:
        """Save after the present step; answers when the checkpoint is on the disk."""
        body = await body_of(service, http, TrainingBody)
        folders = await while_connected(http.receive, training(given).checkpoint(body.policy))
        return json_response(CheckpointAnswer(folders=dict(folders)))

    return router


def training(given: Training | None) -> Training:
    if given is None:
        raise Unavailable("this process serves and does not train; start it with python -m parallm.train")
    return given
