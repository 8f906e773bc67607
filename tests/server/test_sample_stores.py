"""Every completion of a policy is told to who remembers it, by whichever route a client has asked."""

from collections.abc import Sequence
from typing import Any

import pytest
from fastapi.testclient import TestClient

from parallm.types import AdapterCard, Completion, GenerationRequest
from tests.server.conftest import make_app


class Memory:
    def __init__(self) -> None:
        self.seen: list[tuple[tuple[int, ...], list[tuple[int, ...]]]] = []

    def record(self, request: GenerationRequest, completions: Sequence[Completion]) -> None:
        self.seen.append((request.prompt_tokens, [one.tokens for one in completions]))


@pytest.fixture
def memory() -> Memory:
    return Memory()


@pytest.fixture
def client(engine: Any, tokenizer: Any, memory: Memory) -> TestClient:
    cards: tuple[AdapterCard, ...] = ()
    return TestClient(
        make_app(engine, tokenizer, catalog=lambda: cards, sample_stores={"policy": memory.record}),
        base_url="http://localhost",
    )


TOKENS = [104, 105]
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"model": "policy", "prompt": TOKENS}),
        ("/v1/completions", {"model": "policy", "prompt": TOKENS, "stream": True}),
        ("/generate", {"prompt": {"prompt_token_ids": TOKENS}}),
        ("/generate", {"input_ids": TOKENS, "sampling_params": {"max_new_tokens": 3}}),
        ("/inference/v1/generate", {"model": "policy", "token_ids": TOKENS}),
    ],
)
def test_tokens_that_a_client_gets_are_remembered(
    client: TestClient, memory: Memory, path: str, body: dict[str, Any]
) -> None:
    if "sampling_params" not in body:
        body = {**body, "sampling_params": {"max_tokens": 3}} if "token_ids" in body else {**body, "max_tokens": 3}
    assert client.post(path, json=body).status_code == 200
    ((prompt, completions),) = memory.seen
    assert prompt == (104, 105)
    assert [len(one) for one in completions] == [3]


def test_chats_are_remembered_with_all_their_choices(client: TestClient, memory: Memory) -> None:
    body = {"model": "policy", "messages": MESSAGES, "max_tokens": 2, "n": 3}
    assert client.post("/v1/chat/completions", json=body).status_code == 200
    ((_, completions),) = memory.seen
    assert len(completions) == 3


def test_what_the_base_answers_is_nobodys(client: TestClient, memory: Memory) -> None:
    body = {"model": "base", "prompt": TOKENS, "max_tokens": 2}
    assert client.post("/v1/completions", json=body).status_code == 200
    assert memory.seen == []


def test_what_is_refused_is_not_remembered(client: TestClient, memory: Memory) -> None:
    assert client.post("/v1/completions", json={"model": "policy", "prompt": TOKENS, "max_tokens": -1}).is_error
    assert memory.seen == []
