"""Prime Intellect's renderers: messages to token ids here, /inference/v1/generate there, and back to a message."""

import asyncio
from typing import Any

import openai
from checking import MESSAGES, MODEL, expect, report, server_and_model
from renderers import DefaultRenderer, DefaultRendererConfig
from renderers.client import OverlongPromptError, generate
from transformers import AutoTokenizer

URL, FOLDER = server_and_model()
TOKENIZER = AutoTokenizer.from_pretrained(FOLDER)
RENDERER = DefaultRenderer(TOKENIZER, DefaultRendererConfig())


def ask(**fields: Any) -> dict[str, Any]:
    async def call() -> dict[str, Any]:
        async with openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0) as client:
            sampling = {"temperature": 1.0, "top_p": 1.0, "max_tokens": 12, "n": 1, "top_k": -1, "min_p": 0.0}
            defaults = {"messages": MESSAGES, "model": MODEL, "sampling_params": sampling}
            return await generate(client=client, renderer=RENDERER, **defaults | fields)

    return asyncio.run(call())


def a_chat_is_rendered_here_and_generated_there() -> None:
    answer = ask()
    ids = TOKENIZER.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    expect(answer["prompt_ids"] == ids, answer)
    expect(0 < len(answer["completion_ids"]) == len(answer["completion_logprobs"]) <= 12, answer)
    expect(all(value <= 0 for value in answer["completion_logprobs"]), answer)
    expect(answer["finish_reason"] in ("stop", "length") and answer["request_id"], answer)


def a_greedy_answer_is_the_one_of_the_chat_endpoint() -> None:
    answer = ask(sampling_params={"temperature": 0.0, "max_tokens": 24})
    with openai.OpenAI(base_url=f"{URL}/v1", api_key="none") as client:
        messages: Any = MESSAGES
        chat = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=24)
    expect(answer["content"] == chat.choices[0].message.content, answer)


def a_prompt_of_token_ids_with_priority_and_salt_is_answered() -> None:
    prompt = TOKENIZER.encode("12 + 3 =")
    answer = ask(messages=[], prompt_ids=prompt, cache_salt="3", priority=0)
    expect(answer["prompt_ids"] == prompt and answer["completion_ids"], answer)


def a_prompt_beyond_the_context_is_noticed_before_it_is_sent() -> None:
    try:
        ask(messages=[{"role": "user", "content": "1" * 5_000}])
    except OverlongPromptError:
        return
    raise AssertionError("accepted: the model's card has no max_model_len that it can read")


if __name__ == "__main__":
    report(
        "renderers",
        [
            a_chat_is_rendered_here_and_generated_there,
            a_greedy_answer_is_the_one_of_the_chat_endpoint,
            a_prompt_of_token_ids_with_priority_and_salt_is_answered,
            a_prompt_beyond_the_context_is_noticed_before_it_is_sent,
        ],
    )
