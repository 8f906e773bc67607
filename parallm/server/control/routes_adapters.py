"""Adapters that come and go while the process runs, and which of their versions is served: wire types and routes.

The routes call `checkpoint.adapter_store.AdapterStore`, which keeps its changes over a restart. `adapter_alias_routes`
has them under the names and in the forms of vLLM, SGLang, SkyRL and other programs.
"""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from parallm.errors import InvalidRequest, Unavailable
from parallm.model.adapters.names import is_number, versioned
from parallm.server.catalog import served_policy, version_called
from parallm.server.connection import body_of, is_form, json_response, read_form, received, uploaded
from parallm.server.interfaces import Adapters
from parallm.server.operation.request_context import note_values
from parallm.server.schemas import MAX_INT, Done, Wire, checked, read_object
from parallm.server.service import Service
from parallm.types import POLICY, AdapterCard, TaskSpec

Name = Annotated[str, Field(min_length=1, max_length=128)]
FolderPath = Annotated[str, Field(min_length=1, max_length=4096)]
Version = Annotated[int, Field(ge=0, le=MAX_INT)]


class LoadBody(Wire):
    name: Name
    path: FolderPath
    """Folder below `server.adapters_root`: an adapter, a checkpoint or a run, also `RUN@VERSION`."""


class RollBackBody(Wire):
    name: Name = POLICY


class PromoteBody(RollBackBody):
    version: Version


class AliasBody(PromoteBody):
    alias: Name


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
    task: TaskSpec | None = None
    """How the adapter makes vectors of texts; absent: it writes text."""


class AdapterList(Wire):
    data: list[AdapterEntry]


class NameMeans(Wire):
    """The version that the bare name means now; version 0 is the base."""

    name: str
    version: int


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
        async with uploaded(service, http) as content:
            return json_response(entry(await store(given).upload(name, content)))

    @router.delete("/v1/adapters/{model}")
    async def unload(model: str) -> Response:
        """Forget `name`, or one version `name@3`. Requests that run on it finish first."""
        await unload_model(service, store(given), model)
        return json_response(Done(status="ok"))

    @router.get("/v1/adapters/{model}/archive")
    async def archive(model: str) -> Response:
        """Download `name`, `name@3` or `name@alias` as a zip archive, which `PUT /v1/adapters/{name}` takes."""
        card, content = await store(given).archive(model)
        headers = {
            "Content-Disposition": f'attachment; filename="{versioned(card.name, card.version)}.zip"',
            "X-Content-Type-Options": "nosniff",
        }
        return Response(content, media_type="application/zip", headers=headers)

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
        version = await store(given).roll_back(body.name)
        note_values({"name": body.name, "version": version})
        return json_response(NameMeans(name=body.name, version=version))

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
        async with uploaded(service, http) as content:
            return json_response(entry(await store(given).update(name_of(http), content)))

    return router


def entry(card: AdapterCard) -> AdapterEntry:
    fields = {field.name: getattr(card, field.name) for field in dataclasses.fields(card)}
    fields |= {"aliases": list(card.aliases)}
    if card.task is None:
        del fields["task"]
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
    if service.jobs is not None and not at:
        await service.jobs.tuning.forget(name)


def name_of(http: Request) -> str:
    name = http.query_params.get("name", "")
    note_values({"name": name or None})
    if not name:
        raise InvalidRequest("the name of the adapter is missing; add ?name=NAME to the path", "name")
    return name


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
        note_values({name: value.get(name) for name in ("name", "path")})
        if value.get("name") is not None:
            body = checked(value, LoadBody, FOREIGN_FIELDS)
            return json_response(entry(await store(given).load(body.name, body.path)))
        path = checked(value, LoadPolicyBody, {**FOREIGN_FIELDS, "name": ()}).path
        return _moved(await store(given).load(_only_policy(service), path), path)

    @router.post("/upload_adapter")
    async def upload(http: Request) -> Response:
        """`PUT /v1/adapters/{name}`, with `?name=`; or a form with the file, whose adapter the policy moves to."""
        if not is_form(http):
            async with uploaded(service, http) as content:
                return json_response(entry(await store(given).upload(name_of(http), content)))
        with service.uploads.reserve() as grow:
            form = await read_form(http, service.settings.max_adapter_bytes, "server.max_adapter_bytes", grow=grow)
            name = checked(_with_own_names(form.fields), UploadFields).name or http.query_params.get("name")
            note_values({"name": name})
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
    body = checked(_with_own_names(value), schema, FOREIGN_FIELDS)
    note_values(body.model_dump(exclude_unset=True))
    return body


def _with_own_names(value: Mapping[str, Any]) -> dict[str, Any]:
    return {FIELD_ALIASES.get(name, name): item for name, item in value.items()}


def _loaded_adapters(service: Service, loaded: dict[str, str]) -> Response:
    names = {card.name for card in service.catalog()}
    for name in loaded.keys() - names:
        del loaded[name]
    return json_response(LoadedAdapters(status="ok", success=True, error_message=None, loaded_adapters=dict(loaded)))
