"""Rerank, score, classify and pooling in all dialects, with an encoder that knows lengths and letters only."""

import base64
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient

from parallm.errors import ContextTooLong, EngineFull, InvalidRequest, NotFinite, UnknownModel
from parallm.server.openapi import DOCUMENTS
from parallm.server.settings import ServerSettings
from parallm.types import EncodeRequest, TaskSpec
from tests.server.conftest import CharacterTokenizer, EchoEngine, card, make_app
from tests.server.test_openapi import TASK_PATHS

EMBED = TaskSpec(pooling=("mean",), prompts={"query": "Q", "passage": "P"}, source="test")
SCORE = TaskSpec(task="score", pooling=("cls",), activation="sigmoid", labels=("fits",), source="test")
CLASSIFY = TaskSpec(
    task="classify", pooling=("cls",), activation="softmax", labels=("short", "long"), normalizes=False, source="test"
)
SEPARATOR = ord("|")


@dataclass
class LetterEncoder:
    """Scores are the shares of a document's letters that its query has; vectors count the letters a and b."""

    found: TaskSpec = SCORE
    refusal: Exception | None = None
    vocabulary_size: int = 1000
    requests: list[EncodeRequest] = field(default_factory=list)
    asked: list[dict[str, Any]] = field(default_factory=list)

    def spec(self, model: str) -> TaskSpec:
        if model not in ("base", "policy@3"):
            raise UnknownModel(f"no model {model}")
        return self.found

    def encode_text(self, text: str, spec: TaskSpec) -> tuple[int, ...]:
        return tuple(map(ord, text))

    def end_token(self, spec: TaskSpec) -> int | None:
        return None

    def frame(self, spec: TaskSpec) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (), ()

    def encode_pairs(
        self, spec: TaskSpec, query: str, documents: Sequence[str], **asked: Any
    ) -> list[tuple[tuple[int, ...], int]]:
        self.asked.append(asked)
        if asked["instruction"] and not spec.template:
            raise InvalidRequest("no place for an instruction", "instruction")
        rows = [tuple(map(ord, f"{query}|{text[: asked['document_limit']]}")) for text in documents]
        if not asked["cuts"] and any(len(row) > asked["limit"] for row in rows):
            raise ContextTooLong("too long; send truncate_prompt_tokens=-1", "documents", setting="engine.max_context")
        return [(row[: asked["limit"]], len(query) + 1) for row in rows]

    async def encode_tokens(self, request: EncodeRequest, *, max_bytes: int) -> list[np.ndarray]:
        assert max_bytes == ServerSettings().max_answer_bytes
        return [np.array([[float(letter), 0.5] for letter in row], np.float32) for row in request.rows]

    async def encode(self, request: EncodeRequest) -> np.ndarray:
        if self.refusal is not None:
            raise self.refusal
        self.requests.append(request)
        return np.array([self._numbers(row, activates=request.activates) for row in request.rows], np.float32)

    def _numbers(self, row: tuple[int, ...], *, activates: bool) -> list[float]:
        if self.found.task == "embed":
            return [float(row.count(ord("a"))), float(row.count(ord("b")))]
        if self.found.task == "classify":
            share = len(row) / 10
            return [1 - share, share] if activates else [-share, share]
        query, document = (
            (row[: row.index(SEPARATOR)], row[row.index(SEPARATOR) + 1 :]) if SEPARATOR in row else ((), row)
        )
        share = sum(letter in query for letter in document) / len(document)
        return [share if activates else 10 * share]


@pytest.fixture
def encoder() -> LetterEncoder:
    return LetterEncoder()


Send = Callable[..., Any]


@pytest.fixture
def send(engine: EchoEngine, tokenizer: CharacterTokenizer, encoder: LetterEncoder) -> Send:
    engine.max_context = 20
    client = TestClient(
        make_app(engine, tokenizer, encoder=encoder, catalog=lambda: (card(3),)), base_url="http://localhost"
    )

    def post(path: str, **body: Any) -> Any:
        return client.request("POST" if body else "GET", path, json=body or None)

    return post


DOCUMENTS_SENT = ["xx", "ab", "ax"]


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank"])
def test_documents_are_sorted_by_their_scores(send: Send, path: str) -> None:
    answer = send(path, model="base", query="ab", documents=DOCUMENTS_SENT).json()
    assert (answer["model"], answer["usage"]) == ("base", {"prompt_tokens": 15, "total_tokens": 15})
    assert answer["results"] == [
        {"index": 1, "relevance_score": 1.0, "document": {"text": "ab"}},
        {"index": 2, "relevance_score": 0.5, "document": {"text": "ax"}},
        {"index": 0, "relevance_score": 0.0, "document": {"text": "xx"}},
    ]


