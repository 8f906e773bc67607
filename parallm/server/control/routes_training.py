"""Control of training: pause, resume, one step, an update on given trajectories, a checkpoint."""

import asyncio
import dataclasses
from collections.abc import Sequence
from functools import partial

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from parallm.errors import InvalidRequest, Unavailable
from parallm.server.connection import body_of, json_response
from parallm.server.control.given_trajectories import given_trajectory
from parallm.server.control.training_bodies import CheckpointAnswer, TrainingBody, TrajectoryBody, UpdateBody
from parallm.server.routes_status import status_answer
from parallm.server.service import Service, Tokenizer, Training
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
        body = await body_of(service, http, UpdateBody)
        if body.trajectories is None:
            return await _step(service, training(given), body)
        return await _train_on(service, training(given), body, body.trajectories)

    @router.post("/v1/training/checkpoint")
    @router.post("/training/checkpoint")
    async def checkpoint(http: Request) -> Response:
        """Save after the present step; answers when the checkpoint is on the disk."""
        body = await body_of(service, http, TrainingBody)
        return json_response(CheckpointAnswer(folders=dict(await training(given).checkpoint(body.policy))))

    return router


async def _step(service: Service, trainers: Training, body: UpdateBody) -> Response:
    """Wait for a new step where training is paused, which it stays, or else for the present step."""
    if body.update_inference is not None:
        raise InvalidRequest(
            "update_inference needs trajectories; trainer.publish_if decides which versions of steps are served",
            "update_inference",
        )
    folders = await trainers.step(body.policy, body.checkpoint_name)
    return status_answer(service, **({"folders": dict(folders)} if folders else {}))


async def _train_on(
    service: Service, trainers: Training, body: UpdateBody, trajectories: Sequence[TrajectoryBody]
) -> Response:
    read = partial(_given, trajectories, service.tokenizer, service.engine.max_context)
    update = await trainers.train_on(
        body.policy,
        await asyncio.to_thread(read),
        serve=body.update_inference,
        checkpoint_name=body.checkpoint_name,
    )
    return status_answer(service, update=dataclasses.asdict(update))


def _given(trajectories: Sequence[TrajectoryBody], tokenizer: Tokenizer, max_context: int) -> list[GivenTrajectory]:
    return [given_trajectory(body, index, tokenizer, max_context) for index, body in enumerate(trajectories)]


def training(given: Training | None) -> Training:
    if given is None:
        raise Unavailable("this process serves and does not train; start it with python -m parallm.train")
    return given
