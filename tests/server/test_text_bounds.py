"""Texts that are too long for the context cost a look at their length, and long ones do not hold up the event loop."""

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from parallm.errors import ContextTooLong, InvalidRequest
from parallm.server.request_limits import PIECE, check_text
from parallm.server.schemas import read_object

Call = Callable[..., httpx.Response]
LONG = "a" * 15_000
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": json.dumps({"a": LONG})}}
ASKED = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"model": "policy", "prompt": LONG}),
        ("/v1/completions", {"model": "policy", "prompt": ["a", LONG]}),
        ("/v1/completions", {"model": "policy", "prompt": [1] * 1000}),
        ("/v1/chat/completions", {"model": "policy", "messages": [{"role": "user", "content": LONG}]}),
        ("/v1/chat/completions", {"model": "policy", "messages": [{"role": "user", "content": "a" * 50}] * 200}),
        ("/v1/chat/completions", {"model": "policy", "messages": [{"role": "user", "content": ""}] * 300}),
        ("/v1/chat/completions", {"model": "policy", "messages": [{"role": "assistant", "tool_calls": [CALL]}]}),
        ("/v1/chat/completions", {"model": "policy", "messages": [ASKED], "chat_template_kwargs": {"a": LONG}}),
        (
            "/v1/chat/completions",
            {
                "model": "policy",
                "messages": [ASKED],
                "tools": [{"type": "function", "function": {"name": "add", "description": LONG}}],
            },
        ),
        ("/v1/responses", {"model": "policy", "input": LONG}),
        ("/v1/responses", {"model": "policy", "input": "a", "instructions": LONG}),
        ("/tokenize", {"prompt": LONG}),
        ("/tokenize", {"messages": [{"role": "user", "content": LONG}]}),
        ("/detokenize", {"tokens": [5] * 1000}),
        ("/generate", {"prompt": LONG}),
        ("/generate", {"prompt": {"prompt_token_ids": [5] * 1000}}),
        ("/generate", {"text": LONG}),
        ("/generate", {"prompts": [LONG]}),
        ("/inference/v1/generate", {"token_ids": [5] * 1000, "sampling_params": {}}),
    ],
)
def test_what_cannot_fit_is_refused_before_anything_reads_it(
    call: Call, tokenizer: Any, engine: Any, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    def encode(text: str, **how: bool) -> tuple[int, ...]:
        assert len(text) < 100, "this is the cost that a length would have saved"
        return tuple(ord(character) for character in text)

    monkeypatch.setattr(type(tokenizer), "encode", staticmethod(encode))
    answer = call("POST", path, json=body)
    assert answer.status_code == 400
    assert "maximum context length is 200" in answer.text
    assert "; shorten it" in answer.text
    assert "engine.max_context" not in answer.text  # which a client cannot set
    assert engine.requests == []


class Spaces:
    """Has one token for up to a hundred spaces, and one for every other character."""

    max_token_length = 100

    def __init__(self) -> None:
        self.encoded: list[int] = []

    def encode_more(self, text: str) -> tuple[int, ...]:
        self.encoded.append(len(text))
        return (1,) * (len(text) - text.count(" ")) + (2,) * -(-text.count(" ") // 100)


def test_a_text_that_may_fit_is_looked_at_in_pieces_and_no_further_than_needed() -> None:
    tokenizer: Any = Spaces()
    check_text(" " * 50_000, "prompt", tokenizer, 1000)
    assert tokenizer.encoded == [PIECE] * 12 + [50_000 - 12 * PIECE]
    tokenizer.encoded.clear()
    with pytest.raises(ContextTooLong, match=r"prompt has more than 4096 tokens and .* is 1000"):
        check_text("a" * 90_000, "prompt", tokenizer, 1000)
    assert tokenizer.encoded == [PIECE]
    with pytest.raises(ContextTooLong, match=r"prompt has 100001 characters and .* at most 100000"):
        check_text(" " * 100_001, "prompt", tokenizer, 1000)
    tokenizer.encoded.clear()
    check_text("a" * 8000, "prompt", tokenizer, 1000)
    assert tokenizer.encoded == []


@pytest.mark.parametrize(("length", "is_on_loop"), [(100, True), (15_000, False)])
def test_long_bodies_are_read_beside_the_event_loop(
    app: FastAPI, tokenizer: Any, engine: Any, monkeypatch: pytest.MonkeyPatch, length: int, is_on_loop: bool
) -> None:
    seen = []

    def encode(text: str, **how: bool) -> tuple[int, ...]:
        seen.append(threading.current_thread() is threading.main_thread())
        return tuple(ord(character) for character in text)

    monkeypatch.setattr(type(tokenizer), "encode", staticmethod(encode))
    engine.max_context = 40_000
    bodies = {
        "/v1/completions": {"model": "policy", "prompt": "a" * length, "max_tokens": 1},
        "/v1/chat/completions": {
            "model": "policy",
            "messages": [{"role": "user", "content": "a" * length}],
            "max_tokens": 1,
        },
        "/v1/responses": {"model": "policy", "input": "a" * length, "max_output_tokens": 1},
        "/tokenize": {"prompt": "a" * length},
        "/generate": {"text": "a" * length, "sampling_params": {"max_new_tokens": 1}},
    }

    async def ask() -> list[int]:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return [(await client.post(path, json=body)).status_code for path, body in bodies.items()]

    assert asyncio.run(ask()) == [200] * 5
    assert seen == [is_on_loop] * 5


@pytest.mark.parametrize("unit", [b"[]", b"[[[[]]]]", b"{}", b'[{"a":[]}]', b'{"abcd":1}'])
def test_a_body_of_brackets_is_refused_before_it_is_read(unit: bytes) -> None:
    with pytest.raises(InvalidRequest, match=r"has \d+ times '.' in \d+ bytes, the limit is once in 16; send"):
        read_object(b'{"prompt": [%s]}' % b",".join([unit] * 60_000))
    assert read_object(b'{"prompt": [%s]}' % b",".join([b"[1000,2000,3000]"] * 60_000))
