"""The routes about adapters under the names and in the forms of vLLM, SGLang, SkyRL and other programs."""

from typing import TypeVar

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from parallm.errors import InvalidRequest
from parallm.server.connection import json_response, received
from parallm.server.control.adapter_bodies import (
    OF_OTHERS,
    LoadBody,
    LoadedAdapters,
    NameMeans,
    SwitchBody,
    UnloadBody,
    entry,
    in_our_words,
)
from parallm.server.control.routes_adapters import adapter_body, name_of, store, unload_model
from parallm.server.parse import checked, read_object
from parallm.server.schemas import Wire
from parallm.server.service import Adapters, Service

Body = TypeVar("Body", bound=Wire)


def adapter_alias_routes(service: Service, given: Adapters | None) -> APIRouter:
    router = APIRouter()
    loaded: dict[str, str] = {}  # SGLang's answers tell what was loaded from where

    @router.post("/v1/load_lora_adapter")
    async def load_of_vllm(http: Request) -> Response:
        """vLLM's, answered in words."""
        body = await _body(service, http, LoadBody)
        await store(given).load(body.name, body.path)
        return PlainTextResponse(f"Success: LoRA adapter '{body.name}' added successfully.")

    @router.post("/v1/unload_lora_adapter")
    async def unload_of_vllm(http: Request) -> Response:
        """vLLM's, answered in words."""
        body = await _body(service, http, UnloadBody)
        await unload_model(service, store(given), body.name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.name}' removed successfully.")

    @router.post("/load_lora_adapter")
    @router.post("/skyrl/v1/load_lora_adapter")
    async def load_of_sglang(http: Request) -> Response:
        """SGLang's, prime-rl's and SkyRL's."""
        body = await _body(service, http, LoadBody)
        await store(given).load(body.name, body.path)
        loaded[body.name] = body.path
        return _told(service, loaded)

    @router.post("/unload_lora_adapter")
    async def unload_of_sglang(http: Request) -> Response:
        """SGLang's."""
        await unload_model(service, store(given), (await _body(service, http, UnloadBody)).name)
        return _told(service, loaded)

    @router.post("/load_adapter")
    async def load(http: Request) -> Response:
        """`POST /v1/adapters/load`."""
        body = await _body(service, http, LoadBody)
        return json_response(entry(await store(given).load(body.name, body.path)))

    @router.post("/upload_adapter")
    async def upload(http: Request) -> Response:
        """`PUT /v1/adapters/{name}`, with `?name=`."""
        return json_response(entry(await store(given).upload(name_of(http), await adapter_body(service, http))))

    @router.post("/model/switch-lora")
    async def switch(http: Request) -> Response:
        """Serve a version that is loaded, or an adapter in a folder."""
        body = await _body(service, http, SwitchBody)
        if (body.version is None) == (body.path is None):
            raise InvalidRequest("send either the version to serve or the path of a folder to load", "version")
        if body.path is not None:
            card = await store(given).load(body.name, body.path)
            return json_response(NameMeans(name=card.name, version=card.version))
        assert body.version is not None
        store(given).promote(body.name, body.version)
        return json_response(NameMeans(name=body.name, version=body.version))

    return router


async def _body(service: Service, http: Request, schema: type[Body]) -> Body:
    value = await received(service, http, read_object)
    return checked(in_our_words(value), schema, OF_OTHERS)


def _told(service: Service, loaded: dict[str, str]) -> Response:
    names = {card.name for card in service.catalog()}
    for name in loaded.keys() - names:
        del loaded[name]
    return json_response(LoadedAdapters(status="ok", success=True, error_message=None, loaded_adapters=dict(loaded)))
