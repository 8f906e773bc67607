"""`POST /v1/embeddings`, with an encoder whose vectors are the length, the first and the last token of a row."""

import base64
import struct
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient

from parallm.conversation import ChatPrompt
from parallm.errors import NotFinite, Unavailable, UnknownModel
from parallm.types import EncodeRequest, TaskSpec
from tests.server.conftest import CharacterTokenizer, EchoEngine, card, make_app

END = 999
SPEC = TaskSpec(pooling=("mean",), prompts={"query": "Q:", "plain": ""}, source="test")
CARDS = (card(3), card(2, "best"))


@dataclass
class LengthEncoder:
    found: TaskSpec = SPEC
    end: int | None = None
    """Token that ends every text."""
    begin: tuple[int, ...] = ()
    """Tokens before every text."""
    refusal: Exception | None = None
    vocabulary_size: int = 1000
    requests: list[EncodeRequest] = field(default_factory=list)

    def spec(self, model: str) -> TaskSpec:
        if model not in ("base", "policy@2", "policy@3"):
            raise UnknownModel(f"no model {model}")
        return self.found

    def encode_text(self, text: str, spec: TaskSpec) -> tuple[int, ...]:
        before, after = self.frame(spec)
        return (*before, *map(ord, text), *after)

    def frame(self, spec: TaskSpec) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.begin, () if self.end is None else (self.end,)

    def end_token(self, spec: TaskSpec) -> int | None:
        return self.end

    async def encode(self, request: EncodeRequest) -> np.ndarray:
        if self.refusal is not None:
            raise self.refusal
        self.requests.append(request)
        return np.array([[len(row) / 3, row[0], row[-1]] for row in request.rows], np.float32)


Embed = Callable[..., Any]


CHAT = [{"role": "user", "content": "a"}]


@pytest.fixture
def encoder() -> LengthEncoder:
    return LengthEncoder()


@pytest.fixture
def embed(engine: EchoEngine, tokenizer: CharacterTokenizer, encoder: LengthEncoder) -> Embed:
    engine.max_context = 20
    app = make_app(engine, tokenizer, encoder=encoder, catalog=lambda: CARDS)

    def send(path: str = "/v1/embeddings", **body: Any) -> Any:
        return TestClient(app, base_url="http://localhost").post(path, json={"model": "base"} | body)

    return send


@pytest.mark.parametrize("path", ["/v1/embeddings", "/embeddings"])
def test_an_answer_has_openais_form(embed: Embed, path: str) -> None:
    answer = embed(path, input=["ab", "c"]).json()
    assert (answer.pop("id")[:5], answer.pop("created") > 0) == ("embd-", True)
    assert answer == {
        "object": "list",
        "model": "base",
        "data": [
            {"object": "embedding", "index": 0, "embedding": [float(np.float32(2 / 3)), 97.0, 98.0]},
            {"object": "embedding", "index": 1, "embedding": [float(np.float32(1 / 3)), 99.0, 99.0]},
        ],
        "usage": {"prompt_tokens": 3, "total_tokens": 3},
    }


@pytest.mark.parametrize(
    ("given", "rows"),
    [
        ("ab", ((97, 98),)),
        (["ab", "c"], ((97, 98), (99,))),
        ([5, 6], ((5, 6),)),
        ([[5, 6], [7]], ((5, 6), (7,))),
        (["a", [5]], ((97,), (5,))),
    ],
)
def test_inputs_are_texts_or_token_ids(
    embed: Embed, encoder: LengthEncoder, given: Any, rows: tuple[tuple[int, ...], ...]
) -> None:
    assert embed(input=given).status_code == 200
    assert encoder.requests[0].rows == rows


