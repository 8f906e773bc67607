"""`POST /api/embed` and its older form `/api/embeddings`: texts become vectors.

Axes: N texts, D numbers of a vector.
"""

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from parallm.errors import ContextTooLong, InvalidRequest, Unavailable, UnknownModel
from parallm.server.connection import json_response, received, while_connected
from parallm.server.ollama.answers import LOAD_SECONDS, NANOSECONDS
from parallm.server.ollama.names import OllamaRoute, own_name
from parallm.server.ollama.options import read_options
from parallm.server.ollama.schemas import (
    OllamaEmbedAnswer,
    OllamaEmbedBody,
    OllamaEmbeddingsAnswer,
    OllamaEmbeddingsBody,
    object_of,
)
from parallm.server.request_limits import SECONDS_PER_BYTE
from parallm.server.schemas import checked
from parallm.server.service import Service
from parallm.server.tasks.routes_embeddings import SECONDS_PER_NUMBER
from parallm.server.tasks.texts import MAX_INPUTS, Chosen, Cut, choose, prompt_of, read_rows
from parallm.types import EncodeRequest


def embed_routes(service: Service) -> APIRouter:
    router = APIRouter(route_class=OllamaRoute)

    @router.post("/api/embed")
    async def embed(http: Request) -> Response:
        """Make a vector of length 1 of each text."""
        came = time.perf_counter()
        body, texts = await received(service, http, _read_embed)
        chosen = _choose(service, body.model)
        if not texts:
            return json_response(OllamaEmbedAnswer(model=body.model, embeddings=[]))
        read = partial(_request, service, chosen, texts, body.options, truncates=body.truncate, activates=True)
        request, vectors_ND = await _encoded(service, http, chosen, texts, read)
        vectors_ND = normalized(vectors_ND[:, : body.dimensions or None])
        loading: float = http.scope.get(LOAD_SECONDS, 0.0)
        durations: dict[str, Any] = {"total_duration": int((time.perf_counter() - came + loading) * NANOSECONDS)}
        if loading:
            durations["load_duration"] = int(loading * NANOSECONDS)

        def answer() -> Response:
            count = sum(map(len, request.rows))
            return json_response(
                OllamaEmbedAnswer(
                    model=body.model, embeddings=vectors_ND.tolist(), prompt_eval_count=count, **durations
                )
            )

        return await service.workers.run_if_long(answer, seconds=vectors_ND.size * SECONDS_PER_NUMBER)

    @router.post("/api/embeddings")
    async def embeddings(http: Request) -> Response:
        """Make a vector of one text, as long as the model gives it."""
        body = await received(service, http, lambda text: checked(object_of(text), OllamaEmbeddingsBody, {}))
        chosen = _choose(service, body.model)
        if not body.prompt:
            return json_response(OllamaEmbeddingsAnswer(embedding=[]))
        texts = [body.prompt]
        read = partial(_request, service, chosen, texts, body.options, truncates=body.truncate, activates=False)
        _, vectors_ND = await _encoded(service, http, chosen, texts, read)
        return json_response(OllamaEmbeddingsAnswer(embedding=vectors_ND[0].tolist()))

    return router


def normalized(vectors_ND: np.ndarray) -> np.ndarray:
    """Return vectors of length 1, float32; zeros stay zeros."""
    lengths_N1 = np.linalg.norm(vectors_ND.astype(np.float64), axis=1, keepdims=True)
    return np.asarray(vectors_ND / np.maximum(lengths_N1, 1e-12), np.float32)


def _read_embed(text: bytes) -> tuple[OllamaEmbedBody, list[str]]:
    """Raises InvalidRequest."""
    body = checked(object_of(text), OllamaEmbedBody, {})
    value = [body.input] if isinstance(body.input, str) and body.input else body.input or []
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise InvalidRequest("invalid input type: input should be a text or a list of texts", "input")
    if len(value) > MAX_INPUTS:
        raise InvalidRequest(f"input has {len(value)} texts, the limit is {MAX_INPUTS}; send several requests", "input")
    if "" in value:
        raise InvalidRequest(f"input should hold no empty text; number {value.index('')} is one", "input")
    return body, value


def _choose(service: Service, name: str) -> Chosen:
    try:
        return choose(service, own_name(service, name), "embed")
    except UnknownModel as error:
        raise UnknownModel(f'model "{name[:200]}" not found, try pulling it first') from error
    except Unavailable as error:
        raise InvalidRequest(f'"{name[:200]}" does not support embedding: {error}', "model") from error


def _request(
    service: Service,
    chosen: Chosen,
    texts: list[str],
    options: Mapping[str, Any],
    *,
    truncates: bool,
    activates: bool,
) -> EncodeRequest:
    """Raises InvalidRequest, ContextTooLong."""
    limit = read_options(options).num_ctx
    rows = read_rows(
        service, chosen, list(texts), Cut(tokens=(limit or -1) if truncates else None), prompt=prompt_of(chosen, None)
    )
    if limit is not None and any(len(row) > limit for row in rows):
        raise ContextTooLong(f"the input length exceeds the context length: options.num_ctx is {limit}", "input")
    return EncodeRequest(model=chosen.model, rows=rows, activates=activates)


async def _encoded(
    service: Service, http: Request, chosen: Chosen, texts: list[str], read: Callable[[], EncodeRequest]
) -> tuple[EncodeRequest, np.ndarray]:
    """Return the rows and their vectors (N, D)."""
    request = await service.workers.run_if_long(read, seconds=sum(map(len, texts)) * SECONDS_PER_BYTE)
    return request, await while_connected(http.receive, chosen.encoder.encode(request))
