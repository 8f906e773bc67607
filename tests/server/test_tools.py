"""Tool calls and reasoning, with the marks that mlx-lm knows of a model."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

Call = Callable[..., httpx.Response]
Read = Callable[[httpx.Response], list[Any]]

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
OTHER = '<tool_call>{"name": "add", "arguments": {"a": 4}}</tool_call>'


def message_of(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    return dict(response.json()["choices"][0]["message"])


def added(chunks: list[Any]) -> dict[str, Any]:
    """The deltas of one choice as a message, calls by their index."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "calls": {}}
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            message["reasoning_content"] += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls", ()):
                assert call["index"] not in message["calls"]
                message["calls"][call["index"]] = call
            message["finish_reason"] = choice["finish_reason"] or message.get("finish_reason")
    return message


def test_a_call_is_told_apart_from_text(ask: Call) -> None:
    choice = ask(says=CALL, tools=[ADD]).json()["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    assert (call["type"], call["function"]["name"]) == ("function", "add")
    assert json.loads(call["function"]["arguments"]) == {"a": 2, "b": 3}
    assert call["id"].startswith("call_")


def test_several_calls_have_ids_of_their_own_and_text_before_them_stays(ask: Call) -> None:
    message = message_of(ask(says=f"I will add.\n{CALL}\n{OTHER}", tools=[ADD]))
    assert message["content"] == "I will add."
    assert [json.loads(call["function"]["arguments"]) for call in message["tool_calls"]] == [{"a": 2, "b": 3}, {"a": 4}]
    assert len({call["id"] for call in message["tool_calls"]}) == 2


def test_without_parallel_calls_there_is_one(ask: Call) -> None:
    assert len(message_of(ask(says=CALL + OTHER, tools=[ADD], parallel_tool_calls=False))["tool_calls"]) == 1


def test_a_stream_of_calls_says_the_same(ask: Call, chunks_of: Read) -> None:
    says = f"I will add.\n{CALL}\n{OTHER}"
    message = added(chunks_of(ask(says=says, tools=[ADD], stream=True)))
    assert (message["content"], message["finish_reason"]) == ("I will add.", "tool_calls")
    assert sorted(message["calls"]) == [0, 1]
    assert json.loads(message["calls"][1]["function"]["arguments"]) == {"a": 4}


@pytest.mark.parametrize(
    "says",
    [
        "<tool_call>not json</tool_call>",
        '<tool_call>{"name": "add", "argum',
        "<tool_call>[1]</tool_call>",
        "a < b <tool",
    ],
)
def test_what_is_no_call_stays_text(ask: Call, chunks_of: Read, says: str) -> None:
    choice = ask(says=says, tools=[ADD]).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (says, "stop")
    assert "tool_calls" not in choice["message"]
    assert added(chunks_of(ask(says=says, tools=[ADD], stream=True)))["content"] == says


@pytest.mark.parametrize("fields", [{}, {"tools": [ADD], "tool_choice": "none"}])
def test_without_tools_nothing_is_a_call(ask: Call, fields: dict[str, object]) -> None:
    assert message_of(ask(says=CALL, **fields))["content"] == CALL
    assert "Add two numbers." not in message_of(ask(**fields))["content"]


def test_tools_reach_the_model_through_its_template(ask: Call, engine: Any, hermes: Any) -> None:
    ask(tools=[ADD])
    text = "".join(map(hermes.token_text, engine.requests[-1].prompt_tokens))
    assert "Add two numbers." in text
    assert text.endswith("<|user|>hello<|assistant|>")


def test_calls_and_results_are_sent_back(ask: Call, engine: Any, hermes: Any) -> None:
    answer = message_of(ask(says=CALL, tools=[ADD]))
    result = {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": "5"}
    messages = [{"role": "user", "content": "2 + 3?"}, answer, result]
    assert ask(messages=messages, tools=[ADD]).status_code == 200
    text = "".join(map(hermes.token_text, engine.requests[-1].prompt_tokens))
    assert '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>' in text
    assert text.endswith("<|tool|>5<|assistant|>")


@pytest.mark.parametrize(
    ("fields", "parameter"),
    [
        ({"tools": [{"type": "code_interpreter"}]}, "tools"),
        ({"tools": [ADD, ADD]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "has space"}}]}, "tools"),
        ({"tools": [ADD], "tool_choice": "always"}, "tool_choice"),
        ({"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
    ],
)
def test_wrong_tools_are_refused_by_name(ask: Call, fields: dict[str, object], parameter: str) -> None:
    response = ask(**fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"].split(".")[0] == parameter


def test_arguments_that_are_no_object_are_refused(ask: Call) -> None:
    for arguments in ("[1]", "{", "5"):
        call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}
        response = ask(messages=[{"role": "assistant", "content": None, "tool_calls": [call]}])
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "messages"


def test_reasoning_is_told_apart_from_the_answer(ask: Call, chunks_of: Read) -> None:
    says = "<think>\n2 and 3\n\nmake 5\n</think>\n\nFive. "
    message = message_of(ask(says=says))
    assert (message["reasoning_content"], message["content"]) == ("2 and 3\n\nmake 5", "Five. ")
    streamed = added(chunks_of(ask(says=says, stream=True)))
    assert (streamed["reasoning_content"], streamed["content"]) == ("2 and 3\n\nmake 5", "Five. ")


def test_reasoning_that_the_prompt_has_begun_goes_on(ask: Call) -> None:
    message = message_of(ask(says="2 and 3</think>Five.", chat_template_kwargs={"enable_thinking": True}))
    assert (message["reasoning_content"], message["content"]) == ("2 and 3", "Five.")
    assert message_of(ask(says="Five.", messages=[{"role": "user", "content": "<think>"}]))["content"] == "Five."


def test_reasoning_that_never_ends_is_no_answer(ask: Call) -> None:
    message = message_of(ask(says="<think>hm"))
    assert (message["reasoning_content"], message["content"]) == ("hm", "")


def test_variables_that_the_template_does_not_read_are_refused(ask: Call) -> None:
    for name in ("enable_thinkin", "messages", "chat_template", "tokenize"):
        response = ask(chat_template_kwargs={name: ""})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "chat_template_kwargs"
        assert "enable_thinking" in response.json()["error"]["message"]


def test_an_effort_of_none_turns_reasoning_off_and_others_are_refused(ask: Call, engine: Any, hermes: Any) -> None:
    assert ask(reasoning_effort="none").status_code == 200
    assert hermes.token_text(engine.requests[-1].prompt_tokens[-1]) == "<|assistant|>"
    assert ask(reasoning_effort="high").json()["error"]["param"] == "reasoning_effort"


def test_the_last_message_is_continued(ask: Call, engine: Any, hermes: Any) -> None:
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "12 + "}]
    assert ask(messages=messages, continue_final_message=True, add_generation_prompt=False).status_code == 200
    text = "".join(map(hermes.token_text, engine.requests[-1].prompt_tokens))
    assert text == "<|user|>hello<|assistant|>12 + "
    assert ask(messages=messages, continue_final_message=True, add_generation_prompt=True).status_code == 400
    assert ask(continue_final_message=True).status_code == 400


def test_a_prompt_may_end_behind_the_last_message(ask: Call, engine: Any, hermes: Any) -> None:
    assert ask(add_generation_prompt=False).status_code == 200
    assert "".join(map(hermes.token_text, engine.requests[-1].prompt_tokens)) == "<|user|>hello"