def test_chats_are_what_the_template_writes_of_them_without_the_start_of_an_answer(
    embed: Embed, encoder: LengthEncoder, tokenizer: CharacterTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []
    encode_prompt = CharacterTokenizer.encode_prompt

    def noted(self: CharacterTokenizer, turns: Any, **options: Any) -> ChatPrompt:
        asked.append(options)
        return encode_prompt(self, turns, **options)

    monkeypatch.setattr(CharacterTokenizer, "encode_prompt", noted)
    parts = [{"role": "user", "content": [{"type": "text", "text": "b"}]}]
    assert embed(messages=CHAT).status_code == embed(messages=[CHAT, parts]).status_code == 200
    rows = [tokenizer.encode(f"<user>{text}") for text in ("a", "b")]
    assert [request.rows for request in encoder.requests] == [(rows[0],), tuple(rows)]
    assert [options["end"] for options in asked] == ["message"] * 3
    encoder.end = END
    embed(messages=CHAT)
    embed(messages=CHAT, truncate_prompt_tokens=3)
    assert [request.rows[0] for request in encoder.requests[2:]] == [(*rows[0], END), (*rows[0][:2], END)]


def test_base64_is_the_same_numbers_to_the_bit(embed: Embed) -> None:
    as_list = embed(input=["ab", "c"]).json()["data"]
    as_bytes = embed(input=["ab", "c"], encoding_format="base64").json()["data"]
    for one, other in zip(as_list, as_bytes, strict=True):
        assert list(struct.unpack("<3f", base64.b64decode(other["embedding"]))) == one["embedding"]


@pytest.mark.parametrize(
    ("model", "meant"), [("policy", "policy@3"), ("best", "policy@2"), ("policy@2", "policy@2"), ("base", "base")]
)
def test_a_name_is_answered_by_a_version_that_is_told(
    embed: Embed, encoder: LengthEncoder, model: str, meant: str
) -> None:
    assert embed(model=model, input="a").json()["model"] == meant
    assert encoder.requests[0].model == meant


def test_what_the_encoder_needs_to_know_reaches_it(embed: Embed, encoder: LengthEncoder) -> None:
    embed(input="a", dimensions=2, use_activation=False, user="me")
    assert encoder.requests == [EncodeRequest(model="base", rows=((97,),), dimensions=2, activates=False)]


def test_prompts_stand_before_texts(embed: Embed, encoder: LengthEncoder) -> None:
    embed(input="a", prompt_name="query")
    encoder.found = replace(SPEC, default_prompt="query")
    embed(input="a")
    embed(input="a", prompt_name="plain")
    assert [request.rows for request in encoder.requests] == [((81, 58, 97),), ((81, 58, 97),), ((97,),)]


@pytest.mark.parametrize(
    ("fields", "row"),
    [
        ({"truncate_prompt_tokens": -1}, "a" * 19),
        ({"truncate_prompt_tokens": 3}, "aa"),
        ({"truncate_prompt_tokens": 3, "truncation_side": "left"}, "ab"),
        ({"truncate_prompt_tokens": 50}, "a" * 19),
    ],
)
def test_only_a_request_that_asks_for_it_is_cut_and_the_end_token_stays(
    embed: Embed, encoder: LengthEncoder, fields: dict[str, Any], row: str
) -> None:
    encoder.end = END
    assert embed(input="a" * 40 + "b", **fields).status_code == 200
    assert encoder.requests[0].rows == ((*map(ord, row), END),)


@pytest.mark.parametrize(
    ("given", "side", "row"),
    [
        ("abcd", "right", (7, 97, END)),
        ("abcd", "left", (7, 100, END)),
        ([7, 5, 6, END], "left", (7, 6, END)),
        ([4, 5, 6, END], "left", (5, 6, END)),  # token ids that lack the first
        ([4, 5, 6, END], "right", (4, 5, END)),
    ],
)
def test_what_the_tokenizer_puts_around_a_text_is_not_cut(
    embed: Embed, encoder: LengthEncoder, given: str | list[int], side: str, row: tuple[int, ...]
) -> None:
    encoder.begin, encoder.end = (7,), END
    assert embed(input=given, truncate_prompt_tokens=3, truncation_side=side).status_code == 200
    assert encoder.requests[0].rows == (row,)
    refused = embed(input="abcd", truncate_prompt_tokens=1).json()["error"]
    assert (refused["param"], "2 tokens around a text" in refused["message"]) == ("truncate_prompt_tokens", True)


def test_a_very_long_text_that_is_cut_is_not_encoded_whole(embed: Embed, encoder: LengthEncoder) -> None:
    longest = 0

    def encode_text(text: str, spec: TaskSpec) -> tuple[int, ...]:
        nonlocal longest
        longest = max(longest, len(text))
        return tuple(map(ord, text))

    encoder.encode_text = encode_text  # type: ignore[method-assign]
    embed(input="a" * 100_000 + "b", truncate_prompt_tokens=-1, truncation_side="left")
    assert encoder.requests[0].rows == (tuple(map(ord, "a" * 19 + "b")),)
    assert longest < 10_000


@pytest.mark.parametrize(
    ("body", "parameter", "named"),
    [
        ({"input": ""}, "input", "number 0"),
        ({"input": []}, "input", "1 to 2048"),
        ({"input": [[]]}, "input", "number 0"),
        ({"input": ["a", 5]}, "input", "number 1"),
        ({"input": [-1]}, "input", "number 0"),
        ({"input": ["a"] * 2049}, "input", "1 to 2048"),
        ({"input": [1000]}, "input", "check_embedding_ctx_length=False"),
        ({"input": "a" * 21}, "input", "truncate_prompt_tokens=-1"),
        ({"input": [5] * 21}, "input", "truncate_prompt_tokens=-1"),
        ({"input": "a" * 500}, "input", "context"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "-1 or above 0"),
        ({"input": "a", "prompt_name": "passage"}, "prompt_name", "query, plain"),
        ({"input": [5], "prompt_name": "query"}, "input", "send texts"),
        ({"input": "a", "dimensions": 0}, "dimensions", "greater"),
        ({"input": "a", "encoding_format": "ubinary"}, "encoding_format", "base64"),
        ({"input": "a", "messages": CHAT}, "input", "either input or messages"),
        ({}, "input", "either input or messages"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [[]]}, "messages.0", "at least 1"),
        ({"messages": CHAT, "prompt_name": "query"}, "prompt_name", "leave it out"),
        ({"messages": [{"role": "user", "content": "a" * 21}]}, "messages", "truncate_prompt_tokens=-1"),
    ],
)
def test_what_cannot_be_encoded_is_refused_and_the_error_says_what_fits(
    embed: Embed, body: dict[str, Any], parameter: str, named: str
) -> None:
    answer = embed(**body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, parameter), error
    assert named in error["message"]


