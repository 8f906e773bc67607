"""LangChain's ChatOllama, OllamaLLM and OllamaEmbeddings against our address."""

import asyncio
from typing import Any

from checking import MODEL, QUESTION, expect, report, server_and_model, task_servers
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_ollama import ChatOllama, OllamaEmbeddings, OllamaLLM
from pydantic import BaseModel, ConfigDict, Field

URL, _ = server_and_model()
CALLING = task_servers()["calls"]
LONG = 200


class Sum(BaseModel):
    """What the model is asked to fill in."""

    model_config = ConfigDict(extra="forbid")  # else an untrained model invents more fields

    x: int = Field(ge=0, le=99)


class Add(Sum):
    """The function that the scripted model calls."""

    model_config = ConfigDict(title="add")


@tool(args_schema=Sum)
def add(x: int) -> int:
    """Adds."""
    return x


def chat(url: str = URL, **fields: Any) -> ChatOllama:
    return ChatOllama(
        base_url=url, **{"model": MODEL, "temperature": 0, "num_predict": LONG if url == CALLING else 12} | fields
    )


def a_model_is_validated() -> None:
    for name in ("base", "policy:latest"):
        chat(model=name, validate_model_on_init=True)
    try:
        chat(model="nobody", validate_model_on_init=True)
    except ValueError as error:
        expect("not found" in str(error), error)
        return
    raise AssertionError("accepted")


def a_chat_is_answered() -> None:
    answer = chat().invoke([SystemMessage("You add."), HumanMessage(QUESTION)])
    expect(answer.content and answer.usage_metadata and answer.usage_metadata["output_tokens"] > 0, answer)
    expect(answer.response_metadata["done_reason"] in ("stop", "length"), answer)


def a_stream_says_the_same_as_a_whole_answer() -> None:
    text = "".join(str(chunk.content) for chunk in chat().stream(QUESTION))
    expect(text == chat().invoke(QUESTION).content, text)


def an_asynchronous_stream_is_read() -> None:
    async def read() -> list[Any]:
        return [chunk async for chunk in chat().astream(QUESTION)]

    expect("".join(chunk.content for chunk in asyncio.run(read())) == chat().invoke(QUESTION).content)


def all_of_its_settings_are_read() -> None:
    answer = chat(
        mirostat=0,
        mirostat_eta=0.1,
        mirostat_tau=5.0,
        num_ctx=4096,
        num_gpu=1,
        num_thread=4,
        repeat_last_n=-1,
        repeat_penalty=1.1,
        seed=3,
        stop=["\n\n"],
        tfs_z=1.0,
        top_k=20,
        top_p=0.9,
        keep_alive="10m",
    ).invoke(QUESTION)
    expect(answer.usage_metadata, answer)


def structured_output_is_enforced() -> None:
    for method in ("json_schema", "json_mode"):
        asked = chat(num_predict=LONG).with_structured_output(Sum, method=method, include_raw=True)
        answer: Any = asked.invoke(QUESTION)
        # json_mode asks for any object, which only a trained model fills with these fields
        expect(isinstance(answer["parsed"], Sum) if method == "json_schema" else answer["raw"].content, answer)


def functions_are_called_and_answered() -> None:
    bound = chat(CALLING, reasoning=False).bind_tools([add])
    messages: list[Any] = [HumanMessage(QUESTION)]
    answer = bound.invoke(messages)
    (call,) = answer.tool_calls
    expect((call["name"], call["args"]) == ("add", {"x": 7}), answer)
    messages += [answer, ToolMessage("7", tool_call_id=call["id"])]
    expect(bound.invoke(messages).content == "7")


def structured_output_by_a_function_is_read() -> None:
    asked = chat(CALLING, reasoning=False).with_structured_output(Add, method="function_calling")
    expect(asked.invoke(QUESTION) == Add(x=7))


def thoughts_stand_apart() -> None:
    answer = chat(CALLING, reasoning=True).invoke(QUESTION)
    expect((answer.additional_kwargs["reasoning_content"], answer.content) == ("I add.", "7"), answer)
    text = "".join(
        chunk.additional_kwargs.get("reasoning_content", "") for chunk in chat(CALLING, reasoning=True).stream(QUESTION)
    )
    expect(text == "I add.", text)


def log_probs_are_given() -> None:
    metadata = chat(logprobs=True, top_logprobs=2).invoke(QUESTION).response_metadata
    expect(len(metadata["logprobs"][0]["top_logprobs"]) == 2, metadata)


def a_text_is_completed() -> None:
    llm = OllamaLLM(base_url=URL, model=MODEL, temperature=0, num_predict=8)
    expect("".join(llm.stream(QUESTION)) == llm.invoke(QUESTION))


def texts_become_vectors() -> None:
    embeddings = OllamaEmbeddings(base_url=URL, model=MODEL, validate_model_on_init=True)
    vectors, alone = embeddings.embed_documents([QUESTION, "12 + 3 ="]), embeddings.embed_query(QUESTION)
    expect(len(vectors) == 2 and max(abs(x - y) for x, y in zip(vectors[0], alone, strict=True)) < 1e-5)
    expect(len(asyncio.run(embeddings.aembed_query(QUESTION))) == len(alone))


if __name__ == "__main__":
    report(
        "langchain-ollama",
        [
            a_model_is_validated,
            a_chat_is_answered,
            a_stream_says_the_same_as_a_whole_answer,
            an_asynchronous_stream_is_read,
            all_of_its_settings_are_read,
            structured_output_is_enforced,
            functions_are_called_and_answered,
            structured_output_by_a_function_is_read,
            thoughts_stand_apart,
            log_probs_are_given,
            a_text_is_completed,
            texts_become_vectors,
        ],
    )
