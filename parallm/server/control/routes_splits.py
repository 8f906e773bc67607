"""Splits of a name between versions, and rewards for what the versions have answered: wire types and routes."""

from collections.abc import Mapping
from typing import Annotated

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from parallm.reports import VersionReport
from parallm.server.connection import body_of, json_response
from parallm.server.schemas import Done, Wire
from parallm.server.service import Service

MAX_REWARD = 1e9
"""The sum of any number of rewards stays finite, so that no client spoils a version's mean for ever."""


class SplitBody(Wire):
    weights: dict[str, Annotated[float, Field(ge=0)]]


class SplitAnswer(Wire):
    name: str
    shares: Mapping[str, float]
    """Shares by model; empty for a name without a split."""
    versions: dict[str, VersionReport]


class SplitList(Wire):
    data: list[SplitAnswer]


class RewardBody(Wire):
    id: Annotated[str, Field(min_length=1, max_length=512)]
    """Id of an answer, or the `request_id` of its request."""
    reward: Annotated[float, Field(ge=-MAX_REWARD, le=MAX_REWARD)]


def split_routes(service: Service) -> APIRouter:
    router, splits, statistics = APIRouter(), service.splits, service.statistics

    def report(name: str) -> SplitAnswer:
        versions = {version: counts.report() for version, counts in statistics.of(name).items()}
        return SplitAnswer(name=name, shares=splits.all().get(name, {}), versions=versions)

    @router.put("/v1/splits/{name}")
    async def put(name: str, http: Request) -> Response:
        """Let models answer requests for `name` by their weights, which need not add up to 1."""
        body = await body_of(service, http, SplitBody)
        await splits.put(name, body.weights)
        return json_response(report(name))

    @router.delete("/v1/splits/{name}")
    async def remove(name: str) -> Response:
        """Let `name` mean again what it meant."""
        await splits.remove(name)
        return json_response(report(name))

    @router.get("/v1/splits")
    async def splits_and_counts() -> Response:
        """Each name that was asked for: its split, if it has one, and what its versions have answered."""
        names = dict.fromkeys((*splits.all(), *statistics.names()))
        return json_response(SplitList(data=[report(name) for name in names]))

    @router.post("/v1/rewards")
    async def reward(http: Request) -> Response:
        """Add a reward for an answer to the figures of the version that gave it."""
        body = await body_of(service, http, RewardBody)
        statistics.reward(body.id, body.reward)
        return json_response(Done(status="ok"))

    return router
