"""Models of the catalogue: load, unload, scan, copy, create and delete, as wire types and routes."""

from contextlib import aclosing
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from parallm.errors import Unavailable
from parallm.registry.records import Loaded
from parallm.server.connection import body_of, json_response
from parallm.server.control.routes_adapters import store, unload_model
from parallm.server.interfaces import Models
from parallm.server.keep_alive import KeepAlive
from parallm.server.ollama.create import GivenMessage, OllamaCreateBody, create
from parallm.server.schemas import Done, ModelName, Wire
from parallm.server.service import Service


class ModelNameBody(Wire):
    model: ModelName


class ModelLoadBody(ModelNameBody):
    keep_alive: KeepAlive | None = None
    """Seconds that the model stays after its last request, or a duration such as 5m; below 0: until its memory is
    needed."""
    pinned: bool | None = None
    """Whether only an unload makes it leave."""


class ModelCopyBody(Wire):
    source: ModelName
    destination: ModelName


class ModelCreateBody(ModelNameBody):
    source: Annotated[str, Field(min_length=1, max_length=4096)]
    """A name, a hub id in the cache, or a folder below `registry.folders`."""
    system: str | None = None
    """System message of chats that bring none."""
    parameters: dict[str, Any] | None = None
    """Defaults of requests, by Ollama's names."""
    messages: list[GivenMessage] | None = None
    """Messages before those of every chat."""
    license: str | list[str] | None = None


class LoadedModelEntry(Wire):
    model: str
    names: tuple[str, ...]
    state: str
    """`loading`, `ready`, `draining` or `unloading`."""
    memory_bytes: int
    expires_at: float | None
    """Unix seconds; null: it answers just now, or stays until its memory is needed."""
    pinned: bool
    num_running: int
    """Requests that it answers now."""


class LoadedModelList(Wire):
    data: list[LoadedModelEntry]


class ModelDeleted(Wire):
    id: str
    object: Literal["model"]
    deleted: Literal[True]


class ModelNameList(Wire):
    names: tuple[str, ...]


def model_routes(service: Service) -> APIRouter:
    router = APIRouter()

    def models() -> Models:
        if service.models is None:
            raise Unavailable("this process has one model; start it with registry.enabled=true to load others")
        return service.models

    @router.get("/v1/models/loaded")
    async def loaded() -> Response:
        """Models of the catalogue in memory, and on their way there or out of it."""
        return json_response(LoadedModelList(data=[_entry(model) for model in models().loaded()]))

    @router.post("/v1/models/load")
    async def load(http: Request) -> Response:
        """Load a model, and answer when it is in memory."""
        body = await body_of(service, http, ModelLoadBody)
        await models().load(body.model, keep_alive=body.keep_alive, is_pinned=body.pinned)
        return json_response(Done(status="ok"))

    @router.post("/v1/models/unload")
    async def unload(http: Request) -> Response:
        """Unload a model after the answers that it gives now, and answer when it has left memory."""
        body = await body_of(service, http, ModelNameBody)
        await models().unload(body.model)
        return json_response(Done(status="ok"))

    @router.post("/v1/models/scan")
    async def scan() -> Response:
        """Register the models that are on the disk now. Answers with the new names."""
        return json_response(ModelNameList(names=await models().scan()))

    @router.post("/v1/models/copy")
    async def copy(http: Request) -> Response:
        """Let a second name mean a model, with what the first one adds to it."""
        body = await body_of(service, http, ModelCopyBody)
        await models().copy(body.source, body.destination)
        return json_response(Done(status="ok"))

    @router.post("/v1/models/create")
    async def make(http: Request) -> Response:
        """Let a name mean a model with a system message or parameters of its own beside those of its source."""
        body = await body_of(service, http, ModelCreateBody)
        given = OllamaCreateBody.model_validate({"from": body.source, **body.model_dump(exclude={"model", "source"})})
        async with aclosing(create(service, models(), body.model, given)) as lines:
            async for _ in lines:
                pass
        return json_response(Done(status="ok"))

    @router.delete("/v1/models/{name:path}")
    async def delete(name: str) -> Response:
        """Forget a name, or an adapter of this process; a model without a name is unloaded.

        Files stay, but for those of models created here, and of models that jobs have made.
        """
        if any(card.name == name for card in service.catalog()):
            await unload_model(service, store(service.adapters), name)
        else:
            await models().delete(name)
        return json_response(ModelDeleted(id=name, object="model", deleted=True))

    return router


def _entry(model: Loaded) -> LoadedModelEntry:
    return LoadedModelEntry(
        model=model.name,
        names=model.names,
        state=model.state,
        memory_bytes=model.num_bytes,
        expires_at=model.expires_at,
        pinned=model.is_pinned,
        num_running=model.num_leases,
    )
