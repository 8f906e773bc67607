"""A parameter is honoured or refused by name."""

import json
import random
from collections.abc import Callable
from typing import Any

import httpx
import pytest

Call = Callable[..., httpx.Response]

UNSUPPORTED = {
    "audio": {},
    "bad_words": ["x"],
    "best_of": 2,
    "allowed_token_ids": [5],
    "chat_template_kwargs": {"enable_thinking": False},
    "function_call": {"name": "f"},
    "functions": [{"name": "f"}],
    "guided_json": "{",
    "guided_choice": [],
    "structured_outputs": {"regex": "a", "choice": ["a"]},
    "metadata": {"a": "b"},
    "modalities": ["audio"],
    "reasoning_effort": "high",
    "response_format": {"type": "xml"},
    "service_tier": "flex",
    "store": True,
    "suffix": "end",
    "tool_choice": "required",
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "web_search_options": {},
    "no_such_field": None,
}
NEUTRAL = {
    "best_of": 1,
    "echo": False,
    "frequency_penalty": 0,
    "logit_bias": {},
    "presence_penalty": 0.0,
    "repetition_penalty": 1,
    "response_format": {"type": "text"},
    "store": False,
    "suffix": None,
    "tool_choice": "none",
    "tools": [],
    "user": "somebody",
}
WRONG: dict[str, list[object]] = {
    "model": [None, "", 5, ["policy"]],
    "prompt": [None, "", [], [""], [[]], 5, {}, [1.5], [True], [-1], [1, "a"], [2**31], "a" * 201, [1000]],
    "n": [0, -1, 9, 1.5, "1", True, 10**30],
    "max_tokens": [0, -1, "5", 2.5, 196, 10**30, {}],
    "temperature": [-0.1, 2.1, "1", True, 1e-9, [1]],
    "top_p": [0, 1.1, -1, "1"],
    "top_k": [-2, 1.5, "3", 10**30],
    "min_p": [-0.1, 1.1, "0"],
    "seed": [-1, 2**63, 1.5, "1"],
    "stop": [5, [5], "", [""], ["a"] * 5, {}],
    "stop_token_ids": ["a", 5, [-1], ["a"], [1] * 5],
    "logprobs": [-1, 6, 1.5, "1", True],
    "presence_penalty": [-2.1, 2.1, "1", True],
    "frequency_penalty": [-2.1, 2.1, "1", True],
    "repetition_penalty": [0, -1, "1", True, 1e9],
    "logit_bias": [[], {"a": 1}, {"-1": 1}, {"5": "1"}, {"5": 101}, {"5": True}, {"5": 10**400}, {"9" * 10: 1}, 5],
    "min_tokens": [-1, 1.5, "1", True],
    "prompt_logprobs": [-1, 6, 1.5, "1", True],
    "best_of": [0, 2, "1", True],
    "echo": [1, "yes"],
    "stream": ["yes", 1],
    "stream_options": [{"include_usage": True}, {"other": 1}, 5],
}


def error_of(response: httpx.Response) -> dict[str, Any]:
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    return dict(body["error"])


@pytest.mark.parametrize(("name", "value"), UNSUPPORTED.items())
def test_what_is_not_supported_is_refused_by_name(complete: Call, chat: Call, name: str, value: object) -> None:
    for send in (complete, chat):
        response = send(**{name: value})
        assert response.status_code == 400
        assert error_of(response)["param"] == name
        assert name in error_of(response)["message"]


@pytest.mark.parametrize(("name", "value"), NEUTRAL.items())
def test_values_that_ask_for_nothing_are_accepted(complete: Call, chat: Call, name: str, value: object) -> None:
    assert complete(**{name: value}).status_code == 200
    assert chat(**{name: value}).status_code == 200


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_a_wrong_value_is_refused_by_name(complete: Call, name: str, value: object) -> None:
    response = complete(**{name: value})
    assert response.status_code == 400
    assert str(error_of(response)["param"]).split(".")[0] == name


@pytest.mark.parametrize(
    "messages",
    [
        None,
        [],
        "hello",
        [5],
        [{}],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "tool", "content": "a"}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}],
        [{"role": "user", "content": "a", "name": "b"}],
        [{"role": "assistant", "content": "a", "tool_calls": [{}]}],
        [{"role": "assistant"}],
        [{"role": "assistant", "content": None, "tool_calls": []}],
        [{"role": "tool", "content": "a", "tool_call_id": "unknown"}],
        [{"role": "function", "name": "f", "content": "a"}],
    ],
)
def test_wrong_messages_are_refused(chat: Call, messages: object) -> None:
    response = chat(messages=messages)
    assert response.status_code == 400
    assert str(error_of(response)["param"]).startswith("messages")


def test_top_logprobs_without_logprobs_are_refused(chat: Call) -> None:
    assert error_of(chat(top_logprobs=2))["param"] == "top_logprobs"
    assert error_of(chat(top_logprobs=6, logprobs=True))["param"] == "top_logprobs"


def test_too_many_prompts_are_refused(complete: Call) -> None:
    assert complete(prompt=["a"] * 16).status_code == 200
    assert error_of(complete(prompt=["a"] * 17))["param"] == "prompt"
    assert error_of(complete(prompt=["a"] * 5, n=4))["param"] == "prompt"


