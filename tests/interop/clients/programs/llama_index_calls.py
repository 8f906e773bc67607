"""LlamaIndex's Ollama class against our address."""

import asyncio
from typing import Any

from checking import MODEL, QUESTION, expect, report, server_and_model, task_servers
from llama_index.core.base.llms.types import TextBlock, ThinkingBlock
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.ollama import Ollama
from pydantic import BaseModel, ConfigDict, Field

URL, _ = server_and_model()
CALLING = task_servers()["calls"]
LONG = 200
QUESTIONS = [ChatMessage(role="system", content="You add."), ChatMessage(role="user", content=QUESTION)]


class Sum(BaseModel):
    """What the model is asked to fill in."""

    model_config = ConfigDict(extra="forbid")

    x: int = Field(ge=0, le=99)


def add(x: int) -> int:
    """Adds."""
    return x


def llm(url: str = URL, **fields: Any) -> Ollama:
    options = {"num_predict": LONG if url == CALLING else 12}
    return Ollama(MODEL, base_url=url, temperature=0, **{"additional_kwargs": options} | fields)


def its_context_is_that_of_the_model() -> None:
    expect(llm().metadata.context_window == 1024, llm().metadata)


def a_chat_is_answered() -> None:
    answer = llm().chat(QUESTIONS)
    expect(answer.message.content and answer.raw["usage"]["completion_tokens"] > 0, answer)


def a_stream_says_the_same_as_a_whole_answer() -> None:
    expect("".join(part.delta or "" for part in llm().stream_chat(QUESTIONS)) == llm().chat(QUESTIONS).message.content)


def an_asynchronous_chat_is_answered() -> None:
    async def ask() -> Any:
        return await llm().achat(QUESTIONS)

    expect(asyncio.run(ask()).message.content == llm().chat(QUESTIONS).message.content)


def a_prompt_is_completed() -> None:
    whole = llm().complete(QUESTION).text
    expect("".join(part.delta or "" for part in llm().stream_complete(QUESTION)) == whole, whole)


def an_object_of_any_form_is_given() -> None:
    expect(llm(json_mode=True, additional_kwargs={"num_predict": LONG}).complete(QUESTION).text.startswith("{"))


def structured_output_is_enforced() -> None:
    asked = llm(additional_kwargs={"num_predict": LONG})
    expect(isinstance(asked.structured_predict(Sum, PromptTemplate(QUESTION)), Sum))


def functions_are_called() -> None:
    answer = llm(CALLING).chat_with_tools([FunctionTool.from_defaults(add)], user_msg=QUESTION)
    (call,) = llm(CALLING).get_tool_calls_from_response(answer)
    expect((call.tool_name, call.tool_kwargs) == ("add", {"x": 7}), answer)


def a_function_is_called_and_answered() -> None:
    answer = llm(CALLING).predict_and_call([FunctionTool.from_defaults(add)], user_msg=QUESTION)
    expect(str(answer) == "7", answer)
    called = llm(CALLING).chat_with_tools([FunctionTool.from_defaults(add)], user_msg=QUESTION).message
    history = [*QUESTIONS, called, ChatMessage(role="tool", content="7")]
    expect(llm(CALLING).chat(history).message.content == "7")


def thoughts_stand_apart() -> None:
    blocks = llm(CALLING, thinking=True).chat(QUESTIONS).message.blocks
    thoughts = [block.content for block in blocks if isinstance(block, ThinkingBlock)]
    texts = [block.text for block in blocks if isinstance(block, TextBlock)]
    expect((thoughts, texts) == (["I add."], ["7"]), blocks)


if __name__ == "__main__":
    report(
        "llama-index-llms-ollama",
        [
            its_context_is_that_of_the_model,
            a_chat_is_answered,
            a_stream_says_the_same_as_a_whole_answer,
            an_asynchronous_chat_is_answered,
            a_prompt_is_completed,
            an_object_of_any_form_is_given,
            structured_output_is_enforced,
            functions_are_called,
            a_function_is_called_and_answered,
            thoughts_stand_apart,
        ],
    )
