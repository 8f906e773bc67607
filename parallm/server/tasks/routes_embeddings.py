"""`POST /v1/embeddings`: texts, token ids or chats become vectors. Wire types and the route."""

import base64
import time
import uuid
from functools import partial
from typing import Annotated, Literal

import numpy as np
from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from parallm.errors import InvalidRequest
from parallm.server.connection import json_response, received, while_connected
from parallm.server.schemas import ModelName, Wire, parse_body
from parallm.server.service import Service
from parallm.server.tasks.texts import (
    Chats,
    Chosen,
    Cut,
    Inputs,
    Side,
    Usage,
    choose,
    prompt_of,
    read_chats,
    read_rows,
    usage_of,
)
from parallm.types import EncodeRequest

SECONDS_PER_NUMBER = 3e-7
"""Time to write a number of a vector as JSON."""


class EmbeddingBody(Wire):
    model: ModelName
    input: Inputs | None = None
    messages: Chats | None = None
    """A chat, or a list of chats, in place of `input`: of each the text that the chat template writes, up to the end of
    its last message."""
    dimensions: Annotated[int, Field(ge=0)] | None = None
    """Numbers that are kept of each vector, for models that were trained for it; 0: all, where `modality` is given."""
    encoding_format: Literal["float", "base64"] = "float"
    """`base64`: little-endian float32."""
    prompt_name: str | None = None
    """Prompt of the model's folder to put before each text, such as `query`; absent: the folder's default."""
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    """Tokens that are kept of each input, -1 for the model's context; absent: an input that is too long is refused."""
    truncation_side: Side = "right"
    use_activation: bool = True
    """False leaves vectors as long as they are, where the model makes them of length 1."""
    modality: Literal["text"] | None = None
    """Sent by Infinity's client."""
    user: str | None = None
    """Changes no answer."""


class EmbeddingEntry(Wire):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingAnswer(Wire):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[EmbeddingEntry]
    usage: Usage


def embedding_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/embeddings")
    @router.post("/embeddings")
    async def embeddings(http: Request) -> Response:
        """Make a vector of each text, by the base or an adapter."""
        body, chosen, request = await received(service, http, partial(_parse, service))
        vectors_ND = await while_connected(http.receive, chosen.encoder.encode(request))
        seconds = 0.0 if body.encoding_format == "base64" else vectors_ND.size * SECONDS_PER_NUMBER
        return await service.workers.run_if_long(partial(_answer, body, request, vectors_ND), seconds=seconds)

    return router


def _parse(service: Service, text: bytes) -> tuple[EmbeddingBody, Chosen, EncodeRequest]:
    """Raises InvalidRequest, UnknownModel, Unavailable."""
    body = parse_body(text, EmbeddingBody)
    if body.dimensions == 0 and body.modality is None:
        raise InvalidRequest("dimensions should be greater than 0; leave it out for all", "dimensions")
    chosen = choose(service, body.model, "embed")
    cut = Cut(tokens=body.truncate_prompt_tokens, side=body.truncation_side)
    if (body.input is None) == (body.messages is None):
        raise InvalidRequest("send either input or messages", "input")
    if body.messages is not None:
        if body.prompt_name is not None:
            raise InvalidRequest("a prompt is put before texts, and messages are a chat; leave it out", "prompt_name")
        rows = read_chats(service, chosen, body.messages, cut)
    else:
        rows = read_rows(service, chosen, body.input or (), cut, prompt=prompt_of(chosen, body.prompt_name))
    request = EncodeRequest(
        model=chosen.model, rows=rows, dimensions=body.dimensions or None, activates=body.use_activation
    )
    return body, chosen, request


def _answer(body: EmbeddingBody, request: EncodeRequest, vectors_ND: np.ndarray) -> Response:
    written = (
        [as_base64(vector_D) for vector_D in vectors_ND] if body.encoding_format == "base64" else vectors_ND.tolist()
    )
    return json_response(
        EmbeddingAnswer(
            id=f"embd-{uuid.uuid4().hex}",
            object="list",
            created=int(time.time()),
            model=request.model,
            data=[
                EmbeddingEntry(object="embedding", index=index, embedding=item) for index, item in enumerate(written)
            ],
            usage=usage_of(request),
        )
    )


def as_base64(vector_D: np.ndarray) -> str:
    """Return the bytes of little-endian float32."""
    return base64.b64encode(vector_D.astype("<f4").tobytes()).decode()
