"""The adapter routes under the names and in the forms of vLLM, SGLang, SkyRL and other programs."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from parallm.errors import InvalidRequest
from parallm.server.catalog import served_policy, version_called
from parallm.server.connection import is_form, json_response, read_form, received
from parallm.server.control.routes_adapters import (
    FolderPath,
    LoadBody,
    Name,
    NameMeans,
    Version,
    adapter_body,
    entry,
    name_of,
    store,
    unload_model,
)
from parallm.server.interfaces import Adapters
from parallm.server.schemas import Wire, checked, read_object
from parallm.server.service import Service
from parallm.types import AdapterCard

Body = TypeVar("Body", bound=Wire)
ZIP_MAGIC = b"PK\x03\x04"
FIELD_ALIASES: Mapping[str, str] = {
    "adapter_name": "name",
    "adapter_path": "path",
    "lora_name": "name",
    "lora_path": "path",
}
"""Names of our fields in other programs."""
FOREIGN_FIELDS: Mapping[str, tuple[object, ...]] = {
    "load_inplace": (True, False),
    "lora_id": (),
    "lora_int_id": (),
    "pinned": (False,),
}
"""Fields of vLLM and SGLang. A loaded name is always replaced in place; running requests keep their version."""


class LoadPolicyBody(Wire):
    """A body without a name: the served policy moves to this adapter."""

    path: FolderPath


class UploadFields(Wire):
    """Fields of a form beside its file."""

    name: Name | None = None
    """Name of the adapter; without one the policy moves to the adapter."""


class PolicyMoved(Wire):
    status: Literal["success"]
    policy_version: int
    message: str


class UnloadBody(Wire):
    name: Name


class SwitchBody(Wire):
    """Either a version to promote or a folder to load."""

    name: Name | None = None
    """Name of the adapter; without one the policy."""
    version: Version | Annotated[str, Field(min_length=1, max_length=128)] | None = None
    """A number, or `checkpoint-12`, `best-performance`, `latest` or an alias."""
    path: FolderPath | None = None


class LoadedAdapters(Wire):
    """SGLang's answer, and prime-rl's `status`."""

    status: Literal["ok"]
    success: Literal[True]
    error_message: None
    loaded_adapters: dict[str, str]


def adapter_alias_routes(service: Service) -> APIRouter:
    router, given = APIRouter(), service.adapters
    loaded: dict[str, str] = {}  # name -> path, for SGLang's answers

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
        return _loaded_adapters(service, loaded)

    @router.post("/unload_lora_adapter")
    async def unload_of_sglang(http: Request) -> Response:
        """SGLang's."""
        await unload_model(service, store(given), (await _body(service, http, UnloadBody)).name)
        return _loaded_adapters(service, loaded)

    @router.post("/load_adapter")
    async def load(http: Request) -> Response:
        """`POST /v1/adapters/load`; without a name the policy that is served moves to the adapter."""
        value = _with_own_names(await received(service, http, read_object))
        if value.get("name") is not None:
            body = checked(value, LoadBody, FOREIGN_FIELDS)
            return json_response(entry(await store(given).load(body.name, body.path)))
        path = checked(value, LoadPolicyBody, {**FOREIGN_FIELDS, "name": ()}).path
        return _moved(await store(given).load(_only_policy(service), path), path)

    @router.post("/upload_adapter")
    async def upload(http: Request) -> Response:
        """`PUT /v1/adapters/{name}`, with `?name=`; or a form with the file, whose adapter the policy moves to."""
        if not is_form(http):
            return json_response(entry(await store(given).upload(name_of(http), await adapter_body(service, http))))
        form = await read_form(http, service.settings.max_adapter_bytes, "max_adapter_bytes")
        name = checked(_with_own_names(form.fields), UploadFields).name or http.query_params.get("name")
        card = await _uploaded(store(given), name or _only_policy(service), form.content)
        return _moved(card, form.file_name) if name is None else json_response(entry(card))

    @router.post("/model/switch-lora")
    async def switch(http: Request) -> Response:
        """Serve a version that is loaded, or an adapter in a folder."""
        body = await _body(service, http, SwitchBody)
        if (body.version is None) == (body.path is None):
            raise InvalidRequest("send either the version to serve or the path of a folder to load", "version")
        name = served_policy(service) if body.name is None else body.name
        if body.path is not None:
            card = await store(given).load(name, body.path)
            return json_response(NameMeans(name=card.name, version=card.version))
        version = version_called(service, name, body.version) if isinstance(body.version, str) else body.version
        assert version is not None, "the body has either a version or a path"
        await store(given).promote(name, version)
        return json_response(NameMeans(name=name, version=version))

    return router


def _only_policy(service: Service) -> str:
    """Return the policy of a request without a name. Raises InvalidRequest where there are several."""
    if len(service.policies) > 1:
        raise InvalidRequest(f"send the name of the adapter; there are {', '.join(service.policies)}", "name")
    return served_policy(service)


async def _uploaded(adapters: Adapters, name: str, content: bytes) -> AdapterCard:
    """Load a zip archive as a whole adapter, and anything else as its tensors."""
    return await (adapters.upload if content.startswith(ZIP_MAGIC) else adapters.update)(name, content)


def _moved(card: AdapterCard, source: str) -> Response:
    return json_response(
        PolicyMoved(status="success", policy_version=card.version, message=f"Loaded adapter from {source}")
    )


async def _body(service: Service, http: Request, schema: type[Body]) -> Body:
    value = await received(service, http, read_object)
    return checked(_with_own_names(value), schema, FOREIGN_FIELDS)


def _with_own_names(value: Mapping[str, Any]) -> dict[str, Any]:
    return {FIELD_ALIASES.get(name, name): item for name, item in value.items()}


def _loaded_adapters(service: Service, loaded: dict[str, str]) -> Response:
    names = {card.name for card in service.catalog()}
    for name in loaded.keys() - names:
        del loaded[name]
    return json_response(LoadedAdapters(status="ok", success=True, error_message=None, loaded_adapters=dict(loaded)))
