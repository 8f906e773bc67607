"""`/v1/responses`: the same conversation in other words."""

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from tests.server.conftest import send_to

Call = Callable[..., httpx.Response]

ADD = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'


def answer_of(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    return dict(response.json())


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """The events, each under its own name, numbered from 0."""
    assert response.headers["content-type"].startswith("text/event-stream")
    events = []
    for block in response.text.strip().split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def prompt_of(engine: Any, tokenizer: Any) -> str:
    return "".join(map(tokenizer.token_text, engine.requests[-1].prompt_tokens))


def without_ids(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in items]


def test_a_string_is_answered_with_a_message(respond: Call, engine: Any, hermes: Any) -> None:
    answer = answer_of(respond(says="Hi!", instructions="Be short.", metadata={"a": "b"}))
    (item,) = answer["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert item["content"] == [{"type": "output_text", "text": "Hi!", "annotations": [], "logprobs": []}]
    assert (answer["object"], answer["status"], answer["model"]) == ("response", "completed", "policy@3")
    assert (answer["store"], answer["metadata"], answer["policy_version"]) == (False, {"a": "b"}, 3)
    assert prompt_of(engine, hermes) == "<|system|>Be short.<|user|>hello<|assistant|>"
    num_prompt = len(engine.requests[-1].prompt_tokens)
    assert answer["usage"] == {
        "input_tokens": num_prompt,
        "input_tokens_details": {"cached_tokens": 2},
        "output_tokens": 4,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": num_prompt + 4,
    }


def test_a_list_is_a_conversation(respond: Call, engine: Any, hermes: Any) -> None:
    items = [
        {"role": "developer", "content": "Be short."},
        {"role": "user", "content": [{"type": "input_text", "text": "one"}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "two", "annotations": []}],
        },
        {"role": "user", "content": "three"},
    ]
    respond(input=items)
    assert prompt_of(engine, hermes) == (
        "<|system|>Be short.<|user|>one<|assistant|>two<|end|><|user|>three<|assistant|>"
    )


def test_parameters_reach_the_engine(respond: Call, engine: Any) -> None:
    respond(max_output_tokens=7, temperature=0.5, top_p=0.9)
    sampling = engine.requests[-1].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (7, 0.5, 0.9)


def test_an_answer_that_was_cut_off_says_so(respond: Call) -> None:
    answer = answer_of(respond(says="Hello!", max_output_tokens=2))
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert answer["output"][0]["content"][0]["text"] == "He"
    events = events_of(respond(says="Hello!", max_output_tokens=2, stream=True))
    assert events[-1]["type"] == "response.incomplete"


def test_a_schema_reaches_the_engine(respond: Call, engine: Any) -> None:
    schema = {"type": "object", "properties": {}}
    asked = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    answer = answer_of(respond(says="{}", text={"format": asked}))
    assert answer["text"] == {"format": asked}
    assert engine.requests[-1].sampling.grammar is not None
    assert respond(text={"format": asked | {"schema": {"type": "strange"}}}).json()["error"]["param"] == "text.format"


def test_reasoning_and_calls_are_items_of_their_own_and_are_sent_back(respond: Call, engine: Any, hermes: Any) -> None:
    output = answer_of(respond(says=f"<think>hm</think>I add.{CALL}", tools=[ADD]))["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call"]
    assert output[0]["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert (output[2]["name"], json.loads(output[2]["arguments"])) == ("add", {"a": 2})
    result = {"type": "function_call_output", "call_id": output[2]["call_id"], "output": "5"}
    answer_of(respond(input=[{"role": "user", "content": "2?"}, *output, result], tools=[ADD]))
    assert prompt_of(engine, hermes).endswith(
        '<|user|>2?<|assistant|>I add.<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call><|end|>'
        "<|tool|>5<|assistant|>"
    )


def test_a_stream_of_text_has_the_official_events(respond: Call) -> None:
    events = events_of(respond(says="ab", stream=True))
    assert [event["type"] for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta") == "ab"
    assert (events[0]["response"]["status"], events[0]["response"]["usage"]) == ("in_progress", None)


@pytest.mark.parametrize("max_tokens", [len(CALL) + 8, 150])
@pytest.mark.parametrize(
    "says",
    ["ab", "<think>hm</think>\nab", f"I add. {CALL}{CALL}", CALL, "<think>hm", f"{CALL}and then", f"I{CALL}and{CALL}"],
)
def test_a_stream_ends_with_the_whole_answer(respond: Call, says: str, max_tokens: int) -> None:
    asked = {"says": says, "tools": [ADD], "max_output_tokens": max_tokens}
    whole = answer_of(respond(**asked))
    events = events_of(respond(**asked, stream=True))
    last = events[-1]["response"]
    assert without_ids(last["output"]) == without_ids(whole["output"])
    assert (last["usage"], last["model"], last["status"]) == (whole["usage"], whole["model"], whole["status"])
    done = [event for event in events if event["type"] == "response.output_item.done"]
    assert [event["item"] for event in done] == last["output"]
    assert [event["output_index"] for event in done] == list(range(len(done)))


def test_of_an_answer_that_was_cut_off_the_last_text_alone_is_incomplete(respond: Call) -> None:
    output = answer_of(respond(says=f"{CALL}and then", tools=[ADD], max_output_tokens=len(CALL) + 4))["output"]
    assert [(item["type"], item["status"]) for item in output] == [
        ("function_call", "completed"),
        ("message", "incomplete"),
    ]


def test_reasoning_counts_without_the_token_that_begins_a_text(
    respond: Call, hermes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = hermes.encode

    def encode_with_beginning(text: str, *, add_special: bool = True, **more: Any) -> tuple[int, ...]:
        return (1,) * add_special + tuple(encode(text, add_special=False, **more))

    monkeypatch.setattr(hermes, "encode", encode_with_beginning)
    usage = answer_of(respond(says="<think>hm</think>ab"))["usage"]
    assert usage["output_tokens_details"]["reasoning_tokens"] == 2


def test_a_failure_in_a_stream_is_an_event(respond: Call, engine: Any) -> None:
    engine.crash = RuntimeError("lost")
    events = events_of(respond(says="ab", stream=True))
    assert (events[-1]["type"], events[-1]["code"]) == ("error", "internal_error")
    assert "lost" not in events[-1]["message"]


def test_an_answer_that_takes_too_long_ends_with_an_event(call: Call, engine: Any) -> None:
    engine.is_endless = True
    body = {"model": "policy", "input": "hello", "max_output_tokens": 5, "stream": True}
    events = events_of(call("POST", "/v1/responses", json=body, headers={"x-request-timeout": "0.05"}))
    assert (events[-1]["type"], events[-1]["code"]) == ("error", "deadline_exceeded")


def test_an_aborted_answer_is_incomplete_without_a_reason(app: FastAPI, engine: Any) -> None:
    engine.is_endless = True
    body = {"model": "policy", "input": "hello", "max_output_tokens": 5}
    with TestClient(app, base_url="http://localhost") as client, ThreadPoolExecutor() as pool:
        asked = pool.submit(client.post, "/v1/responses", json=body)
        while not engine.requests:
            time.sleep(0.01)
        client.post("/abort_requests", json={"request_ids": [engine.requests[0].request_id]})
        answer = asked.result().json()
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", None)


def test_a_user_stays_on_one_side_of_a_split(app: FastAPI, engine: Any) -> None:
    call = partial(send_to, app)
    call("PUT", "/v1/splits/policy", json={"weights": {"policy@2": 1, "policy@3": 1}})
    for stream in (False, True) * 3:
        body = {"model": "policy", "input": "hello", "max_output_tokens": 5, "user": "a", "stream": stream}
        assert call("POST", "/v1/responses", json=body).status_code == 200
    assert len({request.model for request in engine.requests}) == 1
    assert {request.split for request in engine.requests} == {"policy"}


@pytest.mark.parametrize(
    ("fields", "parameter"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"include": ["reasoning.encrypted_content"]}, "include"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"type": "item_reference", "id": "1"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "a"}]}]}, "input"),
        ({"input": [{"type": "function_call_output", "call_id": "1", "output": "a"}]}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 5000}, "max_output_tokens"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [ADD | {"strict": True, "parameters": {"not": {}}}]}, "tools"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"reasoning": {"summary": "auto"}}, "reasoning"),
        ({"text": {"format": {"type": "xml"}}}, "text"),
        ({"text": {"verbosity": "low"}}, "text"),
        ({"truncation": "auto"}, "truncation"),
        ({"n": 2}, "n"),
        ({"messages": []}, "messages"),
        ({"model": "other"}, "model"),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(respond: Call, fields: dict[str, object], parameter: str) -> None:
    response = respond(**fields)
    assert response.status_code in (400, 404)
    named = str(response.json()["error"]["param"])
    assert named == parameter or named.split(".")[0] == parameter
