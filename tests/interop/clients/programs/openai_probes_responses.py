"""Probes of `/v1/responses`."""

import json
from typing import Any

import openai
from openai_probes import ASK, FLAT, SCHEMA, Client, bad, chat, expect, probe, refused, respond
from pydantic import BaseModel, Field


class Point(BaseModel):
    x: int = Field(ge=0, le=99)


@probe
def a_string_is_answered(client: Client) -> None:
    answer = respond(client)
    expect(answer.object == "response" and answer.id.startswith("resp_") and answer.error is None, answer)
    expect(answer.output_text == chat(client, max_completion_tokens=16).choices[0].message.content, answer)


@probe
def a_list_is_answered(client: Client) -> None:
    items = [{"role": "user", "content": [{"type": "input_text", "text": ASK[0]["content"]}]}]
    expect(respond(client, input=items).output_text == respond(client).output_text)


@probe
def instructions_are_the_system(client: Client) -> None:
    asked = chat(client, messages=[{"role": "system", "content": "Add."}, *ASK]).usage.prompt_tokens
    expect(respond(client, instructions="Add.").usage.input_tokens == asked)


@probe
def items_are_sent_back(client: Client) -> None:
    first = respond(client)
    items: list[Any] = [*ASK, *first.output, {"role": "user", "content": "And 2 more?"}]
    expect(respond(client, input=items).usage.input_tokens > first.usage.total_tokens)
    items[1] = first.output[0].to_dict()
    expect(respond(client, input=items).output_text)


@probe
def response_usage_adds_up(client: Client) -> None:
    usage = respond(client).usage
    expect(usage.input_tokens + usage.output_tokens == usage.total_tokens, usage)
    expect(usage.input_tokens_details.cached_tokens >= 0 and usage.output_tokens_details.reasoning_tokens == 0, usage)


@probe
def a_limit_makes_it_incomplete(client: Client) -> None:
    answer = respond(client, max_output_tokens=2)
    expect(answer.status == "incomplete" and answer.incomplete_details.reason == "max_output_tokens", answer)


@probe
def a_response_stream_has_the_official_events(client: Client) -> None:
    events = list(respond(client, stream=True))
    names = [event.type for event in events]
    expect(
        names[:4]
        == ["response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"]
    )
    expect([event.sequence_number for event in events] == list(range(len(events))), names)
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    expect(text == respond(client).output_text == events[-1].response.output_text, text)


@probe
def the_response_stream_helper_adds_up(client: Client) -> None:
    with client.responses.stream(model="base", input=ASK[0]["content"], max_output_tokens=60, temperature=0) as stream:
        for _ in stream:
            pass
        final = stream.get_final_response()
    expect(final.output_text == respond(client, max_output_tokens=60).output_text, final)


@probe
def a_text_format_is_enforced(client: Client) -> None:
    asked = {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}
    answer = respond(client, text={"format": asked}, max_output_tokens=400)
    expect(list(json.loads(answer.output_text)) == ["x"] and answer.text.format.type == "json_schema", answer)


@probe
def a_pydantic_type_is_parsed(client: Client) -> None:
    answer = client.responses.parse(model="base", input="12", text_format=Point, max_output_tokens=300, temperature=0)
    if answer.status == "completed":
        expect(isinstance(answer.output_parsed, Point), answer)


@probe
def a_response_calls_a_function(client: Client) -> None:
    choice = {"type": "function", "name": "add"}
    (call,) = respond(client, tools=[FLAT], tool_choice=choice, max_output_tokens=400).output
    expect(call.type == "function_call" and call.name == "add" and list(json.loads(call.arguments)) == ["x"], call)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "7"}
    expect(respond(client, input=[*ASK, call, result], tools=[FLAT]).output)


@probe
def a_response_call_is_streamed(client: Client) -> None:
    choice = {"type": "function", "name": "add"}
    events = list(respond(client, tools=[FLAT], tool_choice=choice, max_output_tokens=400, stream=True))
    done = next(event for event in events if event.type == "response.function_call_arguments.done")
    expect(json.loads(done.arguments) == json.loads(events[-1].response.output[0].arguments), done)


@probe
def metadata_comes_back(client: Client) -> None:
    answer = respond(client, metadata={"a": "b"}, user="me", store=False)
    expect(answer.metadata == {"a": "b"}, answer)


@probe
def what_responses_cannot_do_is_refused(client: Client) -> None:
    fields: dict[str, Any] = {
        "background": True,
        "conversation": "conv_1",
        "include": ["reasoning.encrypted_content"],
        "max_tool_calls": 1,
        "previous_response_id": "resp_1",
        "prompt": {"id": "pmpt_1"},
        "reasoning": {"effort": "high"},
        "service_tier": "flex",
        "store": True,
        "tools": [{"type": "web_search"}],
        "top_logprobs": 3,
        "truncation": "auto",
    }
    for name, value in fields.items():
        bad(name, lambda name=name, value=value: respond(client, **{name: value}))  # type: ignore[misc]


@probe
def wrong_response_values_are_refused(client: Client) -> None:
    bad("temperature", lambda: respond(client, temperature=3))
    bad("input", lambda: respond(client, input=[{"type": "item_reference", "id": "1"}]))
    bad("max_output_tokens", lambda: respond(client, max_output_tokens=0))
    refused(openai.NotFoundError, "model", lambda: respond(client, model="nope"))
    refused(openai.NotFoundError, "model", lambda: respond(client, model="nope", stream=True))
