"""Splits of a name between versions, and rewards for what the versions have answered: wire types and routes."""

from typing import Annotated, Literal

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from parallm.server.connection import body_of, json_response
from parallm.server.control.traffic_splits import TrafficSplits, VersionStatistics
from parallm.server.schemas import Wire
from parallm.server.service import Service

MAX_REWARD = 1e9
"""The sum of any number of rewards stays finite, so that no client spoils a version's mean for ever."""


class SplitBody(Wire):
    weights: dict[str, Annotated[float, Field(ge=0)]]


class VersionAnswer(Wire):
    num_requests: int
    num_completions: int
    num_tokens: int
    num_rewards: int
    reward_mean: float | None


class SplitAnswer(Wire):
    name: str
    shares: dict[str, float]
    """Shares by model; empty for a name without a split."""
    versions: dict[str, VersionAnswer]


class SplitList(Wire):
    data: list[SplitAnswer]


class RewardBody(Wire):
    id: Annotated[str, Field(min_length=1, max_length=512)]
    """Id of an answer, or the `request_id` of its request."""
    reward: Annotated[float, Field(ge=-MAX_REWARD, le=MAX_REWARD)]


class RewardAnswer(Wire):
    status: Literal["ok"]


def split_routes(service: Service) -> APIRouter:
    router, splits, statistics = APIRouter(), service.splits, service.statistics

    @router.put("/v1/splits/{name}")
    async def put(name: str, http: Request) -> Response:
        """Let models answer requests for `name` by their weights, which need not add up to 1."""
        body = await body_of(service, http, SplitBody)
        await splits.put(name, body.weights)
        return json_response(_report(name, splits, statistics))

    @router.delete("/v1/splits/{name}")
    async def remove(name: str) -> Response:
        """Let `name` mean again what it meant."""
        await splits.remove(name)
        return json_response(_report(name, splits, statistics))

    @router.get("/v1/splits")
    async def splits_and_counts() -> Response:
        """Each name that was asked for: its split, if it has one, and what its versions have answered."""
        names = dict.fromkeys((*(split.name for split in splits.all()), *statistics.names()))
        return json_response(SplitList(data=[_report(name, splits, statistics) for name in names]))

    @router.post("/v1/rewards")
    async def reward(http: Request) -> Response:
        """Add a reward for an answer to the figures of the version that gave it."""
        body = await body_of(service, http, RewardBody)
        statistics.reward(body.id, body.reward)
        return json_response(RewardAnswer(status="ok"))

    return router


def _report(name: str, splits: TrafficSplits, statistics: VersionStatistics) -> SplitAnswer:
    shares = next((split.shares for split in splits.all() if split.name == name), {})
    return SplitAnswer(
        name=name,
        shares=dict(shares),
        versions={
            version: VersionAnswer(
                num_requests=counts.num_requests,
                num_completions=counts.num_completions,
                num_tokens=counts.num_tokens,
                num_rewards=counts.num_rewards,
                reward_mean=counts.reward_mean,
            )
            for version, counts in statistics.of(name).items()
        },
    )
