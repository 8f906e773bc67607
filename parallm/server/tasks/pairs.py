"""Pairs of texts as rows of token ids, and the score of each: of a model that reads both, or a cosine of vectors."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from starlette.requests import Request

from parallm.errors import InvalidRequest
from parallm.server.connection import while_connected
from parallm.server.request_limits import SECONDS_PER_BYTE, check_text
from parallm.server.service import Service
from parallm.server.tasks.texts import Chosen, Cut, bounded, choose, prompt_of, read_rows
from parallm.types import EncodeRequest

MAX_CHARACTERS = 32 * 1024 * 1024
"""A query is encoded with each of its documents."""
DOCUMENT_PROMPTS = ("document", "passage", "corpus")
"""Names of prompts for documents, as sentence-transformers looks for them; that of queries is `query`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """Texts to compare: each query with its documents."""

    queries: Sequence[tuple[str, Sequence[str]]]
    instruction: str | None = None
    cut: Cut = Cut()
    max_document_tokens: int | None = None
    activates: bool = True
    is_search: bool = False
    """Whether vectors of queries and documents get the prompts that the model has for them."""

    @property
    def num_characters(self) -> int:
        """Characters that are encoded."""
        return sum(len(query) * len(texts) + sum(map(len, texts)) for query, texts in self.queries)


def read_pairs(service: Service, chosen: Chosen, pairs: Pairs) -> EncodeRequest:
    """Return the rows of all pairs; of a model that makes vectors those of each query, then of its documents.

    Raises InvalidRequest.
    """
    if pairs.num_characters > MAX_CHARACTERS:
        raise InvalidRequest(
            f"the query and its documents have {pairs.num_characters} characters together, the query counted for each "
            f"document; the limit is {MAX_CHARACTERS}, send fewer documents at once",
            "documents",
        )
    if chosen.spec.task == "embed":
        return _texts_of_pairs(service, chosen, pairs)
    limit, cuts = pairs.cut.limit(service.engine.max_context), pairs.cut.tokens is not None
    if pairs.cut.side != "right":
        raise InvalidRequest("the end of a document is what can be cut: send truncation_side=right", "truncation_side")
    rows: list[tuple[int, ...]] = []
    first_lengths: list[int] = []
    is_cut = cuts or pairs.max_document_tokens is not None
    for query, documents in pairs.queries:
        check_text(query, "query", service.tokenizer, service.engine.max_context)
        encoded = chosen.encoder.encode_pairs(
            chosen.spec,
            query,
            [bounded(service, text, "documents", cuts=is_cut) for text in documents],
            instruction=pairs.instruction,
            limit=limit,
            document_limit=pairs.max_document_tokens,
            cuts=cuts,
        )
        rows += [row for row, _ in encoded]
        first_lengths += [first for _, first in encoded]
    return EncodeRequest(
        model=chosen.model, rows=tuple(rows), first_lengths=tuple(first_lengths), activates=pairs.activates
    )


def _texts_of_pairs(service: Service, chosen: Chosen, pairs: Pairs) -> EncodeRequest:
    for name, value in (("instruction", pairs.instruction), ("max_tokens_per_doc", pairs.max_document_tokens)):
        if value is not None:
            raise InvalidRequest(f"{chosen.model} compares vectors of texts, which have no {name}; leave it out", name)
    first = second = prompt_of(chosen, None)
    if pairs.is_search:
        prompts = chosen.spec.prompts
        first = prompts.get("query", first)
        second = next((prompts[name] for name in DOCUMENT_PROMPTS if name in prompts), second)
    rows: tuple[tuple[int, ...], ...] = ()
    for query, documents in pairs.queries:
        rows += read_rows(service, chosen, [query], pairs.cut, prompt=first, field="query")
        rows += read_rows(service, chosen, documents, pairs.cut, prompt=second, field="documents")
    return EncodeRequest(model=chosen.model, rows=rows)


async def scored(service: Service, http: Request, model: str | None, pairs: Pairs) -> tuple[EncodeRequest, list[float]]:
    """Return the rows and the score of each pair, in their order. Raises InvalidRequest and what `choose` raises."""
    chosen = choose(service, model, "score", "embed")
    read = partial(read_pairs, service, chosen, pairs)
    request = await service.workers.run_if_long(read, seconds=pairs.num_characters * SECONDS_PER_BYTE)
    numbers_ND = await while_connected(http.receive, chosen.encoder.encode(request))
    return request, _scores(chosen, pairs, numbers_ND)


def _scores(chosen: Chosen, pairs: Pairs, numbers_ND: np.ndarray) -> list[float]:
    if chosen.spec.task == "score":
        scores: list[float] = numbers_ND[:, 0].tolist()
        return scores
    lengths_N = np.linalg.norm(numbers_ND.astype(np.float64), axis=1, keepdims=True)
    unit_ND = numbers_ND / np.maximum(lengths_N, 1e-12)
    cosines: list[float] = []
    start = 0
    for _, documents in pairs.queries:
        end = start + 1 + len(documents)
        cosines += (unit_ND[start + 1 : end] * unit_ND[start]).sum(axis=1).tolist()
        start = end
    return cosines