@pytest.mark.parametrize("name", ["n", "max_tokens", "temperature", "stop", "seed", "logprobs", "stream", "user"])
def test_null_is_the_same_as_leaving_an_optional_field_out(complete: Call, name: str) -> None:
    assert complete(**{name: None}).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"\xff\xfe",
        b"[" * 5000,
        b'{"model":"policy","prompt":"a","temperature":NaN}',
        b'{"model":"policy","prompt":"a","temperature":1e999}',
        b'{"model":"policy","prompt":"\\ud800"}',
        b'{"model":"policy","prompt":"a","seed":' + b"9" * 5000 + b"}",
        b'{"model":"policy","prompt":"a"} trailing',
    ],
)
def test_a_body_that_is_no_json_object_is_refused(call: Call, body: bytes) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        response = call("POST", path, content=body)
        assert response.status_code == 400
        error_of(response)


def test_a_body_above_the_limit_is_refused(complete: Call) -> None:
    response = complete(prompt="a" * 20_001)
    assert response.status_code == 413
    assert "server.max_body_bytes" in error_of(response)["message"]


def random_json(source: random.Random, depth: int) -> object:
    leaves = [None, True, False, 0, -1, 1, 3.5, 2**31, 10**40, "", "a", "policy", "\x00", "\U0001f600", "a" * 300]
    if depth == 0 or source.random() < 0.5:
        return source.choice(leaves)
    items = [random_json(source, depth - 1) for _ in range(source.randrange(4))]
    keys = ["role", "content", "type", "text", "include_usage", "x"]
    return items if source.random() < 0.5 else {source.choice(keys): item for item in items}


def random_body(source: random.Random) -> bytes:
    """A good request with a few fields made bad, sometimes with broken bytes."""
    body: dict[str, Any] = {"model": "policy", "prompt": "a"}
    if source.random() < 0.5:
        body = {"model": "policy", "messages": [{"role": "user", "content": "a"}]}
    names = [*WRONG, *UNSUPPORTED, "messages", "top_logprobs", "return_token_ids", "ignore_eos"]
    for _ in range(source.randrange(1, 5)):
        body[source.choice(names)] = random_json(source, 3)
    data = bytearray(json.dumps(body).encode())
    if source.random() < 0.3:
        data[source.randrange(len(data))] = source.randrange(256)
    return bytes(data[: source.randrange(len(data))] if source.random() < 0.1 else data)


@pytest.mark.parametrize("seed", range(20))
def test_random_bodies_never_make_a_server_error(call: Call, complete: Call, seed: int) -> None:
    source = random.Random(seed)
    for _ in range(30):
        body = random_body(source)
        path = source.choice(["/v1/completions", "/v1/chat/completions"])
        response = call("POST", path, content=body)
        assert response.status_code in (200, 400, 404, 413), body
        if response.status_code != 200:
            error_of(response)
    assert complete().status_code == 200


WORDS: dict[str, list[object]] = {
    "role": ["user", "assistant", "tool", "system"],
    "type": ["function", "text", "json_schema", "json_object", "message", "function_call", "function_call_output"],
    "name": ["f", "has space"],
    "id": ["1"],
    "call_id": ["1"],
    "tool_call_id": ["1"],
    "arguments": ["{}", "[]", "{"],
    "content": ["a", "<think>", [{"type": "text", "text": "a"}]],
    "tools": [[{"type": "function", "function": {"name": "f"}}], [{"type": "function", "name": "f"}]],
    "tool_choice": ["none", "required", {"type": "function", "function": {"name": "f"}}],
    "regex": ["a*", "(", "\\", "a{99999}"],
    "schema": [{"type": "object"}, {"$ref": "#/a"}, True],
}
NESTED = [
    *("messages", "input", "tools", "tool_choice", "response_format", "text", "reasoning", "structured_outputs"),
    *("guided_json", "guided_regex", "guided_choice", "chat_template_kwargs", "metadata", "function", "format"),
    *("json_schema", "tool_calls", "output", "parameters", "json", "choice", "enable_thinking", *WORDS),
]


def random_tree(source: random.Random, name: str, depth: int) -> object:
    """Something like what belongs under `name`."""
    if name in WORDS and source.random() < 0.7:
        return source.choice(WORDS[name])
    if depth == 0 or source.random() < 0.3:
        return random_json(source, 1)
    if source.random() < 0.4:
        return [random_tree(source, "", depth - 1) for _ in range(source.randrange(3))]
    return {key: random_tree(source, key, depth - 1) for key in source.sample(NESTED, 4)}


@pytest.mark.parametrize("seed", range(6))
def test_random_trees_never_make_a_server_error(ask: Call, respond: Call, seed: int) -> None:
    source = random.Random(seed)
    for _ in range(30):
        fields = {name: random_tree(source, name, 4) for name in source.sample(NESTED, source.randrange(1, 4))}
        says = source.choice([None, "<tool_call>{}</tool_call>", "<think>", '[{"name": 5}]'])
        for send in (ask, respond):
            response = send(says, **fields)
            assert response.status_code in (200, 400), (fields, response.text)
    assert ask().status_code == respond().status_code == 200
