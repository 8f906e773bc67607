"""Probes of `/v1/chat/completions`."""

import json
from typing import Any

import openai
from openai_probes import ADD, ASK, NAMED, SCHEMA, Client, bad, chat, expect, honoured, probe, refused, text_of

SCHEMA_FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}


def is_x(text: str) -> bool:
    value = json.loads(text)
    return list(value) == ["x"] and isinstance(value["x"], int)


@probe
def a_message_is_answered(client: Client) -> None:
    answer = chat(client)
    message = answer.choices[0].message
    expect(answer.object == "chat.completion" and answer.id.startswith("chatcmpl-"), answer)
    expect(message.role == "assistant" and message.content and not message.tool_calls and not message.refusal, message)


@probe
def chat_usage_adds_up(client: Client) -> None:
    usage = chat(client).usage
    expect(usage.prompt_tokens > 0 and usage.prompt_tokens + usage.completion_tokens == usage.total_tokens, usage)


@probe
def roles_and_parts_are_read(client: Client) -> None:
    parts = [{"type": "text", "text": "12 "}, {"type": "text", "text": "+ 3"}]
    for role in ("system", "developer"):
        answer = chat(client, messages=[{"role": role, "content": "Add."}, {"role": "user", "content": parts}])
        joined = chat(client, messages=[{"role": role, "content": "Add."}, {"role": "user", "content": "12 + 3"}])
        expect(answer.choices[0].message.content == joined.choices[0].message.content, answer)


@probe
def an_answer_is_sent_back_as_it_came(client: Client) -> None:
    answer = chat(client).choices[0].message
    expect(chat(client, messages=[*ASK, answer, *ASK]).choices)
    expect(chat(client, messages=[*ASK, answer.to_dict(), *ASK]).choices)


