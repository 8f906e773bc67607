"""Text Embeddings Inference's dialect: `/embed`, `/predict`, `/similarity`, `/info`, and `/rerank` with `texts`.

Wire types and routes. Without `model` the base is asked. Errors have TEI's form and its statuses.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
from fastapi import APIRouter
from pydantic import BeforeValidator, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from parallm import __version__
from parallm.errors import InvalidRequest, ParallmError
from parallm.server.connection import received, while_connected
from parallm.server.failures import failure_of
from parallm.server.schemas import ModelName, Wire, checked, read_object
from parallm.server.service import Service
from parallm.server.tasks.pairs import Pairs, read_pairs, scored
from parallm.server.tasks.texts import (
    MAX_INPUTS,
    Chosen,
    Cut,
    Inputs,
    Texts,
    choose,
    labels_of,
    prompt_of,
    read_rows,
)
from parallm.types import BASE, EncodeRequest

Text = Annotated[str, Field(min_length=1)]
OneOrTwo: TypeAlias = list[str]
"""A text, or a pair of texts."""


def read_sequences(value: object) -> object:
    """Return a text, a pair, or a list of lists of one or two texts as such a list."""
    if isinstance(value, str):
        return [[value]]
    return [value] if isinstance(value, list) and all(isinstance(item, str) for item in value) else value


class TeiBody(Wire):
    model: ModelName | None = None
    truncate: bool | None = None
    """Whether texts that are too long are cut; else they are refused."""
    truncation_direction: Literal["Left", "Right", "left", "right"] = "Right"

    @property
    def cut(self) -> Cut:
        is_left = self.truncation_direction.lower() == "left"
        return Cut(tokens=-1 if self.truncate else None, side="left" if is_left else "right")


class TeiEmbedBody(TeiBody):
    inputs: Inputs
    normalize: bool | None = None
    """False leaves vectors as long as they are; absent: true."""
    prompt_name: str | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None


class TeiPredictBody(TeiBody):
    inputs: Annotated[
        list[Annotated[list[Text], Field(min_length=1, max_length=2)]],
        Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True),
        BeforeValidator(read_sequences, json_schema_input_type=str | list[str] | list[list[str]]),
    ]
    raw_scores: bool = False


class TeiRerankBody(TeiBody):
    query: Text
    texts: Texts
    raw_scores: bool = False
    return_text: bool = False


class TeiSentences(Wire):
    source_sentence: Text
    sentences: Texts


class TeiSimilarityBody(TeiBody):
    inputs: TeiSentences
    parameters: Mapping[str, Any] | None = None


class TeiError(Wire):
    error: str
    error_type: str


ERROR_TYPES: Mapping[int, tuple[int, str]] = {422: (424, "Backend"), 429: (429, "Overloaded"), 503: (503, "Unhealthy")}
"""TEI's status and name of an error, by ours; others are mistakes in the request, or stay as they are from 500 on."""


def is_tei(value: Mapping[str, Any]) -> bool:
    """Return whether a body of `/rerank` is TEI's."""
    return "texts" in value


def tei_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/embed")
    async def embed(http: Request) -> Response:
        """Make a vector of each text, in TEI's form: a list of lists of numbers."""
        return await _answered(partial(_embed, service, http))

    @router.post("/predict")
    async def predict(http: Request) -> Response:
        """Find the labels of texts, or of pairs of texts, in TEI's form."""
        return await _answered(partial(_predict, service, http))

    @router.post("/similarity")
    async def similarity(http: Request) -> Response:
        """Compare a sentence with others, in TEI's form: a list of numbers."""
        return await _answered(partial(_similarity, service, http))

    @router.get("/info")
    async def info() -> Response:
        """Tell what the base makes of texts, in TEI's form."""
        return JSONResponse(_info(service))

    return router


async def tei_rerank(service: Service, http: Request, value: dict[str, Any]) -> Response:
    """Answer `POST /rerank` in TEI's form."""

    async def answer() -> Any:
        body = checked(value, TeiRerankBody)
        pairs = Pairs(queries=[(body.query, body.texts)], cut=body.cut, activates=not body.raw_scores, is_search=True)
        _, scores = await scored(service, http, body.model, pairs)
        order = sorted(range(len(scores)), key=lambda index: -scores[index])
        return [
            {"index": index, "score": scores[index]} | ({"text": body.texts[index]} if body.return_text else {})
            for index in order
        ]

    return await _answered(answer)


