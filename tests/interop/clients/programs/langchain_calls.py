"""LangChain's ChatOpenAI and OpenAI classes against our address."""

import asyncio
from typing import Any

from checking import MODEL, QUESTION, expect, report, server_and_model
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from openai import BadRequestError
from pydantic import BaseModel, ConfigDict, Field

URL, _ = server_and_model()
LONG = 80
"""Room for a call as JSON, in which the small model has a token for each character."""


class Sum(BaseModel):
    """What the model is asked to fill in."""

    model_config = ConfigDict(extra="forbid")  # else an untrained model invents more fields

    x: int = Field(ge=0, le=99)


@tool(args_schema=Sum)
def add(x: int) -> int:
    """Adds."""
    return x


def chat(**fields: Any) -> ChatOpenAI:
    return ChatOpenAI(
        base_url=f"{URL}/v1", api_key="none", model=MODEL, **{"temperature": 0, "max_tokens": 12} | fields
    )


def a_chat_is_answered() -> None:
    answer = chat().invoke([SystemMessage("You add."), HumanMessage(QUESTION)])
    expect(answer.content and answer.usage_metadata and answer.usage_metadata["output_tokens"] > 0, answer)


def a_stream_says_the_same_as_a_whole_answer() -> None:
    text = "".join(str(chunk.content) for chunk in chat().stream(QUESTION))
    expect(text == chat().invoke(QUESTION).content, text)


def a_batch_is_answered_in_order() -> None:
    questions = ["1 + 2 =", "5 + 4 =", QUESTION]
    expect([answer.content for answer in chat().batch(questions)] == [chat().invoke(one).content for one in questions])


def an_asynchronous_stream_is_read() -> None:
    async def read() -> list[Any]:
        return [chunk async for chunk in chat().astream(QUESTION)]

    expect("".join(chunk.content for chunk in asyncio.run(read())) == chat().invoke(QUESTION).content)


def a_required_tool_is_called() -> None:
    options = {"tool_choice": "required", "strict": True, "parallel_tool_calls": False}
    calls = chat(max_tokens=LONG).bind_tools([add], **options).invoke(QUESTION).tool_calls
    expect(calls[0]["name"] == "add" and isinstance(calls[0]["args"]["x"], int), calls)


def a_named_tool_is_called_in_a_stream() -> None:
    bound = chat(max_tokens=LONG).bind_tools([add], tool_choice="add", strict=True)
    chunks = list(bound.stream(QUESTION))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    expect(whole.tool_calls[0]["name"] == "add", whole)


def a_conversation_with_a_tool_goes_on() -> None:
    called = AIMessage("", tool_calls=[{"name": "add", "args": {"x": 7}, "id": "call_1"}])
    messages = [HumanMessage(QUESTION), called, ToolMessage("7", tool_call_id="call_1")]
    expect(chat().bind_tools([add]).invoke(messages).response_metadata["finish_reason"] in ("stop", "length"))


def structured_output_is_enforced() -> None:
    for method in ("json_schema", "function_calling"):
        asked = chat(max_tokens=LONG).with_structured_output(Sum, method=method)
        expect(isinstance(asked.invoke(QUESTION), Sum), method)


def log_probs_are_given() -> None:
    content = chat(logprobs=True, top_logprobs=2).invoke(QUESTION).response_metadata["logprobs"]["content"]
    expect(len(content[0]["top_logprobs"]) == 2, content)


def responses_are_answered() -> None:
    answer = chat(use_responses_api=True, max_tokens=16).invoke(QUESTION)
    expect(answer.text, answer)


def a_text_is_completed() -> None:
    llm = OpenAI(base_url=f"{URL}/v1", api_key="none", model=MODEL, temperature=0, max_tokens=4)
    expect(llm.invoke("12 + 3 ="))


def embeddings(**fields: Any) -> OpenAIEmbeddings:
    return OpenAIEmbeddings(base_url=f"{URL}/v1", api_key="none", model=MODEL, max_retries=0, **fields)


def texts_become_vectors() -> None:
    vectors = embeddings(check_embedding_ctx_length=False).embed_documents([QUESTION, "12 + 3 ="])
    alone = embeddings(check_embedding_ctx_length=False).embed_query(QUESTION)
    expect(len(vectors) == 2 and max(abs(x - y) for x, y in zip(vectors[0], alone, strict=True)) < 1e-5)


def token_ids_of_another_tokenizer_are_refused_with_the_way_out() -> None:
    """By default LangChain sends ids of OpenAI's tokenizer, which it would download; so these are sent as it does."""
    given = embeddings(check_embedding_ctx_length=False)
    try:
        given.client.create(input=[[99_999, 100_000]], model=MODEL)
    except BadRequestError as error:
        expect("check_embedding_ctx_length=False" in str(error), error)
        return
    raise AssertionError("accepted")


if __name__ == "__main__":
    report(
        "langchain-openai",
        [
            a_chat_is_answered,
            a_stream_says_the_same_as_a_whole_answer,
            a_batch_is_answered_in_order,
            an_asynchronous_stream_is_read,
            a_required_tool_is_called,
            a_named_tool_is_called_in_a_stream,
            a_conversation_with_a_tool_goes_on,
            structured_output_is_enforced,
            log_probs_are_given,
            responses_are_answered,
            a_text_is_completed,
            texts_become_vectors,
            token_ids_of_another_tokenizer_are_refused_with_the_way_out,
        ],
    )
