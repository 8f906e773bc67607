"""KServe's open inference protocol, version 2, with Triton's binary extension: `/v2`. Wire types and routes.

Tensors of a body stand in its JSON or, in the order of the inputs, as bytes behind it; the header
`Inference-Header-Content-Length` says where the JSON ends. Errors have the protocol's form.
https://github.com/kserve/open-inference-protocol
"""

import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field
from pydantic_core import to_json
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from parallm import __version__
from parallm.errors import EngineStopped, InvalidRequest, ParallmError
from parallm.server.connection import received, while_connected
from parallm.server.failures import failure_of
from parallm.server.schemas import Wire, checked, read_object
from parallm.server.service import Service
from parallm.server.tasks.predictions import TensorModel, check_answer, choose, choose_outputs, predict, prepare
from parallm.server.tasks.tensors import (
    SECONDS_PER_NUMBER,
    check_datatype,
    from_bytes,
    read_tensor,
    to_bytes,
    to_list,
)
from parallm.tensors import Array, Arrays, TensorSpec

LENGTH_HEADER = "inference-header-content-length"
Shape = Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=8)]


class InputParameters(Wire):
    binary_data_size: Annotated[int, Field(ge=0)] | None = None
    """Bytes of the tensor behind the JSON, in place of `data`."""


class InferInput(Wire):
    name: str
    shape: Shape
    datatype: str
    parameters: InputParameters | None = None
    data: list[Any] | None = None


class OutputParameters(Wire):
    binary_data: bool | None = None


class InferOutput(Wire):
    name: str
    parameters: OutputParameters | None = None


class InferParameters(Wire):
    binary_data_output: bool = False
    """Answer all outputs as bytes that do not say otherwise."""


class InferBody(Wire):
    id: str | None = None
    parameters: InferParameters | None = None
    inputs: Annotated[list[InferInput], Field(max_length=64, fail_fast=True)]
    outputs: Annotated[list[InferOutput], Field(max_length=64, fail_fast=True)] | None = None


class InferTensor(Wire):
    name: str
    datatype: str
    shape: list[int]
    parameters: InputParameters | None = None
    data: list[Any] | None = None


class InferAnswer(Wire):
    model_name: str
    model_version: str
    id: str
    outputs: list[InferTensor]


class MetadataTensor(Wire):
    name: str
    datatype: str
    shape: list[int]


class ModelMetadata(Wire):
    name: str
    versions: list[str]
    platform: str
    inputs: list[MetadataTensor]
    outputs: list[MetadataTensor]


class ServerMetadata(Wire):
    name: str
    version: str
    extensions: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Infer:
    """A checked request."""

    model: TensorModel
    request_id: str
    inputs: Arrays
    outputs: tuple[TensorSpec, ...]
    binary: frozenset[str]
    """Outputs to answer as bytes."""


def kserve_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.get("/v2")
    async def metadata() -> Response:
        """The server, in KServe's form."""
        extensions = ["binary_tensor_data"]
        return _json(ServerMetadata(name="parallm", version=__version__, extensions=extensions).model_dump())

    @router.get("/v2/health/live")
    async def live() -> Response:
        """Alive, in KServe's form."""
        return await _answered(partial(_health, service, "live"))

    @router.get("/v2/health/ready")
    async def ready() -> Response:
        """Ready for requests, in KServe's form."""
        return await _answered(partial(_health, service, "ready"))

    @router.get("/v2/models/{name}")
    @router.get("/v2/models/{name}/versions/{version}")
    async def model_metadata(name: str, version: str | None = None) -> Response:
        """The inputs and outputs of a policy net, the base or an adapter, in KServe's form."""
        return await _answered(partial(_metadata, service, name, version))

    @router.get("/v2/models/{name}/ready")
    @router.get("/v2/models/{name}/versions/{version}/ready")
    async def model_ready(name: str, version: str | None = None) -> Response:
        """Whether there is such a model, in KServe's form."""
        return await _answered(partial(_ready, service, name, version))

    @router.post("/v2/models/{name}/infer")
    @router.post("/v2/models/{name}/versions/{version}/infer")
    async def infer(http: Request, name: str, version: str | None = None) -> Response:
        """Compute a model's outputs for named tensors, in KServe's form."""
        return await _answered(partial(_infer, service, http, name, version))

    return router


async def _answered(answer: Callable[[], Awaitable[Response]]) -> Response:
    try:
        return await answer()
    except ParallmError as error:
        failure = failure_of(error)
        return JSONResponse({"error": failure.message}, failure.status, headers=dict(failure.headers))


def _json(value: Mapping[str, Any]) -> Response:
    return Response(to_json(value), media_type="application/json")


async def _health(service: Service, word: str) -> Response:
    if not service.engine.is_alive:
        raise EngineStopped("the engine has stopped; restart the process")
    return _json({word: True})


async def _ready(service: Service, name: str, version: str | None) -> Response:
    await prepare(service)
    return _json({"name": choose(service, name, version).name, "ready": True})


