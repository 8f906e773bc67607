"""LiteLLM's providers `ollama/` (prompts) and `ollama_chat/` (chats) with the address of a server."""

import asyncio
import json
from typing import Any

import litellm
from checking import DOCUMENTS, MESSAGES, MODEL, expect, report, server_and_model, task_servers

URL, _ = server_and_model()
CALLING = task_servers()["calls"]
LONG = 200
PROVIDERS = ("ollama", "ollama_chat")
SCHEMA = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["x"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA}}


def complete(provider: str = "ollama_chat", url: str = URL, **fields: Any) -> Any:
    defaults = {"messages": MESSAGES, "max_tokens": LONG if url == CALLING else 12, "temperature": 0}
    return litellm.completion(f"{provider}/{MODEL}", api_base=url, **defaults | fields)


def chats_are_answered() -> None:
    for provider in PROVIDERS:
        answer = complete(provider)
        expect(answer.choices[0].message.content and answer.usage.completion_tokens > 0, answer)
        expect(answer.choices[0].finish_reason in ("stop", "length"), answer)


def a_stream_says_the_same_as_a_whole_answer() -> None:
    for provider in PROVIDERS:
        whole = litellm.stream_chunk_builder(list(complete(provider, stream=True)))
        expect(whole.choices[0].message.content == complete(provider).choices[0].message.content, whole)


def an_asynchronous_chat_is_answered() -> None:
    async def ask(provider: str) -> Any:
        return await litellm.acompletion(f"{provider}/{MODEL}", messages=MESSAGES, api_base=URL, max_tokens=4)

    for provider in PROVIDERS:
        expect(asyncio.run(ask(provider)).choices[0].message.content)


def its_parameters_are_read() -> None:
    for provider in PROVIDERS:
        answer = complete(provider, top_p=0.9, seed=3, stop=["\n\n"], num_ctx=512, num_gpu=1, mirostat=0)
        expect(answer.usage.completion_tokens > 0, answer)


def a_schema_is_enforced() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SCHEMA}}
    for provider in PROVIDERS:
        answer = complete(provider, response_format=form, max_tokens=LONG)
        expect(isinstance(json.loads(answer.choices[0].message.content)["x"], int), answer)


def functions_are_called_and_answered() -> None:
    answer = complete(url=CALLING, tools=[TOOL], reasoning_effort="none")
    (call,) = answer.choices[0].message.tool_calls
    expect((call.function.name, json.loads(call.function.arguments)) == ("add", {"x": 7}), answer)
    expect(answer.choices[0].finish_reason == "tool_calls", answer)
    result = {"role": "tool", "tool_call_id": call.id, "content": "7"}
    messages = [*MESSAGES, answer.choices[0].message.model_dump(), result]
    expect(complete(url=CALLING, tools=[TOOL], messages=messages).choices[0].message.content == "7")


def functions_are_called_in_a_stream() -> None:
    whole = litellm.stream_chunk_builder(list(complete(url=CALLING, tools=[TOOL], stream=True)))
    expect(whole.choices[0].message.tool_calls[0].function.name == "add", whole)


def thoughts_stand_apart() -> None:
    for provider in PROVIDERS:
        message = complete(provider, CALLING, reasoning_effort="low").choices[0].message
        expect((message.reasoning_content, message.content) == ("I add.", "7"), message)


def an_unknown_model_is_an_error_of_its_own_kind() -> None:
    try:
        litellm.completion("ollama_chat/nobody", messages=MESSAGES, api_base=URL, max_retries=0)
    except litellm.exceptions.APIConnectionError as error:
        expect("not found" in str(error), error)  # LiteLLM makes this of all of Ollama's errors
        return
    except litellm.NotFoundError:
        return
    raise AssertionError("accepted")


def texts_become_vectors() -> None:
    answer: Any = litellm.embedding(f"ollama/{MODEL}", input=DOCUMENTS, api_base=URL)
    expect(len(answer.data) == 3 and answer.usage.prompt_tokens > 0, answer)


def models_are_listed() -> None:
    names = litellm.get_valid_models(check_provider_endpoint=True, custom_llm_provider="ollama", api_base=URL)
    expect("ollama/base:latest" in names, names)


if __name__ == "__main__":
    report(
        "litellm",
        [
            chats_are_answered,
            a_stream_says_the_same_as_a_whole_answer,
            an_asynchronous_chat_is_answered,
            its_parameters_are_read,
            a_schema_is_enforced,
            functions_are_called_and_answered,
            functions_are_called_in_a_stream,
            thoughts_stand_apart,
            an_unknown_model_is_an_error_of_its_own_kind,
            texts_become_vectors,
            models_are_listed,
        ],
    )
