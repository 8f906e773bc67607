"""`POST /classify` in the forms of vLLM and Infinity, and `POST /pooling`: wire types and routes."""

import time
import uuid
from collections.abc import Sequence
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
from parallm.server.tasks.routes_embeddings import SECONDS_PER_NUMBER, as_base64
from parallm.server.tasks.texts import (
    Chosen,
    Cut,
    Inputs,
    Side,
    Usage,
    choose,
    labels_of,
    prompt_of,
    read_rows,
    usage_of,
)
from parallm.types import EncodeRequest

MIN_PROBABILITY = 0.5
"""Labels of a text that may have several are those of at least this probability."""


class ClassifyBody(Wire):
    model: ModelName
    input: Inputs
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    """Tokens that are kept of each input, -1 for the model's context; absent: an input that is too long is refused."""
    truncation_side: Side = "right"
    use_activation: bool = True
    """False answers with logits."""
    raw_scores: bool | None = None
    """True answers with logits; where it is sent, the answer has Infinity's form: the labels of each input, sorted."""
    user: str | None = None
    """Changes no answer."""


class ClassifyEntry(Wire):
    index: int
    label: str | None
    """The likeliest label; null where a text may have several."""
    labels: list[str] | None = None
    """All labels of a text that may have several."""
    probs: list[float]
    num_classes: int


class ClassifyAnswer(Wire):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ClassifyEntry]
    usage: Usage


class LabelScore(Wire):
    score: float
    label: str


class InfinityAnswer(Wire):
    """What Infinity's client reads."""

    object: Literal["classify"]
    id: str
    created: int
    model: str
    data: list[list[LabelScore]]
    usage: Usage


class PoolingBody(Wire):
    model: ModelName
    input: Inputs
    task: Literal["embed", "classify", "token_embed"] | None = None
    """What is asked of the model; absent: what it does. `token_embed` gives a vector for each token of a text."""
    dimensions: Annotated[int, Field(ge=1)] | None = None
    encoding_format: Literal["float", "base64"] = "float"
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    truncation_side: Side = "right"
    use_activation: bool = True
    user: str | None = None
    """Changes no answer."""


class PoolingEntry(Wire):
    index: int
    object: Literal["pooling"]
    data: list[float] | list[list[float]] | str
    """The numbers of a text; for `token_embed` a row for each token, in base64 one after the other."""


class PoolingAnswer(Wire):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[PoolingEntry]
    usage: Usage


def classify_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/classify")
    @router.post("/v1/classify")
    @router.post("/v1/classifications")
    async def classify(http: Request) -> Response:
        """Find the label of each text, with the probabilities of all."""
        body, chosen, request = await received(service, http, partial(_parse_classify, service))
        numbers_NL = await while_connected(http.receive, chosen.encoder.encode(request))
        seconds = numbers_NL.size * SECONDS_PER_NUMBER
        write = _infinity if body.raw_scores is not None else _answer
        return await service.workers.run_if_long(partial(write, chosen, request, numbers_NL), seconds=seconds)

    @router.post("/pooling")
    @router.post("/v1/pooling")
    async def pooling(http: Request) -> Response:
        """Compute what the model makes of each text: its vector, those of its tokens, or the numbers of its labels."""
        body, chosen, request = await received(service, http, partial(_parse_pooling, service))
        if body.task == "token_embed":
            work = chosen.encoder.encode_tokens(request, max_bytes=service.settings.max_answer_bytes)
            arrays = await while_connected(http.receive, work)
        else:
            arrays = list(await while_connected(http.receive, chosen.encoder.encode(request)))
        size = sum(array.size for array in arrays)
        seconds = 0.0 if body.encoding_format == "base64" else size * SECONDS_PER_NUMBER
        return await service.workers.run_if_long(partial(_pooled, body, request, arrays), seconds=seconds)

    return router


