"""Adapters that come and go while the process runs, and which of their versions is served: wire types and routes.

The routes call `checkpoint.adapter_store.AdapterStore`, which keeps its changes over a restart. The same routes under
the names of other servers are in `routes_adapter_aliases.py`.
"""

import dataclasses
from typing import Annotated, Literal

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from parallm.errors import InvalidRequest, Unavailable
from parallm.model.adapters.names import is_number, versioned
from parallm.server.connection import body_of, json_response, read_body
from parallm.server.interfaces import Adapters
from parallm.server.schemas import MAX_INT, Wire
from parallm.server.service import Service
from parallm.types import POLICY, AdapterCard

Name = Annotated[str, Field(min_length=1, max_length=128)]
FolderPath = Annotated[str, Field(min_length=1, max_length=4096)]
Version = Annotated[int, Field(ge=0, le=MAX_INT)]


class LoadBody(Wire):
    name: Name
    path: FolderPath
    """Folder below `server.adapters_root`: an adapter, a checkpoint or a run, also `RUN@VERSION`."""


class PromoteBody(Wire):
    name: Name = POLICY
    version: Version


class RollBackBody(Wire):
    name: Name = POLICY


class AliasBody(Wire):
    alias: Name
    name: Name = POLICY
    version: Version


class AdapterEntry(Wire):
    id: str
    name: str
    version: int
    parent: int | None
    step: int
    rank: int
    alpha: float
    rslora: bool
    is_dora: bool
    aliases: list[str]
    digest: str
    num_running: int
    is_served: bool
    num_bytes: int


class AdapterList(Wire):
    data: list[AdapterEntry]


class NameMeans(Wire):
    """The version that the bare name means now; version 0 is the base."""

    name: str
    version: int


class Done(Wire):
    status: Literal["ok"]


def adapter_routes(service: Service) -> APIRouter:
    router, given = APIRouter(), service.adapters

    @router.get("/v1/adapters")
    async def adapters() -> Response:
        """Every version in memory."""
        return json_response(AdapterList(data=[entry(card) for card in service.catalog()]))

    @router.post("/v1/adapters/load")
    async def load(http: Request) -> Response:
        """Load a folder as the next version of a name, and serve it."""
        body = await body_of(service, http, LoadBody)
        return json_response(entry(await store(given).load(body.name, body.path)))

    @router.put("/v1/adapters/{name}")
    async def upload(name: str, http: Request) -> Response:
        """Take a zip archive of adapter_config.json and the weights as the next version of a name, and serve it."""
        return json_response(entry(await store(given).upload(name, await adapter_body(service, http))))

    @router.delete("/v1/adapters/{model}")
    async def unload(model: str) -> Response:
        """Forget `name`, or one version `name@3`. Requests that run on it finish first."""
        await unload_model(service, store(given), model)
        return json_response(Done(status="ok"))

    @router.post("/v1/adapters/promote")
    async def promote(http: Request) -> Response:
        """Let the bare name mean this version, be it older or newer."""
        body = await body_of(service, http, PromoteBody)
        await store(given).promote(body.name, body.version)
        return json_response(NameMeans(name=body.name, version=body.version))

    @router.post("/v1/adapters/rollback")
    async def roll_back(http: Request) -> Response:
        """Let the bare name mean the version below the one it means; of a policy at last the base."""
        body = await body_of(service, http, RollBackBody)
        return json_response(NameMeans(name=body.name, version=await store(given).roll_back(body.name)))

    @router.post("/v1/adapters/aliases")
    async def set_alias(http: Request) -> Response:
        """Let `name@alias` (of the policy also `alias`) mean a version until it is set again."""
        body = await body_of(service, http, AliasBody)
        await store(given).set_alias(body.alias, body.name, body.version)
        return json_response(Done(status="ok"))

    @router.delete("/v1/adapters/{name}/aliases/{alias}")
    async def remove_alias(name: str, alias: str) -> Response:
        """Forget an alias; its version stays."""
        await store(given).remove_alias(alias, name)
        return json_response(Done(status="ok"))

    @router.post("/update_adapter_weights")
    async def update(http: Request) -> Response:
        """The served version of `?name=` with the tensors of this safetensors body, as its next version."""
        return json_response(entry(await store(given).update(name_of(http), await adapter_body(service, http))))

    return router


def entry(card: AdapterCard) -> AdapterEntry:
    fields = dataclasses.asdict(card) | {"aliases": list(card.aliases)}
    return AdapterEntry(id=versioned(card.name, card.version), **fields)


def store(given: Adapters | None) -> Adapters:
    if given is None:
        raise Unavailable("adapters cannot be changed in this process")
    return given


async def unload_model(service: Service, adapters: Adapters, model: str) -> None:
    """Unload after requests on their way to the engine have reached it."""
    name, at, version = model.partition("@")
    if at and not is_number(version):
        raise InvalidRequest(f"{model[:100]!r} is neither a name nor one version of it, such as poet@3", "name")
    await service.engine.ping()
    await adapters.unload(name, int(version) if at else None)


def name_of(http: Request) -> str:
    name = http.query_params.get("name", "")
    if not name:
        raise InvalidRequest("the name of the adapter is missing; add ?name=NAME to the path", "name")
    return name


async def adapter_body(service: Service, http: Request) -> bytes:
    return await read_body(http, service.settings.max_adapter_bytes, "max_adapter_bytes")
