"""Which share of the requests for a name each version answers, and what came of it."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from parallm.server.connection import body_of, json_response
from parallm.server.control.routes_engine import (
    RewardAnswer,
    RewardBody,
    SplitAnswer,
    SplitBody,
    SplitList,
    VersionAnswer,
)
from parallm.server.control.traffic_splits import TrafficSplits
from parallm.server.control.version_statistics import VersionStatistics
from parallm.server.service import Service


def split_routes(service: Service, splits: TrafficSplits, statistics: VersionStatistics) -> APIRouter:
    """Routes that change what is served."""
    router = APIRouter()

    @router.put("/v1/splits/{name}")
    async def put(name: str, http: Request) -> Response:
        """Let models answer requests for `name` by their weights, which need not add up to 1."""
        body = await body_of(service, http, SplitBody)
        await splits.put(name, body.weights)
        return json_response(_told(name, splits, statistics))

    @router.delete("/v1/splits/{name}")
    async def remove(name: str) -> Response:
        """Let `name` mean again what it meant."""
        await splits.remove(name)
        return json_response(_told(name, splits, statistics))

    return router


def statistics_routes(splits: TrafficSplits, statistics: VersionStatistics) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/splits")
    async def splits_and_counts() -> Response:
        """Each name that was asked for: its split, if it has one, and what its versions have answered."""
        names = dict.fromkeys((*(split.name for split in splits.all()), *statistics.names()))
        return json_response(SplitList(data=[_told(name, splits, statistics) for name in names]))

    return router


def reward_routes(service: Service, statistics: VersionStatistics) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/rewards")
    async def reward(http: Request) -> Response:
        """Add a reward for an answer to the figures of the version that gave it."""
        body = await body_of(service, http, RewardBody)
        statistics.reward(body.id, body.reward)
        return json_response(RewardAnswer(status="ok"))

    return router


def _told(name: str, splits: TrafficSplits, statistics: VersionStatistics) -> SplitAnswer:
    shares = next((split.shares for split in splits.all() if split.name == name), {})
    return SplitAnswer(
        name=name,
        shares=dict(shares),
        versions={
            version: VersionAnswer(
                num_requests=one.num_requests,
                num_completions=one.num_completions,
                num_tokens=one.num_tokens,
                num_rewards=one.num_rewards,
                reward_mean=one.reward_mean,
            )
            for version, one in statistics.of(name).items()
        },
    )