def test_coheres_answer_has_no_documents(send: Send) -> None:
    answer = send("/v2/rerank", model="base", query="ab", documents=DOCUMENTS_SENT, top_n=2, priority=3).json()
    assert [sorted(one) for one in answer["results"]] == [["index", "relevance_score"]] * 2
    assert answer["meta"] == {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}}


def test_infinitys_answer_has_documents_as_texts(send: Send) -> None:
    body = {"model": "base", "query": "ab", "documents": ["ab", "xx"], "return_documents": True, "raw_scores": True}
    assert send("/rerank", **body).json()["results"][0] == {"index": 0, "relevance_score": 10.0, "document": "ab"}
    assert "document" not in send("/rerank", **body | {"return_documents": False}).json()["results"][0]


def test_ties_stay_in_their_order_and_a_large_top_n_is_all(send: Send) -> None:
    results = send("/rerank", model="base", query="a", documents=["x", "y", {"text": "z"}], top_n=9).json()["results"]
    assert [one["index"] for one in results] == [0, 1, 2]
    assert results[2]["document"] == {"text": "z"}


def test_only_documents_are_cut_and_only_if_that_is_asked_for(send: Send, encoder: LetterEncoder) -> None:
    long = {"model": "base", "query": "ab", "documents": ["a" * 40]}
    refused = send("/rerank", **long)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "documents")
    assert send("/rerank", **long, truncate_prompt_tokens=-1).status_code == 200
    assert send("/rerank", **long, truncate_prompt_tokens=9, max_tokens_per_doc=5).status_code == 200
    assert [len(request.rows[0]) for request in encoder.requests] == [20, 8]
    assert encoder.requests[0].first_lengths == (3,)


def test_an_instruction_reaches_the_model_or_is_refused(send: Send, encoder: LetterEncoder) -> None:
    body = {"model": "base", "query": "a", "documents": ["b"], "instruction": "Find."}
    assert send("/rerank", **body).json()["error"]["param"] == "instruction"
    encoder.found = replace(SCORE, template="{instruction} {query} {document}")
    assert send("/rerank", **body).status_code == 200
    assert encoder.asked[-1]["instruction"] == "Find."


def test_a_model_of_vectors_ranks_by_their_cosines(send: Send, encoder: LetterEncoder) -> None:
    encoder.found = EMBED
    results = send("/rerank", model="base", query="ab", documents=["aabb", "a"]).json()["results"]
    assert [one["index"] for one in results] == [0, 1]
    assert [one["relevance_score"] for one in results] == pytest.approx([1.0, 0.5**0.5], abs=1e-6)
    rows = encoder.requests[0].rows
    assert [row[0] for row in rows] == [ord("Q"), ord("P"), ord("P")], "the model's prompts for a search"
    scores = send("/score", model="base", text_1="ab", text_2=["aabb"]).json()["data"]
    assert scores[0]["score"] == pytest.approx(1.0)
    assert encoder.requests[1].rows[0] == (97, 98), "a score has no prompts"


@pytest.mark.parametrize(
    ("sides", "expected"),
    [
        ({"queries": "a", "documents": ["a", "b"]}, [1.0, 0.0]),
        ({"queries": ["a", "b"], "items": ["b", "b"]}, [0.0, 1.0]),
        ({"data_1": ["a", "b"], "data_2": "b"}, [0.0, 1.0]),
        ({"text_1": "a", "text_2": "a"}, [1.0]),
    ],
)
@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_pairs_are_scored_in_their_order(send: Send, path: str, sides: dict[str, Any], expected: list[float]) -> None:
    answer = send(path, model="policy", **sides).json()
    assert [one["score"] for one in answer["data"]] == expected
    assert [one["index"] for one in answer["data"]] == list(range(len(expected)))
    assert answer["model"] == "policy@3"


@pytest.mark.parametrize("path", ["/classify", "/v1/classify", "/v1/classifications"])
def test_labels_come_with_probabilities(send: Send, encoder: LetterEncoder, path: str) -> None:
    encoder.found = CLASSIFY
    (one, other) = send(path, model="base", input=["abcdefg", "a"]).json()["data"]
    assert one == {"index": 0, "label": "long", "probs": pytest.approx([0.3, 0.7]), "num_classes": 2}
    assert other["label"] == "short"
    assert send(path, model="base", input="abc", use_activation=False).json()["data"][0]["probs"][0] < 0


