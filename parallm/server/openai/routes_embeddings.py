"""`POST /v1/embeddings`: texts or token ids become vectors. Wire types and the route."""

import base64
import time
import uuid
from functools import partial
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
from fastapi import APIRouter
from pydantic import Field, PlainValidator
from starlette.requests import Request
from starlette.responses import Response

from parallm.errors import ContextTooLong, InvalidRequest, Unavailable
from parallm.server.catalog import resolved
from parallm.server.connection import json_response, received, while_connected
from parallm.server.interfaces import Encoder
from parallm.server.request_limits import PIECE, check_text
from parallm.server.schemas import Wire, is_tokens, parse_body
from parallm.server.service import Service
from parallm.types import EncodeRequest, TaskSpec

MAX_INPUTS = 2048
"""Limit of OpenAI's API."""
SECONDS_PER_NUMBER = 3e-7
"""Time to write a number of a vector as JSON."""

Input: TypeAlias = str | list[int]


def read_inputs(value: object) -> list[Input]:
    """Return texts or lists of token ids; one alone may stand without its list."""
    inputs: list[Any] = [value] if isinstance(value, str) or (value and is_tokens(value)) else value  # type: ignore[assignment]
    if not isinstance(inputs, list) or not 0 < len(inputs) <= MAX_INPUTS:
        raise ValueError(f"should be a text, a list of token ids, or a list of 1 to {MAX_INPUTS} of these")
    for index, item in enumerate(inputs):
        if not item or not (isinstance(item, str) or is_tokens(item)):
            raise ValueError(f"should hold texts or lists of token ids, none of them empty; number {index} is neither")
    return inputs


Inputs = Annotated[
    list[Input],
    PlainValidator(read_inputs, json_schema_input_type=str | list[int] | list[str] | list[list[int]]),
]


class EmbeddingBody(Wire):
    model: Annotated[str, Field(min_length=1, max_length=512)]
    input: Inputs
    dimensions: Annotated[int, Field(ge=1)] | None = None
    """Numbers that are kept of each vector, for models that were trained for it."""
    encoding_format: Literal["float", "base64"] = "float"
    """`base64`: little-endian float32."""
    prompt_name: str | None = None
    """Prompt of the model's folder to put before each text, such as `query`; absent: the folder's default."""
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    """Tokens that are kept of each input, -1 for the model's context; absent: an input that is too long is refused."""
    truncation_side: Literal["left", "right"] = "right"
    use_activation: bool = True
    """False leaves vectors as long as they are, where the model makes them of length 1."""
    user: str | None = None
    """Changes no answer."""


class EmbeddingEntry(Wire):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(Wire):
    prompt_tokens: int
    total_tokens: int


class EmbeddingAnswer(Wire):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[EmbeddingEntry]
    usage: EmbeddingUsage


def embedding_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/embeddings")
    @router.post("/embeddings")
    async def embeddings(http: Request) -> Response:
        """Make a vector of each text, by the base or an adapter."""
        body, request = await received(service, http, partial(_parse, service))
        vectors_ND = await while_connected(http.receive, _encoder(service).encode(request))
        seconds = 0.0 if body.encoding_format == "base64" else vectors_ND.size * SECONDS_PER_NUMBER
        return await service.workers.run_if_long(partial(_answer, body, request, vectors_ND), seconds=seconds)

    return router


def _encoder(service: Service) -> Encoder:
    if service.encoder is None:
        raise Unavailable("this process makes no vectors")
    return service.encoder


def _parse(service: Service, text: bytes) -> tuple[EmbeddingBody, EncodeRequest]:
    """Raises InvalidRequest, UnknownModel, Unavailable."""
    body, encoder = parse_body(text, EmbeddingBody), _encoder(service)
    if body.model in service.splits.all():
        raise InvalidRequest(
            f"{body.model} is split between versions, whose vectors cannot be compared; name one of them", "model"
        )
    model = resolved(body.model, service.catalog(), service.policies)
    spec = encoder.spec(model)
    if body.truncate_prompt_tokens == 0:
        raise InvalidRequest("truncate_prompt_tokens should be -1 or above 0; it is 0", "truncate_prompt_tokens")
    prompt = _prompt(body, spec)
    rows = tuple(_row(service, encoder, body, spec, prompt, item) for item in body.input)
    return body, EncodeRequest(model=model, rows=rows, dimensions=body.dimensions, activates=body.use_activation)