def _parse_classify(service: Service, text: bytes) -> tuple[ClassifyBody, Chosen, EncodeRequest]:
    """Raises InvalidRequest, UnknownModel, Unavailable."""
    body = parse_body(text, ClassifyBody)
    chosen = choose(service, body.model, "classify", "score")
    if chosen.spec.template:
        raise InvalidRequest(f"{body.model} scores pairs of texts; ask /rerank or /score", "model")
    cut = Cut(tokens=body.truncate_prompt_tokens, side=body.truncation_side)
    rows = read_rows(service, chosen, body.input, cut)
    activates = body.use_activation and not body.raw_scores
    return body, chosen, EncodeRequest(model=chosen.model, rows=rows, activates=activates)


def _parse_pooling(service: Service, text: bytes) -> tuple[PoolingBody, Chosen, EncodeRequest]:
    """Raises InvalidRequest, UnknownModel, Unavailable."""
    body = parse_body(text, PoolingBody)
    tasks: tuple[Literal["embed", "classify", "score"], ...] = ("embed", "classify", "score")
    if body.task is not None:
        tasks = ("classify", "score") if body.task == "classify" else ("embed",)
    chosen = choose(service, body.model, *tasks)
    cut = Cut(tokens=body.truncate_prompt_tokens, side=body.truncation_side)
    prompt = prompt_of(chosen, None) if chosen.spec.task == "embed" else ""
    rows = read_rows(service, chosen, body.input, cut, prompt=prompt)
    request = EncodeRequest(model=chosen.model, rows=rows, dimensions=body.dimensions, activates=body.use_activation)
    return body, chosen, request


def _answer(chosen: Chosen, request: EncodeRequest, numbers_NL: np.ndarray) -> Response:
    labels, has_several = labels_of(chosen, numbers_NL.shape[1]), may_have_several(chosen)
    entries = []
    for index, (row_L, best) in enumerate(zip(numbers_NL, numbers_NL.argmax(axis=1), strict=True)):
        least = MIN_PROBABILITY if request.activates else 0.0  # the logit of one half
        found = [label for label, number in zip(labels, row_L, strict=True) if number >= least]
        named = {"label": None, "labels": found} if has_several else {"label": labels[best]}
        entries.append(ClassifyEntry(index=index, probs=row_L.tolist(), num_classes=len(labels), **named))
    return json_response(
        ClassifyAnswer(
            id=f"classify-{uuid.uuid4().hex}",
            object="list",
            created=int(time.time()),
            model=request.model,
            data=entries,
            usage=usage_of(request),
        )
    )


def _infinity(chosen: Chosen, request: EncodeRequest, numbers_NL: np.ndarray) -> Response:
    return json_response(
        InfinityAnswer(
            object="classify",
            id=f"classify-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=request.model,
            data=[_ranked(chosen, row_L) for row_L in numbers_NL],
            usage=usage_of(request),
        )
    )


def _ranked(chosen: Chosen, row_L: np.ndarray) -> list[LabelScore]:
    """Return the labels of a text, the likeliest first."""
    pairs = zip(labels_of(chosen, len(row_L)), row_L.tolist(), strict=True)
    return [LabelScore(score=score, label=label) for label, score in sorted(pairs, key=lambda pair: -pair[1])]


def may_have_several(chosen: Chosen) -> bool:
    return chosen.spec.task == "classify" and chosen.spec.activation == "sigmoid"


def _pooled(body: PoolingBody, request: EncodeRequest, arrays: Sequence[np.ndarray]) -> Response:
    written = [as_base64(array) if body.encoding_format == "base64" else array.tolist() for array in arrays]
    return json_response(
        PoolingAnswer(
            id=f"pool-{uuid.uuid4().hex}",
            object="list",
            created=int(time.time()),
            model=request.model,
            data=[PoolingEntry(index=index, object="pooling", data=item) for index, item in enumerate(written)],
            usage=usage_of(request),
        )
    )