def test_a_text_may_have_several_labels(send: Send, encoder: LetterEncoder) -> None:
    encoder.found = replace(CLASSIFY, activation="sigmoid")
    (entry,) = send("/classify", model="base", input="abcde").json()["data"]
    assert (entry["label"], entry["labels"]) == (None, ["short", "long"])


def test_infinitys_labels_are_sorted(send: Send, encoder: LetterEncoder) -> None:
    encoder.found = CLASSIFY
    answer = send("/classify", model="base", input=["abcdefg"], raw_scores=False).json()
    assert answer["object"] == "classify"
    assert [one["label"] for one in answer["data"][0]] == ["long", "short"]


def test_pooling_gives_what_the_model_makes(send: Send, encoder: LetterEncoder) -> None:
    encoder.found = EMBED
    assert send("/pooling", model="base", input="ab", task="embed").json()["data"][0]["data"] == [1.0, 1.0]
    (entry,) = send("/v1/pooling", model="base", input="ab", encoding_format="base64").json()["data"]
    assert struct.unpack("<2f", base64.b64decode(entry["data"])) == (1.0, 1.0)
    rows = send("/pooling", model="base", input=["ab", "c"], task="token_embed").json()["data"]
    assert [row["data"] for row in rows] == [[[97.0, 0.5], [98.0, 0.5]], [[99.0, 0.5]]]
    (entry,) = send("/pooling", model="base", input="ab", task="token_embed", encoding_format="base64").json()["data"]
    assert struct.unpack("<4f", base64.b64decode(entry["data"])) == (97.0, 0.5, 98.0, 0.5)
    encoder.found = CLASSIFY
    assert send("/pooling", model="base", input="abc", task="token_embed").status_code == 400
    assert send("/pooling", model="base", input="abc", task="classify").json()["data"][0]["data"] == pytest.approx(
        [0.7, 0.3]
    )


def test_an_adapter_with_a_head_scores_completions(
    engine: EchoEngine, tokenizer: CharacterTokenizer, encoder: LetterEncoder
) -> None:
    cards = (replace(card(3), task=SCORE), replace(card(2), name="poet", is_served=False))
    app = make_app(engine, tokenizer, encoder=encoder, catalog=lambda: cards)
    client = TestClient(app, base_url="http://localhost")
    body = {"prompt": "ab|", "completions": ["a", "x"]}
    for given in (body, body | {"model": "policy"}):
        answer = client.post("/v1/rewards/score", json=given).json()
        assert [one["score"] for one in answer["data"]] == [5.0, 0.0], "logits of two letters, the end among them"
        assert not encoder.requests[-1].activates
    assert client.post("/v1/rewards/score", json=body | {"model": "nobody"}).status_code == 404
    of_base = TestClient(make_app(engine, tokenizer, encoder=encoder), base_url="http://localhost")
    assert of_base.post("/v1/rewards/score", json=body).json()["model"] == "base"
    encoder.found = replace(SCORE, template="{query}{document}")
    assert "/rerank" in client.post("/v1/rewards/score", json=body).json()["error"]["message"]


def test_teis_forms(send: Send, encoder: LetterEncoder) -> None:
    answer = send("/rerank", query="ab", texts=["x", "ab"], return_text=True, raw_scores=False, truncate=True)
    assert answer.json() == [{"index": 1, "score": 1.0, "text": "ab"}, {"index": 0, "score": 0.0, "text": "x"}]
    assert send("/predict", inputs=["ab", "ab"]).json() == [{"score": 1.0, "label": "fits"}]
    assert send("/predict", inputs=[["ab", "ab"], ["a", "b"]]).json()[1] == [{"score": 0.0, "label": "fits"}]
    assert send("/info").json()["model_type"] == {"reranker": {"id2label": {"0": "fits"}, "label2id": {"fits": 0}}}
    encoder.found = CLASSIFY
    assert [one["label"] for one in send("/predict", inputs="abcdefg").json()] == ["long", "short"]
    encoder.found = EMBED
    assert send("/embed", inputs=["ab", "a"], normalize=False).json() == [[1.0, 1.0], [1.0, 0.0]]
    assert not encoder.requests[-1].activates
    assert send("/embed", inputs="b" * 40 + "a", truncate=True, truncation_direction="Left").json() == [[1.0, 19.0]]
    sentences = {"source_sentence": "ab", "sentences": ["aabb", "a"]}
    assert send("/similarity", inputs=sentences).json() == pytest.approx([1.0, 0.5**0.5])