def test_token_ids_without_the_end_token_are_refused(embed: Embed, encoder: LengthEncoder) -> None:
    encoder.end = END
    assert f"end with {END}" in embed(input=[5, 6]).json()["error"]["message"]
    assert embed(input=[5, END]).status_code == 200


@pytest.mark.parametrize(
    ("refusal", "status"), [(NotFinite("values"), 422), (Unavailable("set tasks.pooling=last"), 409)]
)
def test_errors_of_the_encoder_have_their_status(
    embed: Embed, encoder: LengthEncoder, refusal: Exception, status: int
) -> None:
    encoder.refusal = refusal
    answer = embed(input="a")
    assert (answer.status_code, answer.json()["error"]["message"]) == (status, str(refusal))


def test_an_unknown_model_is_404_and_a_process_without_an_encoder_409(
    embed: Embed, engine: EchoEngine, tokenizer: CharacterTokenizer
) -> None:
    assert embed(model="nobody", input="a").status_code == 404
    app = make_app(engine, tokenizer)
    body = {"model": "base", "input": "a"}
    assert TestClient(app, base_url="http://localhost").post("/v1/embeddings", json=body).status_code == 409


def test_a_name_that_is_split_between_versions_is_refused(
    engine: EchoEngine, tokenizer: CharacterTokenizer, encoder: LengthEncoder
) -> None:
    client = TestClient(
        make_app(engine, tokenizer, encoder=encoder, catalog=lambda: CARDS), base_url="http://localhost"
    )
    assert client.put("/v1/splits/policy", json={"weights": {"policy@2": 1, "policy@3": 1}}).status_code == 200
    answer = client.post("/v1/embeddings", json={"model": "policy", "input": "a"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")