@probe
def images_are_refused(client: Client) -> None:
    parts = [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/a.png"}}]
    bad("messages", lambda: chat(client, messages=[{"role": "user", "content": parts}]))


@probe
def a_name_is_honoured_or_refused(client: Client) -> None:
    bad("messages", lambda: chat(client, messages=[{"role": "user", "content": "a", "name": "Mia"}]))


@probe
def chat_n_gives_choices(client: Client) -> None:
    expect([choice.index for choice in chat(client, n=3, temperature=1).choices] == [0, 1, 2])


@probe
def both_names_of_the_limit_are_read(client: Client) -> None:
    new = chat(client, max_completion_tokens=2)
    old = client.chat.completions.create(model="base", messages=ASK, max_tokens=2, temperature=0)
    expect(new.usage.completion_tokens == old.usage.completion_tokens == 2, (new, old))
    expect(new.choices[0].finish_reason == "length", new)


@probe
def chat_seed_repeats(client: Client) -> None:
    expect(len({chat(client, temperature=1, seed=5).choices[0].message.content for _ in range(3)}) == 1)


@probe
def chat_stop_is_cut_off(client: Client) -> None:
    whole = chat(client, max_completion_tokens=30).choices[0].message.content
    choice = chat(client, max_completion_tokens=30, stop=whole[2:4]).choices[0]
    expect(choice.message.content == whole[: whole.index(whole[2:4])] and choice.finish_reason == "stop", choice)


@probe
def chat_logprobs_have_alternatives(client: Client) -> None:
    choice = chat(client, logprobs=True, top_logprobs=3).choices[0]
    entries = choice.logprobs.content
    expect("".join(entry.token for entry in entries).startswith(choice.message.content), entries)
    expect(all(len(entry.top_logprobs) == 3 and entry.logprob <= 0 for entry in entries), entries)
    expect(all(entry.bytes == list(entry.token.encode()) for entry in entries), entries)


@probe
def top_logprobs_need_logprobs(client: Client) -> None:
    bad("top_logprobs", lambda: chat(client, top_logprobs=2))
    bad("top_logprobs", lambda: chat(client, logprobs=True, top_logprobs=1000))


@probe
def a_chat_stream_says_the_same(client: Client) -> None:
    chunks = list(chat(client, stream=True))
    expect(chunks[0].choices[0].delta.role == "assistant", chunks[0])
    expect(text_of(chunks) == chat(client).choices[0].message.content, chunks)
    expect(chunks[-1].choices[0].finish_reason in ("stop", "length"), chunks[-1])


@probe
def a_chat_stream_tells_usage_when_asked(client: Client) -> None:
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    expect(chunks[-1].usage.total_tokens == chat(client).usage.total_tokens and not chunks[-1].choices, chunks[-1])


@probe
def a_chat_stream_has_logprobs(client: Client) -> None:
    chunks = list(chat(client, stream=True, logprobs=True, top_logprobs=1))
    told = [
        entry for chunk in chunks for choice in chunk.choices if choice.logprobs for entry in choice.logprobs.content
    ]
    whole = chat(client, logprobs=True, top_logprobs=1).choices[0].logprobs.content
    expect([entry.token for entry in told] == [entry.token for entry in whole], told)


@probe
def a_chat_stream_of_several_choices_keeps_them_apart(client: Client) -> None:
    chunks = list(chat(client, stream=True, n=2, temperature=1, seed=3))
    whole = chat(client, n=2, temperature=1, seed=3)
    expect([text_of(chunks, index) for index in (0, 1)] == [choice.message.content for choice in whole.choices], chunks)


@probe
def the_stream_helper_adds_up(client: Client) -> None:
    with client.chat.completions.stream(model="base", messages=ASK, max_completion_tokens=200, temperature=0) as stream:
        final = stream.get_final_completion()
    whole = chat(client, max_completion_tokens=200)
    expect(final.choices[0].message.content == whole.choices[0].message.content, final)


@probe
def an_unknown_chat_model_is_not_found(client: Client) -> None:
    refused(openai.NotFoundError, "model", lambda: chat(client, model="policy@77777"))
    refused(openai.NotFoundError, "model", lambda: chat(client, model="nope", stream=True))


@probe
def json_objects_are_enforced(client: Client) -> None:
    answer = chat(client, response_format={"type": "json_object"}, max_completion_tokens=300, temperature=1, seed=1)
    choice = answer.choices[0]
    expect(choice.message.content.lstrip().startswith("{"), answer)
    expect(choice.finish_reason == "length" or isinstance(json.loads(choice.message.content), dict), answer)


@probe
def schemas_are_enforced(client: Client) -> None:
    answer = chat(client, response_format=SCHEMA_FORMAT, max_completion_tokens=400, temperature=1, n=4)
    expect(all(is_x(choice.message.content) for choice in answer.choices), answer)


@probe
def schemas_are_enforced_in_streams(client: Client) -> None:
    expect(is_x(text_of(list(chat(client, response_format=SCHEMA_FORMAT, max_completion_tokens=400, stream=True)))))


@probe
def wrong_schemas_are_refused(client: Client) -> None:
    wrong = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strange"}}}
    bad("response_format", lambda: chat(client, response_format=wrong))
    bad("response_format", lambda: chat(client, response_format={"type": "xml"}))


@probe
def a_named_function_is_called(client: Client) -> None:
    answer = chat(client, tools=[ADD], tool_choice=NAMED, max_completion_tokens=400)
    (call,) = answer.choices[0].message.tool_calls
    expect(call.function.name == "add" and is_x(call.function.arguments) and call.type == "function", answer)
    expect(answer.choices[0].message.content is None, answer)


@probe
def a_required_call_is_made(client: Client) -> None:
    answer = chat(
        client, tools=[ADD], tool_choice="required", parallel_tool_calls=False, max_completion_tokens=400, temperature=1
    )
    (call,) = answer.choices[0].message.tool_calls
    expect(call.function.name == "add" and is_x(call.function.arguments), answer)
    expect(answer.choices[0].finish_reason == "tool_calls", answer)


@probe
def a_call_is_streamed(client: Client) -> None:
    for choice in (NAMED, "required"):
        with client.chat.completions.stream(
            model="base",
            messages=ASK,
            tools=[ADD],
            tool_choice=choice,
            parallel_tool_calls=False,
            max_completion_tokens=400,
            temperature=0,
        ) as stream:
            final = stream.get_final_completion()
        (call,) = final.choices[0].message.tool_calls
        expect(call.function.name == "add" and is_x(call.function.arguments) and call.id, final)


@probe
def a_call_and_its_result_are_sent_back(client: Client) -> None:
    message = chat(client, tools=[ADD], tool_choice=NAMED, max_completion_tokens=400).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "7"}
    expect(chat(client, messages=[*ASK, message, result], tools=[ADD]).choices)
    bad("messages", lambda: chat(client, messages=[*ASK, message, result | {"tool_call_id": "other"}], tools=[ADD]))