async def _answered(answer: Callable[[], Awaitable[Any]]) -> Response:
    """Return the answer as JSON, or an error as TEI words it."""
    try:
        return JSONResponse(await answer())
    except ParallmError as error:
        failure = failure_of(error)
        usual = (422, "Validation") if failure.status < 500 else (failure.status, "Backend")
        status, kind = ERROR_TYPES.get(failure.status, usual)
        body = TeiError(error=failure.message, error_type=kind)
        return JSONResponse(body.model_dump(), status, headers=dict(failure.headers))


async def _embed(service: Service, http: Request) -> Any:
    def read(text: bytes) -> tuple[Chosen, EncodeRequest]:
        body = checked(read_object(text), TeiEmbedBody)
        chosen = choose(service, body.model, "embed")
        rows = read_rows(
            service, chosen, body.inputs, body.cut, prompt=prompt_of(chosen, body.prompt_name), field="inputs"
        )
        activates = body.normalize is not False
        return chosen, EncodeRequest(model=chosen.model, rows=rows, dimensions=body.dimensions, activates=activates)

    chosen, request = await received(service, http, read)
    vectors_ND = await while_connected(http.receive, chosen.encoder.encode(request))
    return vectors_ND.tolist()


async def _predict(service: Service, http: Request) -> Any:
    def read(text: bytes) -> tuple[TeiPredictBody, bool, Chosen, EncodeRequest]:
        value = read_object(text)
        body = checked(value, TeiPredictBody)
        chosen = choose(service, body.model, "classify", "score")
        is_batch = isinstance(value["inputs"], list) and isinstance(value["inputs"][0], list)
        return body, is_batch, chosen, _sequences(service, chosen, body)

    _, is_batch, chosen, request = await received(service, http, read)
    numbers_NL = await while_connected(http.receive, chosen.encoder.encode(request))
    found = [_ranked(chosen, row_L) for row_L in numbers_NL]
    return found if is_batch else found[0]


def _sequences(service: Service, chosen: Chosen, body: TeiPredictBody) -> EncodeRequest:
    activates = not body.raw_scores
    if all(len(texts) == 1 for texts in body.inputs):
        texts: Sequence[str] = [text for (text,) in body.inputs]
        rows = read_rows(service, chosen, texts, body.cut, field="inputs")
        return EncodeRequest(model=chosen.model, rows=rows, activates=activates)
    if any(len(texts) == 1 for texts in body.inputs):
        raise InvalidRequest("send either texts or pairs of texts, not both", "inputs")
    pairs = Pairs(queries=[(first, [second]) for first, second in body.inputs], cut=body.cut, activates=activates)
    return read_pairs(service, chosen, pairs)


def _ranked(chosen: Chosen, row_L: np.ndarray) -> list[dict[str, Any]]:
    labels = labels_of(chosen, len(row_L))
    pairs = sorted(zip(labels, row_L.tolist(), strict=True), key=lambda pair: -pair[1])
    return [{"score": score, "label": label} for label, score in pairs]


async def _similarity(service: Service, http: Request) -> Any:
    body = await received(service, http, lambda text: checked(read_object(text), TeiSimilarityBody))
    if body.parameters:
        raise InvalidRequest(f"parameters are not known here: {', '.join(body.parameters)[:100]}", "parameters")
    pairs = Pairs(queries=[(body.inputs.source_sentence, body.inputs.sentences)], cut=body.cut)
    _, scores = await scored(service, http, body.model, pairs)
    return scores


def _info(service: Service) -> dict[str, Any]:
    spec = choose(service, BASE, "embed", "score", "classify").spec
    labels = {str(index): label for index, label in enumerate(spec.labels)}
    of_head = {"id2label": labels, "label2id": {label: int(index) for index, label in labels.items()}}
    kinds: Mapping[str, dict[str, Any]] = {
        "embed": {"embedding": {"pooling": "+".join(spec.pooling)}},
        "score": {"reranker": of_head},
        "classify": {"classifier": of_head},
    }
    return {
        "model_id": service.base_name,
        "model_type": kinds[spec.task],
        "max_input_length": service.engine.max_context,
        "max_client_batch_size": MAX_INPUTS,
        "auto_truncate": False,
        "version": __version__,
    }
