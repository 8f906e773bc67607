"""Rewards for completions that a policy learns from, and what became of them: wire types and routes."""

from typing import Annotated

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from parallm.errors import InvalidRequest, Unavailable, UnknownModel, UnknownTrajectory
from parallm.reports import TrajectoryReport
from parallm.server.connection import body_of, json_response
from parallm.server.schemas import Wire
from parallm.server.service import Service
from parallm.types import FinishReason, RecentTrajectory, TrajectoryState

MAX_PARTS = 64
MAX_RECENT = 200
MAX_PROMPT_TOKENS = 500
MAX_TEXT = 4000
"""Tokens of a prompt and characters of a completion in lists."""
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


class RecentTrajectoryEntry(Wire):
    id: str
    policy: str
    state: TrajectoryState
    """`trained` also in a step that no checkpoint holds yet."""
    reason: str | None
    """Why it was dropped."""
    reward: float | None
    parts: dict[str, float]
    waited: float | None
    """Seconds from its sampling to its first reward."""
    age: float | None
    """Seconds since it was sampled; like all that follows null once it has left the buffer."""
    version: int | None
    step: int | None
    """Step that learns from it, before a checkpoint holds that step."""
    prompt: str | None
    """The end of the prompt, special tokens shown."""
    text: str | None
    """The beginning of the completion."""
    finish_reason: FinishReason | None


class RecentTrajectories(Wire):
    data: list[RecentTrajectoryEntry]
    """The newest of each policy first."""


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

    @router.get("/v1/trajectories/recent")
    async def recent(policy: str | None = None, state: TrajectoryState | None = None, limit: int = 50) -> Response:
        """The newest trajectories that clients have offered, with texts as long as they are in the buffer.

        Nothing is shown that a client has not marked with `collect_trajectory`, and no metadata.
        """
        if not 1 <= limit <= MAX_RECENT:
            raise InvalidRequest(f"limit={limit} should be from 1 to {MAX_RECENT}", "limit")
        if policy is not None and policy not in service.trajectories:
            raise UnknownModel(f"{policy[:100]!r} does not learn from what clients ask for")
        found = [
            (name, one)
            for name, trajectories in service.trajectories.items()
            if policy in (None, name)
            for one in trajectories.recent(state, limit)
        ]
        entries = await service.workers.run(lambda: [_entry(service, *pair) for pair in found])
        return json_response(RecentTrajectories(data=entries))

    return router


def _entry(service: Service, policy: str, one: RecentTrajectory) -> RecentTrajectoryEntry:
    prompt = service.tokenizer.decode(one.prompt_tokens[-MAX_PROMPT_TOKENS:], special=True)
    return RecentTrajectoryEntry(
        id=one.id,
        policy=policy,
        state=one.state,
        reason=one.reason,
        reward=one.reward,
        parts=dict(one.parts),
        waited=one.waited,
        age=one.age,
        version=one.version,
        step=one.step,
        prompt=prompt if one.prompt_tokens else None,
        text=None if one.text is None else one.text[:MAX_TEXT],
        finish_reason=one.finish_reason,
    )


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
