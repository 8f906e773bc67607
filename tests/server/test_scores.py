"""`POST /v1/rewards/score`, with a reward model that knows lengths only."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from fastapi.testclient import TestClient

from parallm.server.settings import ServerSettings
from parallm.types import ScoringRequest
from tests.server.conftest import make_app

SEEN: list[ScoringRequest] = []


async def length(items: Sequence[ScoringRequest]) -> list[float]:
    SEEN[:] = items
    return [len(tokens) / 2 for item in items for tokens in item.completions]


@pytest.fixture
def score(engine: Any, tokenizer: Any) -> Callable[..., Any]:
    def send(names: Sequence[str] = ("reward",), **body: Any) -> Any:
        app = make_app(
            engine,
            tokenizer,
            settings=ServerSettings(max_completions=3),
            reward_models=lambda: dict.fromkeys(names, length),
        )
        return TestClient(app, base_url="http://localhost").post("/v1/rewards/score", json=body)

    return send


def ids(text: str, *more: int) -> tuple[int, ...]:
    return (*map(ord, text), *more)


def test_texts_are_scored_at_their_ends(score: Callable[..., Any]) -> None:
    assert score(model="reward", input=["abc", "a"]).json() == {
        "object": "list",
        "model": "reward",
        "data": [{"index": 0, "object": "score", "score": 0.5}, {"index": 1, "object": "score", "score": 0.5}],
        "usage": {"prompt_tokens": 6, "total_tokens": 6},
    }
    assert [(one.prompt_tokens, one.completions) for one in SEEN] == [(ids("abc"), ((0,),)), (ids("a"), ((0,),))]
    assert len(score(input="abc").json()["data"]) == 1


def test_completions_are_scored_behind_their_prompt_or_their_chat(score: Callable[..., Any]) -> None:
    answer = score(prompt="ab", completions=["c", "cde"]).json()
    assert [one["score"] for one in answer["data"]] == [1.0, 2.0]
    assert [ScoringRequest(prompt_tokens=ids("ab"), completions=(ids("c", 0), ids("cde", 0)))] == SEEN
    chat = [{"role": "user", "content": "ab"}]
    assert score(messages=chat, completions="c").json()["data"][0]["score"] == 1.0
    expected = [ScoringRequest(prompt_tokens=ids("<user>ab"), completions=(ids("c", 0),))]
    assert expected == SEEN
    whole = [*chat, {"role": "assistant", "content": [{"type": "text", "text": "c"}]}]
    assert score(messages=whole).status_code == 200
    assert expected == SEEN


@pytest.mark.parametrize(
    ("body", "parameter"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": [""]}, "input.0"),
        ({"input": "a", "prompt": "b"}, "prompt"),
        ({"input": "a", "completions": ["b"]}, "completions"),
        ({"prompt": "a"}, "completions"),
        ({"messages": [{"role": "user", "content": "a"}]}, "messages"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "messages"),
        ({"input": ["a"] * 4}, "input"),
        ({"input": "a" * 300}, "input"),
        ({"input": "a", "extra": 1}, "extra"),
    ],
)
def test_what_cannot_be_scored_is_refused_by_name(
    score: Callable[..., Any], body: dict[str, Any], parameter: str
) -> None:
    answer = score(**body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, parameter)


@pytest.mark.parametrize(
    "body",
    [
        {"input": ["a", "b" * 15_000]},
        {"prompt": "a" * 15_000, "completions": ["b"]},
        {"prompt": "a", "completions": ["b" * 15_000]},
        {"messages": [{"role": "user", "content": "a" * 15_000}], "completions": ["b"]},
        {"messages": [{"role": "user", "content": ""}] * 300, "completions": ["b"]},
    ],
)
def test_texts_that_cannot_fit_are_refused_before_anything_encodes_them(
    score: Callable[..., Any], tokenizer: Any, monkeypatch: pytest.MonkeyPatch, body: dict[str, Any]
) -> None:
    monkeypatch.setattr(type(tokenizer), "encode", None)
    answer = score(**body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded"), answer.text


def test_reward_models_are_named(score: Callable[..., Any]) -> None:
    assert score(("poet@reward", "coder@reward"), model="coder@reward", input="a").json()["model"] == "coder@reward"
    for model in ("reward", None):
        answer = score(("poet@reward", "coder@reward"), model=model, input="a")
        assert answer.status_code == 404
        assert "there are poet@reward, coder@reward" in answer.json()["error"]["message"]
    none = score((), input="a")
    assert (none.status_code, "server.reward_model=FOLDER" in none.json()["error"]["message"]) == (409, True)