@probe
def tools_are_shown_to_the_model(client: Client) -> None:
    alone = chat(client).usage.prompt_tokens
    expect(chat(client, tools=[ADD]).usage.prompt_tokens > alone)
    expect(chat(client, tools=[ADD], tool_choice="none").usage.prompt_tokens == alone)


@probe
def wrong_tools_are_refused(client: Client) -> None:
    bad("tools", lambda: chat(client, tools=[{"type": "custom", "custom": {"name": "a"}}]))
    bad("tool_choice", lambda: chat(client, tools=[ADD], tool_choice={"type": "function", "function": {"name": "b"}}))
    bad("tool_choice", lambda: chat(client, tool_choice="required"))
    bad("functions", lambda: chat(client, functions=[{"name": "a", "parameters": {}}]))


@probe
def strict_tools_with_auto_are_honoured_or_refused(client: Client) -> None:
    strict = {"type": "function", "function": ADD["function"] | {"strict": True}}
    call = lambda: chat(client, tools=[strict])  # noqa: E731
    honoured("tools", call, lambda answer: answer.choices[0].message.content)


@probe
def template_variables_are_set_or_refused(client: Client) -> None:
    begun = chat(client, extra_body={"chat_template_kwargs": {"prefix": "12 + 3 ="}, "return_token_ids": True})
    plain = chat(client, extra_body={"return_token_ids": True})
    expect(len(begun.model_extra["prompt_token_ids"]) > len(plain.model_extra["prompt_token_ids"]))
    bad("chat_template_kwargs", lambda: chat(client, extra_body={"chat_template_kwargs": {"other": 1}}))


@probe
def the_last_message_is_continued(client: Client) -> None:
    messages = [*ASK, {"role": "assistant", "content": "3 + 4 ="}]
    body = {"continue_final_message": True, "add_generation_prompt": False}
    continued = chat(client, messages=messages, extra_body=body).usage.prompt_tokens
    ended = chat(client, messages=messages, extra_body={"add_generation_prompt": False}).usage.prompt_tokens
    expect(continued == ended - 1, "the turn's end is one token")


@probe
def what_chats_cannot_do_is_refused(client: Client) -> None:
    fields: dict[str, Any] = {
        "audio": {"voice": "alloy", "format": "wav"},
        "metadata": {"a": "b"},
        "modalities": ["text", "audio"],
        "prediction": {"type": "content", "content": "a"},
        "reasoning_effort": "high",
        "service_tier": "flex",
        "store": True,
        "verbosity": "low",
        "web_search_options": {},
        "function_call": {"name": "a"},
    }
    for name, value in fields.items():
        bad(name, lambda name=name, value=value: chat(client, **{name: value}))  # type: ignore[misc]


@probe
def what_asks_for_nothing_is_accepted(client: Client) -> None:
    expect(chat(client, user="a", store=False, modalities=["text"], service_tier="auto", metadata={}, n=1).choices)
    expect(chat(client, safety_identifier="a", prompt_cache_key="b", response_format={"type": "text"}).choices)


@probe
def chat_logit_bias_is_honoured_or_refused(client: Client) -> None:
    choice = chat(client, extra_body={"return_token_ids": True}).choices[0]
    call = lambda: chat(client, logit_bias={str(choice.model_extra["token_ids"][0]): -100})  # noqa: E731
    honoured("logit_bias", call, lambda answer: answer.choices[0].message.content != choice.message.content)


@probe
def chat_penalties_are_honoured_or_refused(client: Client) -> None:
    whole = chat(client, max_completion_tokens=40).choices[0].message.content
    for name in ("presence_penalty", "frequency_penalty"):
        call = lambda name=name: chat(client, max_completion_tokens=40, **{name: 2})  # type: ignore[misc]  # noqa: E731
        honoured(name, call, lambda answer: answer.choices[0].message.content != whole)


@probe
def wrong_messages_are_refused(client: Client) -> None:
    for messages in ([], [{"role": "narrator", "content": "a"}], [{"role": "user"}], [{"role": "user", "content": 5}]):
        bad("messages", lambda messages=messages: chat(client, messages=messages))  # type: ignore[misc]


@probe
def a_chat_that_is_too_long_says_so(client: Client) -> None:
    try:
        chat(client, messages=[{"role": "user", "content": "1" * 20_000}])
    except openai.BadRequestError as error:
        expect(error.code == "context_length_exceeded", error)
        return
    raise AssertionError("accepted")
