"""Rewards for completions that a policy learns from, and what became of them: wire types and routes."""

from typing import Annotated

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from parallm.errors import Unavailable, UnknownTrajectory
from parallm.reports import TrajectoryReport
from parallm.server.connection import body_of, json_response
from parallm.server.schemas import Wire
from parallm.server.service import Service

MAX_PARTS = 64
Part = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[^\x00-\x1f\x7f-\x9f]+$")]
"""Name of a part of a reward. Terminals show it: no control characters."""


class TrajectoryRewardBody(Wire):
    reward: float | Annotated[dict[Part, float], Field(min_length=1, max_length=MAX_PARTS)]
    """One number, or parts by name."""


class TrajectoryRewardAnswer(Wire):
    id: str
    reward: float
    """The weighted sum of the parts."""


class TrajectoryList(Wire):
    data: dict[str, TrajectoryReport]
    """Counts by policy."""


def trajectory_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/trajectories/{trajectory_id:path}/reward")
    async def reward(trajectory_id: str, http: Request) -> Response:
        """Set the reward of a choice by its `trajectory_id`; the last one before it is trained on counts."""
        body = await body_of(service, http, TrajectoryRewardBody)
        total = await _set_reward(service, trajectory_id, body)
        return json_response(TrajectoryRewardAnswer(id=trajectory_id, reward=total))

    @router.get("/v1/trajectories")
    async def statistics() -> Response:
        """How many trajectories wait, and what became of the others, by policy."""
        data = {name: trajectories.report() for name, trajectories in service.trajectories.items()}
        return json_response(TrajectoryList(data=data))

    return router


async def _set_reward(service: Service, trajectory_id: str, body: TrajectoryRewardBody) -> float:
    """Ask each policy, since an id does not name its policy; returns the sum of the parts.

    Raises UnknownTrajectory, Unavailable, InvalidRequest, NotStored.
    """
    if not service.trajectories:
        raise Unavailable("nothing here learns from what clients ask for; train with rollout=live")
    unknown: UnknownTrajectory | None = None
    for trajectories in service.trajectories.values():
        try:
            total = trajectories.reward(trajectory_id, body.reward)
        except UnknownTrajectory as error:
            unknown = error
        else:
            await trajectories.written()
            return total
    assert unknown is not None
    raise unknown