@pytest.mark.parametrize(
    ("refusal", "status", "kind"),
    [
        (InvalidRequest("no"), 422, "Validation"),
        (NotFinite("no"), 424, "Backend"),
        (EngineFull("no"), 429, "Overloaded"),
    ],
)
def test_teis_errors(send: Send, encoder: LetterEncoder, refusal: Exception, status: int, kind: str) -> None:
    encoder.refusal = refusal
    answer = send("/predict", inputs=["a", "b"])
    assert (answer.status_code, answer.json()) == (status, {"error": "no", "error_type": kind})


@pytest.mark.parametrize(
    ("spec", "path", "body", "parameter", "named"),
    [
        (SCORE, "/rerank", {"query": "", "documents": ["b"]}, "query", "at least 1"),
        (SCORE, "/rerank", {"query": "a", "documents": []}, "documents", "1 to 2048"),
        (SCORE, "/rerank", {"query": "a", "documents": ["a", 5]}, "documents", "number 1"),
        (SCORE, "/rerank", {"query": "a", "documents": ["a"], "rank_fields": ["title"]}, "rank_fields.0", "text"),
        (SCORE, "/rerank", {"query": "a", "documents": ["b"], "truncation_side": "left"}, "truncation_side", "right"),
        (SCORE, "/rerank", {"query": "a", "documents": ["b"], "truncate_prompt_tokens": 0}, "truncate_prompt", "-1"),
        (SCORE, "/rerank", {"query": "a", "documents": ["b"], "extra": 1}, "extra", "unknown"),
        (SCORE, "/rerank", {"query": "a" * 500, "documents": ["b"]}, "query", "context"),
        (SCORE, "/score", {"queries": "a"}, "queries", "queries and documents"),
        (SCORE, "/score", {"queries": "a", "data_2": "b"}, "data_2", "data_1 and data_2"),
        (SCORE, "/score", {"queries": ["a", "b"], "documents": ["a", "b", "c"]}, "documents", "as many of both"),
        (SCORE, "/v1/embeddings", {"input": "a"}, "model", "/rerank or /score"),
        (SCORE, "/pooling", {"input": "a", "task": "embed"}, "model", "/rerank or /score"),
        (EMBED, "/classify", {"input": "a"}, "model", "/v1/embeddings"),
        (CLASSIFY, "/rerank", {"query": "a", "documents": ["b"]}, "model", "/classify"),
        (EMBED, "/rerank", {"query": "a", "documents": ["b"], "instruction": "i"}, "instruction", "vectors"),
        (EMBED, "/pooling", {"input": "a", "task": "token_classify"}, "task", "token_embed"),
        (CLASSIFY, "/classify", {"input": [1000]}, "input", "check_embedding_ctx_length=False"),
        (replace(SCORE, template="{query}{document}"), "/classify", {"input": "a"}, "model", "/rerank"),
    ],
)
def test_what_does_not_fit_is_refused_and_the_error_says_what_does(
    send: Send, encoder: LetterEncoder, spec: TaskSpec, path: str, body: dict[str, Any], parameter: str, named: str
) -> None:
    encoder.found = spec
    answer = send(path, model="base", **body)
    error = answer.json()["error"]
    assert answer.status_code == 400, error
    assert error["param"].startswith(parameter), error
    assert named in error["message"]


def test_a_query_that_is_encoded_too_often_is_refused(send: Send, engine: EchoEngine) -> None:
    engine.max_context = 1_000_000
    answer = send("/rerank", model="base", query="a" * 20_000, documents=["b"] * 2000)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "documents")
    assert "fewer documents" in answer.json()["error"]["message"]


def test_an_unknown_model_is_404_in_all_forms_but_teis(send: Send) -> None:
    assert send("/rerank", model="nobody", query="a", documents=["b"]).status_code == 404
    assert send("/rerank", model="nobody", query="a", texts=["b"]).json()["error_type"] == "Validation"


@pytest.mark.parametrize("path", TASK_PATHS)
def test_every_example_of_the_document_is_answered(send: Send, encoder: LetterEncoder, path: str) -> None:
    row = DOCUMENTS[f"POST {path}"]
    embeds = "embed" in path or path in ("/similarity", "/pooling", "/v1/pooling")
    encoder.found = EMBED if embeds else CLASSIFY if "classif" in path else SCORE
    for body in (row.example, *row.more_examples.values()):
        answer = send(path, **dict(body or {}))
        assert answer.status_code == 200, answer.text