async def _metadata(service: Service, name: str, version: str | None) -> Response:
    await prepare(service)
    model = choose(service, name, version)
    own = [card.version for card in service.actor.cards() if card.name == model.name] if service.actor else []
    adapters = [card.version for card in service.catalog() if card.name == model.name]
    versions = list(map(str, sorted(own or adapters or [model.version])))
    found = ModelMetadata(
        name=model.name,
        versions=versions,
        platform="parallm",
        inputs=list(map(_metadata_tensor, model.signature.inputs)),
        outputs=list(map(_metadata_tensor, model.signature.outputs)),
    )
    return _json(found.model_dump())


def _metadata_tensor(spec: TensorSpec) -> MetadataTensor:
    return MetadataTensor(name=spec.name, datatype=spec.datatype, shape=list(spec.shape))


async def _infer(service: Service, http: Request, name: str, version: str | None) -> Response:
    await prepare(service)
    request = await received(service, http, partial(_parse, service, http.headers, name, version))
    found = await while_connected(http.receive, predict(request.model, request.inputs, request.outputs))
    size = sum(array.size for name, array in found.items() if name not in request.binary)
    return await service.workers.run_if_long(partial(_answer, request, found), seconds=size * SECONDS_PER_NUMBER)


def _parse(service: Service, headers: Headers, name: str, version: str | None, content: bytes) -> Infer:
    """Raises InvalidRequest, UnknownModel, Unavailable."""
    text, rest = _split(headers, content)
    body = checked(read_object(text), InferBody, {})
    model = choose(service, name, version)
    inputs = _read_inputs(body.inputs, model.signature.inputs, rest)
    specs = choose_outputs(model, None if body.outputs is None else [output.name for output in body.outputs])
    check_answer(service, specs, inputs)
    usual = body.parameters is not None and body.parameters.binary_data_output
    asked = {output.name: output.parameters.binary_data for output in body.outputs or () if output.parameters}
    binary = {spec.name for spec in specs if (usual if asked.get(spec.name) is None else asked[spec.name])}
    return Infer(
        model=model,
        request_id=body.id or f"pred-{uuid.uuid4().hex}",
        inputs=inputs,
        outputs=specs,
        binary=frozenset(binary),
    )


def _split(headers: Headers, content: bytes) -> tuple[bytes, bytes]:
    """Return the JSON of a body and the bytes behind it. Raises InvalidRequest."""
    if headers.get("content-encoding", "identity") != "identity":
        raise InvalidRequest("compressed bodies are not read; send this one as it is", "Content-Encoding")
    given = headers.get(LENGTH_HEADER)
    if given is None:
        return content, b""
    if not given.isascii() or not given.isdigit() or len(given) > 12 or int(given) > len(content):
        raise InvalidRequest(
            f"Inference-Header-Content-Length is {given[:40]!r}, and the body has {len(content)} bytes", LENGTH_HEADER
        )
    return content[: int(given)], content[int(given) :]


def _read_inputs(given: Sequence[InferInput], specs: Sequence[TensorSpec], rest: bytes) -> dict[str, Array]:
    known, inputs, start = {spec.name: spec for spec in specs}, dict[str, Array](), 0
    for tensor in given:
        field = f"inputs.{tensor.name[:100]}"
        if tensor.name not in known:
            raise InvalidRequest(f"the model has no input {tensor.name[:100]!r}; it has {', '.join(known)}", "inputs")
        if tensor.name in inputs:
            raise InvalidRequest(f"the input {tensor.name} is there twice", "inputs")
        spec = known[tensor.name]
        check_datatype(tensor.datatype, spec, field)
        size = None if tensor.parameters is None else tensor.parameters.binary_data_size
        if (size is None) == (tensor.data is None):
            raise InvalidRequest(f"{field} should have either data or the parameter binary_data_size", field)
        if size is None:
            inputs[tensor.name] = read_tensor({"shape": tensor.shape, "data": tensor.data}, spec, field)
        else:
            inputs[tensor.name] = from_bytes(rest[start : start + size], tensor.shape, spec, field)
            start += size
    if start != len(rest):
        raise InvalidRequest(
            f"{len(rest)} bytes follow the JSON, and the inputs' binary_data_size are {start}", "inputs"
        )
    for spec in specs:
        if spec.name not in inputs and not spec.is_optional:
            raise InvalidRequest(f"the input {spec.name} is missing", "inputs")
    return inputs


def _answer(request: Infer, found: Arrays) -> Response:
    parts = {
        spec.name: to_bytes(found[spec.name], spec.datatype) for spec in request.outputs if spec.name in request.binary
    }
    answer = InferAnswer(
        model_name=request.model.name,
        model_version=str(request.model.version),
        id=request.request_id,
        outputs=[_output(spec, found[spec.name], parts.get(spec.name)) for spec in request.outputs],
    )
    text = answer.model_dump_json(exclude_unset=True).encode()
    if not parts:
        return Response(text, media_type="application/json")
    content = b"".join([text, *parts.values()])
    headers = {"Inference-Header-Content-Length": str(len(text))}
    return Response(content, media_type="application/octet-stream", headers=headers)


def _output(spec: TensorSpec, array: Array, content: bytes | None) -> InferTensor:
    shape = list(array.shape)
    if content is not None:
        parameters = InputParameters(binary_data_size=len(content))
        return InferTensor(name=spec.name, datatype=spec.datatype, shape=shape, parameters=parameters)
    return InferTensor(name=spec.name, datatype=spec.datatype, shape=shape, data=to_list(array, spec.datatype))