def _prompt(body: EmbeddingBody, spec: TaskSpec) -> str:
    name = spec.default_prompt if body.prompt_name is None else body.prompt_name
    if name is not None and name not in spec.prompts:
        known = ", ".join(spec.prompts) or "none"
        raise InvalidRequest(f"no prompt {name[:100]!r} of {body.model}; there are {known}", "prompt_name")
    return "" if name is None else spec.prompts[name]


def _row(
    service: Service, encoder: Encoder, body: EmbeddingBody, spec: TaskSpec, prompt: str, item: Input
) -> tuple[int, ...]:
    """Return the token ids that the model reads. Raises InvalidRequest."""
    end, context, asked = encoder.end_token(spec), service.engine.max_context, body.truncate_prompt_tokens
    if isinstance(item, str):
        tokens = encoder.encode_text(_bounded(service, prompt + item, cuts=asked is not None), spec)
    else:
        tokens = _checked(encoder, prompt, item, end)
    if asked is None and len(tokens) > context:
        raise ContextTooLong(
            f"an input has {len(tokens)} tokens and this model's maximum context length is {context}; shorten it, send "
            "truncate_prompt_tokens=-1",
            "input",
            setting="engine.max_context",
        )
    limit = context if asked in (None, -1) else min(asked, context)
    if len(tokens) <= limit:
        return tokens
    kept = 0 if end is None else 1  # pooling reads the end token
    tokens = tokens[: len(tokens) - kept]
    cut = tokens[: limit - kept] if body.truncation_side == "right" else tokens[len(tokens) - limit + kept :]
    return cut if end is None else (*cut, end)


def _bounded(service: Service, text: str, *, cuts: bool) -> str:
    """Return the text; of one that is cut anyway only what can be kept from either side. Raises ContextTooLong."""
    context = service.engine.max_context
    if not cuts:
        check_text(text, "input", service.tokenizer, context)
        return text
    most = service.tokenizer.max_token_length * context + PIECE
    return text if len(text) <= 2 * most else text[:most] + text[-most:]


def _checked(encoder: Encoder, prompt: str, tokens: list[int], end: int | None) -> tuple[int, ...]:
    """Return given token ids. Raises InvalidRequest for those of another tokenizer, as far as that can be seen."""
    if prompt:
        raise InvalidRequest("a prompt is put before texts, and the input is token ids; send texts", "input")
    if max(tokens) >= encoder.vocabulary_size:
        raise InvalidRequest(
            f"the token id {max(tokens)} is not below this model's {encoder.vocabulary_size}: the ids are those of "
            "another tokenizer; send texts (in LangChain check_embedding_ctx_length=False)",
            "input",
        )
    if end is not None and tokens[-1] != end:
        raise InvalidRequest(
            f"token ids should end with {end}, the end token whose state this model pools; send texts, or ids with it",
            "input",
        )
    return tuple(tokens)


def _answer(body: EmbeddingBody, request: EncodeRequest, vectors_ND: np.ndarray) -> Response:
    num_tokens = sum(map(len, request.rows))
    written = [_bytes(vector_D) for vector_D in vectors_ND] if body.encoding_format == "base64" else vectors_ND.tolist()
    return json_response(
        EmbeddingAnswer(
            id=f"embd-{uuid.uuid4().hex}",
            object="list",
            created=int(time.time()),
            model=request.model,
            data=[
                EmbeddingEntry(object="embedding", index=index, embedding=item) for index, item in enumerate(written)
            ],
            usage=EmbeddingUsage(prompt_tokens=num_tokens, total_tokens=num_tokens),
        )
    )


def _bytes(vector_D: np.ndarray) -> str:
    return base64.b64encode(vector_D.astype("<f4").tobytes()).decode()
