"""LiteLLM as its users call it: `openai/` and `hosted_vllm/` models with the address of a server."""

import asyncio
import json
from typing import Any

import litellm
from checking import DOCUMENTS, MESSAGES, MODEL, QUERY, expect, report, server_and_model, task_servers

URL, _ = server_and_model()
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}},
            "required": ["x"],
            "additionalProperties": False,
        },
    },
}


def complete(provider: str = "openai", **fields: Any) -> Any:
    defaults = {"messages": MESSAGES, "max_tokens": 12, "temperature": 0}
    return litellm.completion(f"{provider}/{MODEL}", api_base=f"{URL}/v1", api_key="none", **defaults | fields)


def a_chat_is_answered() -> None:
    answer = complete()
    expect(answer.choices[0].message.content and answer.usage.completion_tokens > 0, answer)
    expect(answer.choices[0].finish_reason in ("stop", "length"), answer)


def the_provider_for_vllm_gives_the_same_answer() -> None:
    ours, theirs = complete(), complete("hosted_vllm")
    expect(ours.choices[0].message.content == theirs.choices[0].message.content, theirs)


def a_stream_says_the_same_as_a_whole_answer() -> None:
    chunks = list(complete(stream=True, stream_options={"include_usage": True}))
    whole = litellm.stream_chunk_builder(chunks)
    expect(whole.choices[0].message.content == complete().choices[0].message.content, whole)
    expect(whole.usage.completion_tokens > 0, whole)


def an_asynchronous_chat_is_answered() -> None:
    async def ask() -> Any:
        call = litellm.acompletion(
            f"openai/{MODEL}", messages=MESSAGES, api_base=f"{URL}/v1", api_key="none", max_tokens=4
        )
        return await call

    expect(asyncio.run(ask()).choices[0].message.content)


def n_gives_as_many_choices() -> None:
    expect(len(complete(n=3, temperature=1.0).choices) == 3)


def log_probs_are_given() -> None:
    content = complete(logprobs=True, top_logprobs=2).choices[0].logprobs.content
    expect(content[0]["logprob"] <= 0 and len(content[0]["top_logprobs"]) == 2, content)


def a_required_tool_is_called() -> None:
    answer = complete(tools=[TOOL], tool_choice="required", parallel_tool_calls=False, max_tokens=80)
    call = answer.choices[0].message.tool_calls[0]
    expect(call.function.name == "add" and set(json.loads(call.function.arguments)) == {"x"}, call)


def a_text_is_completed() -> None:
    answer: Any = litellm.text_completion(
        "12 + 3 =", f"text-completion-openai/{MODEL}", api_base=f"{URL}/v1", api_key="none", max_tokens=4
    )
    expect(answer.choices[0].text, answer)


def an_unknown_model_is_an_error_of_its_own_kind() -> None:
    try:
        litellm.completion("openai/nobody", messages=MESSAGES, api_base=f"{URL}/v1", api_key="none", max_retries=0)
    except litellm.NotFoundError:
        return
    raise AssertionError("accepted")


def a_prompt_that_is_too_long_is_an_error_of_its_own_kind() -> None:
    try:
        complete(messages=[{"role": "user", "content": "1" * 20_000}], max_retries=0)
    except litellm.ContextWindowExceededError:
        return
    raise AssertionError("accepted")


def texts_become_vectors_by_three_providers() -> None:
    found = []
    for provider, base in (("openai", f"{URL}/v1"), ("hosted_vllm", f"{URL}/v1"), ("infinity", URL)):
        answer: Any = litellm.embedding(f"{provider}/{MODEL}", input=DOCUMENTS, api_base=base, api_key="none")
        found.append([number for one in answer.data for number in one["embedding"]])
        expect(answer.usage.prompt_tokens > 0, answer)
    expect(all(max(abs(x - y) for x, y in zip(found[0], other, strict=True)) < 1e-5 for other in found[1:]))


def documents_are_ranked_in_three_dialects() -> None:
    url, orders = task_servers()["rerank"], []
    for provider in ("hosted_vllm", "jina_ai", "cohere"):
        answer: Any = litellm.rerank(
            f"{provider}/{MODEL}", query=QUERY, documents=DOCUMENTS, top_n=3, api_base=url, api_key="none"
        )
        orders.append([(one["index"], round(one["relevance_score"], 5)) for one in answer.results])
    expect(len(orders[0]) == 3 and orders[0] == orders[1] == orders[2], orders)


if __name__ == "__main__":
    report(
        "litellm",
        [
            a_chat_is_answered,
            the_provider_for_vllm_gives_the_same_answer,
            a_stream_says_the_same_as_a_whole_answer,
            an_asynchronous_chat_is_answered,
            n_gives_as_many_choices,
            log_probs_are_given,
            a_required_tool_is_called,
            a_text_is_completed,
            an_unknown_model_is_an_error_of_its_own_kind,
            a_prompt_that_is_too_long_is_an_error_of_its_own_kind,
            texts_become_vectors_by_three_providers,
            documents_are_ranked_in_three_dialects,
        ],
    )
