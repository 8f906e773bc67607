"""Control of training: pause, resume, one step, an update on given trajectories, a checkpoint."""

import dataclasses
from collections.abc import Sequence
from functools import partial

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from parallm.errors import InvalidRequest, Unavailable
from parallm.server.connection import body_of, json_response, received, while_connected
from parallm.server.control.given_trajectories import given_trajectory
from parallm.server.control.training_bodies import CheckpointAnswer, TrainingBody, UpdateBody
from parallm.server.parse import parse_body
from parallm.server.routes_status import status_answer
from parallm.server.service import Service, Training
from parallm.updates import GivenTrajectory


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
        """Train on these trajectories after the present step; without any, wait for one more step."""
        body, trajectories = await received(service, http, partial(_asked, service))
        if trajectories is None:
            return await _step(service, http, training(given), body)
        return await _train_on(service, http, training(given), body, trajectories)

    @router.post("/v1/training/checkpoint")
    @router.post("/training/checkpoint")
    async def checkpoint(http: Request) -> Response:
        """Save after the present step; answers when the checkpoint is on the disk."""
        body = await body_of(service, http, TrainingBody)
        folders = await while_connected(http.receive, training(given).checkpoint(body.policy))
        return json_response(CheckpointAnswer(folders=dict(folders)))

    return router


def _asked(service: Service, text: bytes) -> tuple[UpdateBody, list[GivenTrajectory] | None]:
    """Return the body and its trajectories as tokens. Raises InvalidRequest."""
    body = parse_body(text or b"{}", UpdateBody)
    if body.trajectories is None:
        return body, None
    tokenizer, max_context = service.tokenizer, service.engine.max_context
    return body, [given_trajectory(one, index, tokenizer, max_context) for index, one in enumerate(body.trajectories)]


async def _step(service: Service, http: Request, trainers: Training, body: UpdateBody) -> Response:
    """Wait for a new step where training is paused, which it stays, or else for the present step."""
    if body.update_inference is not None:
        raise InvalidRequest(
            "update_inference needs trajectories; trainer.publish_if decides which versions of steps are served",
            "update_inference",
        )
    folders = await while_connected(http.receive, trainers.step(body.policy, body.checkpoint_name))
    return status_answer(service, **({"folders": dict(folders)} if folders else {}))


async def _train_on(
    service: Service, http: Request, trainers: Training, body: UpdateBody, trajectories: Sequence[GivenTrajectory]
) -> Response:
    work = trainers.train_on(
        body.policy, trajectories, serve=body.update_inference, checkpoint_name=body.checkpoint_name
    )
    update = await while_connected(http.receive, work)
    return status_answer(service, update=dataclasses.asdict(update))


def training(given: Training | None) -> Training:
    if given is None:
        raise Unavailable("this process serves and does not train; start it with python -m parallm.train")
    return given
