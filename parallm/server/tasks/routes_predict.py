"""`POST /v1/predict`: named tensors through a policy net, the base or an adapter. Wire types and the route."""

import uuid
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import Field, PlainValidator
from starlette.requests import Request
from starlette.responses import Response

from parallm.errors import InvalidRequest
from parallm.server.connection import json_response, received, while_connected
from parallm.server.schemas import ModelName, Wire, checked, read_object
from parallm.server.service import Service
from parallm.server.tasks.predictions import TensorModel, check_answer, choose, choose_outputs, predict, prepare
from parallm.server.tasks.tensors import (
    SECONDS_PER_NUMBER,
    Encoding,
    TensorBody,
    read_inputs,
    tensor_of,
    unread,
)
from parallm.tensors import Arrays, TensorSpec


class PredictBody(Wire):
    model: ModelName
    """A policy net, `base`, an adapter, or a version such as `agent@3`."""
    inputs: Annotated[
        Any, PlainValidator(unread, json_schema_input_type=dict[str, TensorBody | list[Any]] | TensorBody | list[Any])
    ]
    """Tensors by name; a single one may stand alone, also as a nested list."""
    outputs: Annotated[list[str], Field(max_length=64, fail_fast=True)] | None = None
    """Names of the tensors to answer; absent: all that the model has."""
    encoding: Encoding = "json"
    """Form of the answer's tensors: numbers, or little-endian bytes in base64."""


class PredictAnswer(Wire):
    id: str
    object: Literal["prediction"]
    model: str
    """The exact version."""
    model_version: str
    outputs: dict[str, TensorBody]


def predict_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/predict")
    async def predict_tensors(http: Request) -> Response:
        """Compute a model's outputs for named tensors."""
        await prepare(service)
        body, model, specs, inputs = await received(service, http, partial(_parse, service))
        outputs = await while_connected(http.receive, predict(model, inputs, specs))
        size = sum(array.size for array in outputs.values())
        seconds = 0.0 if body.encoding == "b64" else size * SECONDS_PER_NUMBER
        return await service.workers.run_if_long(partial(_answer, body, model, specs, outputs), seconds=seconds)

    return router


def _parse(service: Service, text: bytes) -> tuple[PredictBody, TensorModel, tuple[TensorSpec, ...], Arrays]:
    """Raises InvalidRequest, UnknownModel, Unavailable."""
    value = read_object(text)
    if "model_id" in value:
        if "model" in value:
            raise InvalidRequest("model_id is another word for model; send one of them", "model_id")
        value["model"] = value.pop("model_id")
    body = checked(value, PredictBody)
    model = choose(service, body.model)
    specs = choose_outputs(model, body.outputs)
    inputs = read_inputs(body.inputs, model.signature.inputs, "inputs")
    check_answer(service, specs, inputs)
    return body, model, specs, inputs


def _answer(body: PredictBody, model: TensorModel, specs: tuple[TensorSpec, ...], outputs: Arrays) -> Response:
    return json_response(
        PredictAnswer(
            id=f"pred-{uuid.uuid4().hex}",
            object="prediction",
            model=model.model,
            model_version=str(model.version),
            outputs={spec.name: tensor_of(outputs[spec.name], spec.datatype, body.encoding) for spec in specs},
        )
    )
