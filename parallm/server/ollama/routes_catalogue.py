"""Ollama's routes that change the catalogue: pull, create, copy, delete, and blobs to create of."""

import asyncio
from collections.abc import AsyncGenerator

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from parallm.errors import InvalidRequest, Unavailable, UnknownModel
from parallm.server.catalog import model_names
from parallm.server.connection import bounded_chunks, counted, json_response, received, while_connected
from parallm.server.failures import failure_of
from parallm.server.generation import EventStream
from parallm.server.interfaces import Models
from parallm.server.ollama.answers import encode_lines
from parallm.server.ollama.blobs import blob_path, store_blob, sweep
from parallm.server.ollama.create import NEUTRAL, OllamaCreateBody, create
from parallm.server.ollama.names import OllamaRoute, model_called, own_name
from parallm.server.ollama.pull import Progress, Pulls, hub_id_of
from parallm.server.ollama.routes_generate import LINES
from parallm.server.ollama.routes_models import asked_name
from parallm.server.ollama.schemas import OllamaError, object_of
from parallm.server.request_limits import MAX_UPLOADS, BodyBudget
from parallm.server.schemas import ModelName, Wire, checked
from parallm.server.service import Service


class OllamaCopyBody(Wire):
    source: ModelName
    destination: ModelName


class OllamaDeleteBody(Wire):
    model: ModelName | None = None
    name: ModelName | None = None
    """Older name of `model`."""


class OllamaPullBody(OllamaDeleteBody):
    stream: bool = True
    insecure: bool = Field(default=False)
    """Without effect: models come from the hub, by HTTPS."""


def catalogue_routes(service: Service) -> APIRouter:
    router, pulls = APIRouter(route_class=OllamaRoute), Pulls()
    blobs = BodyBudget(MAX_UPLOADS * service.settings.max_blob_bytes, "uploaded blobs")

    @router.post("/api/copy")
    async def copy(http: Request) -> Response:
        """Let a second name mean what the first one means."""
        body = await received(service, http, lambda text: checked(object_of(text), OllamaCopyBody, {}))
        models = _models(service)
        for name, verb in ((body.source, "copied"), (body.destination, "given to another model")):
            _check_not_own(service, name, verb)
        with model_called(body.source):
            await models.copy(body.source, body.destination)
        return Response()

    @router.delete("/api/delete")
    async def delete(http: Request) -> Response:
        """Forget a name; with the last one of a model that was created here, its files."""
        body = await received(service, http, lambda text: checked(object_of(text), OllamaDeleteBody, {}))
        models, name = _models(service), asked_name(body.model, body.name)
        _check_not_own(service, name, "deleted")
        with model_called(name):
            await models.delete(name)
        overlays = [named.overlay for named in await models.names()]
        adapters = {overlay.adapter for overlay in overlays if overlay is not None and overlay.adapter is not None}
        await asyncio.to_thread(sweep, models.folder, adapters)
        return Response()

    @router.head("/api/blobs/{digest}")
    async def find_blob(digest: str) -> Response:
        """Whether a file of this digest was uploaded."""
        return Response(status_code=200 if blob_path(_models(service).folder, digest).is_file() else 404)

    @router.post("/api/blobs/{digest}")
    async def upload_blob(http: Request, digest: str) -> Response:
        """Keep a file, which has this digest, to create a model of."""
        path = blob_path(_models(service).folder, digest)
        if path.is_file():
            return Response(status_code=200)
        with blobs.reserve() as grow:
            chunks = bounded_chunks(http, service.settings.max_blob_bytes, "server.max_blob_bytes")
            await store_blob(path, counted(chunks, grow))
        return Response(status_code=201)

    @router.post("/api/create")
    async def make(http: Request) -> Response:
        """Make a name of another model with a system message and parameters, or of uploaded files."""
        body = await received(service, http, lambda text: checked(object_of(text), OllamaCreateBody, NEUTRAL))
        name = asked_name(body.model, body.name)
        return await _progress(service, http, create(service, _models(service), name, body), stream=body.stream)

    @router.post("/api/pull")
    async def pull(http: Request) -> Response:
        """Make sure that a model is here: in the catalogue, in the cache of the hub, or downloaded from there."""
        body = await received(service, http, lambda text: checked(object_of(text), OllamaPullBody, {}))
        name = asked_name(body.model, body.name)
        return await _progress(service, http, pulled(service, pulls, name), stream=body.stream)

    return router


async def pulled(service: Service, pulls: Pulls, name: str) -> AsyncGenerator[Progress, None]:
    """Make a model a part of the catalogue, and yield what is done. Raises Unavailable, InvalidRequest."""
    yield Progress(status="pulling manifest")
    if own_name(service, name) not in model_names(service):
        models = _models(service)
        if not await _is_named(models, name):
            if (hub_id := hub_id_of(name)) is None:
                raise Unavailable(
                    f"pull model manifest: {name[:200]}: no hub id is known for it; name one with its owner, such as "
                    "Qwen/Qwen3-0.6B, or put the model's folder below one of registry.folders"
                )
            await models.scan()
            if not await _is_named(models, hub_id):
                async for progress in pulls.watch(hub_id):
                    yield progress
                await models.scan()
            yield Progress(status="writing manifest")
            if not await _is_named(models, name):
                await models.create(name, hub_id)
    yield Progress(status="success")


async def _is_named(models: Models, name: str) -> bool:
    try:
        return not (await models.describe(name)).model.is_missing
    except UnknownModel:
        return False


def _models(service: Service) -> Models:
    if service.models is None:
        raise Unavailable(
            "this process serves one model and keeps no catalogue; start it with registry.enabled=true, and with "
            "registry.folders=[FOLDER] for models that are on this disk"
        )
    return service.models


def _check_not_own(service: Service, name: str, verb: str) -> None:
    if own_name(service, name) in model_names(service):
        raise InvalidRequest(f"{name[:200]} is a name of this process's own base and is not {verb} here", "model")


async def _progress(
    service: Service, http: Request, lines: AsyncGenerator[Progress, None], *, stream: bool
) -> Response:
    """Answer with all lines, or with the last one. An error before the first line is an ordinary one."""
    try:
        if not stream:
            return await while_connected(http.receive, _last(lines))
        first = await anext(lines)
    except BaseException:
        await lines.aclose()
        raise
    events = _encoded(first, lines)
    response = EventStream(
        events,
        lines,
        name="progress",
        stall_seconds=service.settings.stall_seconds,
        failed=lambda error: encode_lines([OllamaError(error=failure_of(error).message)]),
    )
    response.headers["content-type"] = LINES
    return response


async def _last(lines: AsyncGenerator[Progress, None]) -> Response:
    last = Progress(status="success")
    async for line in lines:
        last = line
    return json_response(last)


async def _encoded(first: Progress, lines: AsyncGenerator[Progress, None]) -> AsyncGenerator[bytes, None]:
    yield encode_lines([first])
    async for line in lines:
        yield encode_lines([line])
