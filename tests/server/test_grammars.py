"""What clients ask texts to look like reaches the engine as a grammar, or is refused."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest

Call = Callable[..., httpx.Response]
Read = Callable[[httpx.Response], list[Any]]

SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
ADD = {"type": "function", "function": {"name": "add", "strict": True, "parameters": SCHEMA}}
NOTHING = {"type": "function", "function": {"name": "nothing"}}
NAMED = {"type": "function", "function": {"name": "add"}}


def lets_through(engine: Any, tokenizer: Any, text: str) -> bool:
    """Whether the newest request may answer `text`."""
    mask = engine.requests[-1].sampling.grammar.start()
    (end,) = tokenizer.eos_token_ids
    for token in (*tokenizer.encode_more(text), end):
        if not np.unpackbits(np.frombuffer(mask.allowed(), np.uint8), bitorder="little")[token]:
            return False
        if token != end:
            mask.accept(token)
    return True


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": SCHEMA},
            }
        },
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA)},
        {"structured_outputs": {"json": SCHEMA}},
    ],
)
def test_a_schema_reaches_the_engine(ask: Call, engine: Any, hermes: Any, fields: dict[str, object]) -> None:
    assert ask(says='{"x": 1}', **fields).json()["choices"][0]["message"]["content"] == '{"x": 1}'
    assert lets_through(engine, hermes, '{"x": 1}')
    assert lets_through(engine, hermes, '<think>one</think>{"x": 1}')
    assert not lets_through(engine, hermes, '{"x": "1"}')


def test_other_forms_reach_the_engine(ask: Call, engine: Any, hermes: Any) -> None:
    forms: list[tuple[dict[str, object], str, str]] = [
        ({"response_format": {"type": "json_object"}}, '{"a": [1]}', "[1]"),
        ({"structured_outputs": {"json_object": True}}, "{}", "1"),
        ({"structured_outputs": {"regex": "[0-9]+"}}, "12", "a"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes", "maybe"),
        ({"guided_regex": "[a-z]/"}, "a/", "a"),
        ({"guided_choice": ["12"]}, "12", "1"),
    ]
    for fields, right, wrong in forms:
        assert ask(says=right, **fields).status_code == 200
        assert lets_through(engine, hermes, right)
        assert not lets_through(engine, hermes, wrong)


@pytest.mark.parametrize(
    ("fields", "whitespace"),
    [
        ({"guided_json": SCHEMA}, (True, True, False)),
        ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": False}}, (True, True, False)),
        ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}, (True, False, False)),
        ({"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " {1,4}"}}, (True, True, True)),
        ({"guided_json": SCHEMA, "guided_whitespace_pattern": " {1,4}"}, (True, True, True)),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"disable_any_whitespace": True}},
            (True, False, False),
        ),
        (
            {"tools": [ADD], "tool_choice": NAMED, "structured_outputs": {"disable_any_whitespace": True}},
            (True, False, False),
        ),
    ],
)
def test_white_space_in_json_is_as_vllm_has_it_asked_for(
    ask: Call, engine: Any, hermes: Any, fields: dict[str, object], whitespace: tuple[bool, ...]
) -> None:
    assert ask(says='{"x":1}', **fields).status_code == 200
    found = [lets_through(engine, hermes, text) for text in ('{"x":1}', '{"x": 1}', '{"x":   1}')]
    assert tuple(found) == whitespace


def test_without_a_form_there_is_no_grammar(ask: Call, engine: Any) -> None:
    ask(response_format={"type": "text"})
    assert engine.requests[-1].sampling.grammar is None


def test_reasoning_that_the_prompt_has_begun_stands_before_the_answer(ask: Call, engine: Any, hermes: Any) -> None:
    fields = {"response_format": {"type": "json_object"}, "chat_template_kwargs": {"enable_thinking": True}}
    message = ask(says="one</think>\n\n{}", **fields).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("one", "{}")
    assert lets_through(engine, hermes, "one</think>\n\n{}")
    assert not lets_through(engine, hermes, "{}")


def test_a_named_function_is_called_whatever_the_model_would_say(ask: Call, engine: Any, hermes: Any) -> None:
    choice = ask(says='{"x": 5}', tools=[ADD, NOTHING], tool_choice=NAMED).json()["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"x": 5}'}
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")
    assert lets_through(engine, hermes, '{"x": 5}')
    assert not lets_through(engine, hermes, "{}")


def test_one_of_the_functions_is_called_where_that_is_required(ask: Call, engine: Any, hermes: Any) -> None:
    says = '[{"name": "add", "arguments": {"x": 5}}, {"name": "nothing", "arguments": {}}]'
    message = ask(says=says, tools=[ADD, NOTHING], tool_choice="required").json()["choices"][0]["message"]
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["add", "nothing"]
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"x": 5}
    assert lets_through(engine, hermes, says)
    assert not lets_through(engine, hermes, '[{"name": "add", "arguments": {}}]')
    assert not lets_through(engine, hermes, '[{"name": "other", "arguments": {}}]')
    assert not lets_through(engine, hermes, "[]")
    ask(says=says, tools=[ADD, NOTHING], tool_choice="required", parallel_tool_calls=False)
    assert not lets_through(engine, hermes, says)
    assert lets_through(engine, hermes, '[{"name": "nothing", "arguments": {}}]')


def test_a_strict_function_is_kept_to_its_schema_where_the_model_chooses(ask: Call, engine: Any, hermes: Any) -> None:
    good = '<tool_call>\n{"name": "add", "arguments": {"x": 5}}\n</tool_call>'
    wrong = good.replace('"x": 5', "")
    message = ask(says=good, tools=[ADD, NOTHING]).json()["choices"][0]["message"]
    assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"x": 5}'}
    free = '<tool_call>{"name": "nothing", "arguments": {"any": 1}}</tool_call>'
    for text in ("Five.", "", f"I add. {good}\n{free}", f"<think>hm</think>{good} done"):
        assert lets_through(engine, hermes, text)
    for text in (wrong, "<tool_call>add</tool_call>", "<tool_call>", free.replace("nothing", "other")):
        assert not lets_through(engine, hermes, text)


@pytest.mark.parametrize(
    ("says", "tool_choice", "arguments"),
    [('{"x": 5}', NAMED, '{"x": 5}'), ('[{"name": "add", "arguments": {"x": 5}}]', "required", '{"x": 5}')],
)
def test_a_stream_has_the_forced_call(
    ask: Call, chunks_of: Read, says: str, tool_choice: object, arguments: str
) -> None:
    chunks = chunks_of(ask(says=says, tools=[ADD], tool_choice=tool_choice, stream=True))
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    (call,) = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert (call["index"], call["function"]) == (0, {"name": "add", "arguments": arguments})
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert all(not delta.get("content") for delta in deltas)


def test_a_required_call_that_was_cut_off_is_shown_as_text(ask: Call) -> None:
    choice = ask(says='[{"name": "add", "argum', tools=[ADD], tool_choice="required", max_tokens=9).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ('[{"name":', "length")


def test_calls_that_were_complete_before_the_cut_are_calls(ask: Call) -> None:
    says = '[{"name": "add", "arguments": {"x": 5}}, {"name": "add", "argum'
    choice = ask(says=says, tools=[ADD], tool_choice="required", max_tokens=50).json()["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"x": 5}'}
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("fields", "parameter"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "response_format"),
        ({"response_format": {"type": "json_object"}, "tools": [NOTHING]}, "response_format"),
        ({"response_format": {"type": "json_object"}, "tools": [ADD], "tool_choice": "required"}, "tools"),
        ({"guided_json": {"type": "strange"}}, "guided_json"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"grammar": "a"}}, "structured_outputs"),
        ({"guided_regex": "a" * 70_000}, None),
        ({"structured_outputs": {"disable_any_whitespace": True}}, "structured_outputs"),
        ({"guided_regex": "a", "guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        ({"guided_json": SCHEMA, "guided_whitespace_pattern": "("}, "guided_json"),
        (
            {"structured_outputs": {"json": {}, "disable_any_whitespace": True, "whitespace_pattern": " "}},
            "structured_outputs",
        ),
        ({"structured_outputs": {"json": {}, "disable_additional_properties": True}}, "structured_outputs"),
    ],
)
def test_wrong_forms_are_refused_by_name(ask: Call, fields: dict[str, object], parameter: str | None) -> None:
    response = ask(**fields)
    assert response.status_code in (400, 413)
    assert (response.json()["error"]["param"] or "").split(".")[0] == (parameter or "")


def test_a_large_grammar_is_refused_before_it_is_prepared(ask: Call) -> None:
    response = ask(guided_choice=["a" * 9_000])
    assert response.status_code == 400
    assert "server.max_grammar_bytes" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a", "guided_regex": "[0-9]+"}),
        ("/generate", {"prompt": "a", "structured_outputs": {"regex": "[0-9]+"}}),
        ("/generate", {"prompts": ["a"], "guided_decoding_regex": "[0-9]+"}),
        ("/generate", {"prompts": ["a"], "structured_outputs_regex": "[0-9]+"}),
        ("/generate", {"text": "a", "sampling_params": {"regex": "[0-9]+"}}),
        ("/generate", {"text": "a", "sampling_params": {"json_schema": '{"type": "integer"}'}}),
        ("/generate", {"prompt": {"prompt_token_ids": [5]}, "guided_regex": "[0-9]+"}),
        ("/inference/v1/generate", {"token_ids": [5], "sampling_params": {"structured_outputs": {"regex": "[0-9]+"}}}),
    ],
)
def test_every_route_that_generates_takes_a_form(
    call_hermes: Call, engine: Any, hermes: Any, path: str, body: dict[str, object]
) -> None:
    assert call_hermes("POST", path, json={"model": "policy"} | body).status_code == 200
    assert lets_through(engine, hermes, "12")
    assert not lets_through(engine, hermes, "a")


def test_a_form_that_is_none_is_refused_in_the_words_of_the_dialect(call_hermes: Call) -> None:
    response = call_hermes("POST", "/generate", json={"prompts": ["a"], "guided_decoding_regex": "("})
    assert response.status_code == 400
    assert "guided_regex" in response.json()["detail"]
