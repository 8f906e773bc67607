"""`POST /rerank` in the forms of vLLM, Jina, Cohere and Infinity, and `POST /score`: wire types and routes.

Bodies with `texts` are TEI's (`dialects/tei.py`). A model that makes vectors is asked for their cosines.
"""

import time
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from parallm.errors import InvalidRequest
from parallm.server.connection import json_response, received
from parallm.server.dialects.tei import is_tei, tei_rerank
from parallm.server.schemas import ModelName, Wire, checked, read_object
from parallm.server.service import Service
from parallm.server.tasks.pairs import Pairs, scored
from parallm.server.tasks.texts import Cut, Side, Texts, Usage, usage_of
from parallm.types import EncodeRequest

COHERE = "/v2/rerank"
"""Its answers have no documents, unless asked for."""


class RerankBody(Wire):
    model: ModelName
    query: Annotated[str, Field(min_length=1)]
    documents: Texts
    """Texts, or objects `{"text": ...}`."""
    top_n: Annotated[int, Field(ge=0)] | None = None
    """Documents in the answer; 0 or absent: all."""
    return_documents: bool | None = None
    """Whether the answer has the documents; absent: yes, but not at `/v2/rerank`."""
    instruction: str | None = None
    """What the model should look for, where its text of a pair has a place for it."""
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    """Tokens of a query with its document, -1 for the model's context: longer documents are cut."""
    truncation_side: Side = "right"
    max_tokens_per_doc: Annotated[int, Field(ge=1)] | None = None
    """Tokens that are kept of each document."""
    use_activation: bool = True
    """False answers with logits."""
    raw_scores: bool | None = None
    """True answers with logits; where it is sent, documents come back as plain texts, as Infinity has them."""
    rank_fields: list[Literal["text"]] | None = None
    relevant_spans: Literal[False] | None = None
    priority: int | None = None
    """Changes no answer."""
    user: str | None = None
    """Changes no answer."""


class RankedText(Wire):
    text: str


class RankedEntry(Wire):
    index: int
    document: RankedText | str | None = None
    relevance_score: float


class ApiVersion(Wire):
    version: str


class BilledUnits(Wire):
    search_units: int


class RerankMeta(Wire):
    api_version: ApiVersion
    billed_units: BilledUnits


class RerankAnswer(Wire):
    id: str
    object: Literal["rerank"]
    created: int
    model: str
    results: list[RankedEntry]
    usage: Usage
    meta: RerankMeta


class ScoreBody(Wire):
    """Pairs: `queries` with `documents` or `items`, `data_1` with `data_2`, or `text_1` with `text_2`.

    One text is compared with many, or each with that of the same number.
    """

    model: ModelName
    queries: Texts | None = None
    documents: Texts | None = None
    items: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None
    text_1: Texts | None = None
    text_2: Texts | None = None
    instruction: str | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    truncation_side: Side = "right"
    max_tokens_per_doc: Annotated[int, Field(ge=1)] | None = None
    use_activation: bool = True
    user: str | None = None
    """Changes no answer."""


class ScoreEntry(Wire):
    index: int
    object: Literal["score"]
    score: float


class ScoreAnswer(Wire):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ScoreEntry]
    usage: Usage


SIDES = (("queries", "documents"), ("queries", "items"), ("data_1", "data_2"), ("text_1", "text_2"))


def rank_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/rerank")
    @router.post("/v1/rerank")
    @router.post("/v2/rerank")
    async def rerank(http: Request) -> Response:
        """Sort documents by how well they fit a query."""
        body = await received(service, http, _read_ranking)
        if not isinstance(body, RerankBody):
            return await tei_rerank(service, http, body)
        request, scores = await scored(service, http, body.model, _pairs(body))
        return json_response(_ranking(body, request, scores, path=http.url.path))

    @router.post("/score")
    @router.post("/v1/score")
    async def score(http: Request) -> Response:
        """Score pairs of texts."""
        body = await received(service, http, lambda text: checked(read_object(text), ScoreBody))
        request, scores = await scored(service, http, body.model, _score_pairs(body))
        return json_response(
            ScoreAnswer(
                id=f"score-{uuid.uuid4().hex}",
                object="list",
                created=int(time.time()),
                model=request.model,
                data=[ScoreEntry(index=index, object="score", score=value) for index, value in enumerate(scores)],
                usage=usage_of(request),
            )
        )

    return router


def _read_ranking(text: bytes) -> RerankBody | dict[str, Any]:
    """Return the body, or the object of TEI's, whose mistakes are answered in TEI's form. Raises InvalidRequest."""
    value = read_object(text)
    return value if is_tei(value) else checked(value, RerankBody)


def _pairs(body: RerankBody) -> Pairs:
    return Pairs(
        queries=[(body.query, body.documents)],
        instruction=body.instruction,
        cut=Cut(tokens=body.truncate_prompt_tokens, side=body.truncation_side),
        max_document_tokens=body.max_tokens_per_doc,
        activates=body.use_activation and not body.raw_scores,
        is_search=True,
    )


def _ranking(body: RerankBody, request: EncodeRequest, scores: Sequence[float], *, path: str) -> RerankAnswer:
    shows = path != COHERE if body.return_documents is None else body.return_documents
    order = sorted(range(len(scores)), key=lambda index: -scores[index])  # ties stay in their order
    results = []
    for index in order[: body.top_n or None]:
        text = body.documents[index]
        document = {} if not shows else {"document": RankedText(text=text) if body.raw_scores is None else text}
        results.append(RankedEntry(index=index, relevance_score=scores[index], **document))
    return RerankAnswer(
        id=f"rerank-{uuid.uuid4().hex}",
        object="rerank",
        created=int(time.time()),
        model=request.model,
        results=results,
        usage=usage_of(request),
        meta=RerankMeta(
            api_version=ApiVersion(version="1" if path != COHERE else "2"), billed_units=BilledUnits(search_units=1)
        ),
    )


def _score_pairs(body: ScoreBody) -> Pairs:
    """Raises InvalidRequest for sides that make no pairs."""
    given = {name for side in SIDES for name in side if getattr(body, name) is not None}
    names = next((side for side in SIDES if given == set(side)), None)
    if names is None:
        words = ", ".join(f"{first} and {second}" for first, second in SIDES)
        raise InvalidRequest(f"send one of {words}", min(given, default="queries"))
    first, second = (getattr(body, name) for name in names)
    if len(first) == 1:
        queries = [(first[0], second)]
    elif len(second) in (1, len(first)):
        queries = [(text, [other]) for text, other in zip(first, second * (len(first) // len(second)), strict=True)]
    else:
        raise InvalidRequest(
            f"{names[0]} has {len(first)} texts and {names[1]} {len(second)}; send one with many, or as many of both",
            names[1],
        )
    return Pairs(
        queries=queries,
        instruction=body.instruction,
        cut=Cut(tokens=body.truncate_prompt_tokens, side=body.truncation_side),
        max_document_tokens=body.max_tokens_per_doc,
        activates=body.use_activation,
    )
