"""Ollama's own Python client, sync and async."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ollama
from checking import MESSAGES, MODEL, QUESTION, expect, report, server_and_model, task_servers

URL, FOLDER = server_and_model()
CALLING = task_servers()["calls"]
GREEDY = {"temperature": 0, "num_predict": 12}
SCHEMA = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["x"],
    "additionalProperties": False,
}
client = ollama.Client(host=URL)
caller = ollama.Client(host=CALLING)


def add(x: int) -> int:
    """Adds.

    Args:
      x: a number

    Returns:
      int: the sum
    """
    return x


def refused(call: Callable[[], Any], status: int, text: str) -> None:
    try:
        call()
    except ollama.ResponseError as error:
        expect(error.status_code == status and text in error.error, (error.status_code, error.error))
        return
    raise AssertionError("accepted")


def a_chat_is_answered_with_measured_times() -> None:
    answer = client.chat(MODEL, MESSAGES, options=GREEDY)
    expect(answer.message.content and answer.done and answer.done_reason in ("stop", "length"), answer)
    times = (answer.prompt_eval_duration, answer.eval_duration, answer.total_duration)
    expect(all(times) and sum(times[:2]) <= times[2], times)
    expect(answer.prompt_eval_count > 0 and 0 < answer.eval_count <= 12, answer)


def a_stream_says_the_same_as_a_whole_answer() -> None:
    parts = list(client.chat(MODEL, MESSAGES, options=GREEDY, stream=True))
    whole = client.chat(MODEL, MESSAGES, options=GREEDY).message.content
    expect("".join(part.message.content for part in parts) == whole and [part.done for part in parts][-1], parts)


def a_prompt_is_answered_and_continued() -> None:
    first = client.generate(MODEL, QUESTION, options=GREEDY)
    second = client.generate(MODEL, "And 2 more?", context=first.context, options=GREEDY)
    expect(list(second.context)[: len(first.context)] == list(first.context), second)
    expect(second.prompt_eval_count > len(first.context), second)


def a_raw_prompt_is_continued_as_it_is() -> None:
    answer = client.generate(MODEL, "12 + 3 =", raw=True, options=GREEDY)
    text = "".join(part.response for part in client.generate(MODEL, "12 + 3 =", raw=True, stream=True, options=GREEDY))
    expect(answer.context is None and text == answer.response, answer)


def an_empty_prompt_loads_the_model() -> None:
    expect(client.generate(MODEL).done_reason == "load")
    expect(client.chat(MODEL, []).done_reason == "load")


def a_schema_is_enforced() -> None:
    answer = client.chat(MODEL, MESSAGES, format=SCHEMA, options={"temperature": 0, "num_predict": 80})
    expect(isinstance(json.loads(answer.message.content)["x"], int), answer)
    answer = client.generate(MODEL, QUESTION, format=SCHEMA, options={"temperature": 0, "num_predict": 80})
    expect(isinstance(json.loads(answer.response)["x"], int), answer)


def log_probs_are_given() -> None:
    answer = client.chat(MODEL, MESSAGES, options=GREEDY, logprobs=True, top_logprobs=2)
    expect(len(answer.logprobs) == answer.eval_count and len(answer.logprobs[0].top_logprobs) == 2, answer)


def a_seed_gives_the_same_answer_again() -> None:
    texts = {client.generate(MODEL, QUESTION, options={"seed": 7, "num_predict": 8}).response for _ in range(3)}
    expect(len(texts) == 1, texts)


def all_of_its_options_are_read() -> None:
    options = ollama.Options(
        num_ctx=4096,
        num_batch=512,
        num_gpu=-1,
        main_gpu=0,
        use_mmap=True,
        num_thread=8,
        num_keep=4,
        seed=1,
        num_predict=4,
        top_k=10,
        top_p=0.5,
        tfs_z=1.0,
        typical_p=1.0,
        repeat_last_n=-1,
        temperature=0.5,
        repeat_penalty=1.1,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        mirostat=0,
        mirostat_tau=5.0,
        mirostat_eta=0.1,
        penalize_newline=True,
        stop=["\n\n"],
    )
    expect(client.generate(MODEL, QUESTION, options=options).eval_count <= 4)
    refused(lambda: client.generate(MODEL, QUESTION, options={"mirostat": 2}), 400, "mirostat")
    refused(lambda: client.generate(MODEL, QUESTION, options={"temprature": 1}), 400, "temperature")


def images_are_refused() -> None:
    refused(lambda: client.chat(MODEL, [{**MESSAGES[0], "images": [b"png"]}]), 400, "no images")


def an_unknown_model_is_not_found() -> None:
    refused(lambda: client.chat("nobody", MESSAGES), 404, "not found")
    refused(lambda: list(client.generate("nobody", QUESTION, stream=True)), 404, "not found")
    refused(lambda: client.embed("nobody", "text"), 404, "try pulling it first")
    refused(lambda: client.show("nobody"), 404, "not found")


def models_are_listed_and_shown() -> None:
    names = [model.model for model in client.list().models]
    expect({"base:latest", "policy:latest"} <= set(names), names)
    expect({"base:latest", "policy:latest"} <= {model.model for model in client.ps().models})
    for name in (*names, MODEL):
        page = client.show(name)
        expect(page.modelinfo["general.architecture"] and "tools" in page.template, page)
        expect("completion" in page.capabilities and page.details.format == "safetensors", page)
    expect(client.list().models[0].details.parameter_size and client.list().models[0].size > 0)


def texts_become_vectors() -> None:
    answer = client.embed(MODEL, [QUESTION, "12 + 3 ="])
    expect(len(answer.embeddings) == 2 and answer.prompt_eval_count > 2, answer)
    expect(all(abs(sum(x * x for x in vector) - 1) < 1e-4 for vector in answer.embeddings))
    short = client.embed(MODEL, QUESTION, dimensions=8).embeddings[0]
    scale = sum(x * x for x in answer.embeddings[0][:8]) ** 0.5
    expect(max(abs(x - y / scale) for x, y in zip(short, answer.embeddings[0], strict=False)) < 1e-4, short)
    old = client.embeddings(MODEL, QUESTION).embedding
    length = sum(x * x for x in old) ** 0.5
    expect(max(abs(x / length - y) for x, y in zip(old, answer.embeddings[0], strict=True)) < 1e-4, length)


def thoughts_stand_apart() -> None:
    answer = caller.chat(MODEL, MESSAGES, think=True)
    expect((answer.message.thinking, answer.message.content) == ("I add.", "7"), answer)
    parts = list(caller.generate(MODEL, QUESTION, think=True, stream=True))
    expect("".join(part.thinking or "" for part in parts) == "I add." and parts[-2].response == "7", parts)
    answer = caller.chat(MODEL, MESSAGES, think=False)
    expect((answer.message.thinking, answer.message.content) == (None, "7"), answer)
    refused(lambda: client.chat(MODEL, MESSAGES, think=True), 400, "does not support thinking")


def a_function_is_called_and_answered() -> None:
    messages: list[Any] = list(MESSAGES)
    answer = caller.chat(MODEL, messages, tools=[add], think=False)
    (call,) = answer.message.tool_calls
    expect(call.function.name == "add" and call.function.arguments == {"x": 7}, answer)
    messages += [answer.message, {"role": "tool", "content": str(add(7)), "tool_name": "add"}]
    expect(caller.chat(MODEL, messages, tools=[add], think=False).message.content == "7")
    parts = list(caller.chat(MODEL, MESSAGES, tools=[add], stream=True))
    expect([part.message.tool_calls[0].function.name for part in parts if part.message.tool_calls] == ["add"], parts)


def models_are_made_copied_and_deleted() -> None:
    made = client.create("poet", from_=MODEL, system="You add.", parameters={"seed": 7, "temperature": 0}, stream=True)
    expect([step.status for step in made][-1] == "success")
    page = client.show("poet")
    expect("You add." in page.modelfile and "seed" in page.parameters, page)
    expect(client.copy("poet", "me/poet:v1").status == "success")
    expect({"poet:latest", "me/poet:v1"} <= {model.model for model in client.list().models})
    for name in ("poet", "me/poet:v1"):
        expect(client.delete(name).status == "success")
    refused(lambda: client.delete("poet"), 404, "not found")
    refused(lambda: client.create("poet"), 400, "neither 'from' or 'files' was specified")


def a_model_is_made_of_files_and_answers() -> None:
    files = {path.name: client.create_blob(path) for path in Path(FOLDER).iterdir() if path.is_file()}
    expect(client.create("twin", files=files, parameters={"temperature": 0, "num_predict": 8}).status == "success")
    answer = client.chat("twin", MESSAGES)
    expect(answer.message.content == client.chat(MODEL, MESSAGES, options=GREEDY | {"num_predict": 8}).message.content)
    expect(answer.load_duration is None or answer.load_duration > 0, answer)
    expect("twin:latest" in {model.model for model in client.ps().models})
    expect(client.generate("twin", keep_alive=0).done_reason == "unload")
    expect(client.delete("twin").status == "success")


def models_are_pulled_if_they_are_here() -> None:
    expect([step.status for step in client.pull(MODEL, stream=True)] == ["pulling manifest", "success"])
    try:
        client.pull("owner/nothing-of-this-name")
    except ollama.ResponseError as error:
        expect("registry.folders" in error.error, error.error)
        return
    raise AssertionError("accepted")


def an_asynchronous_client_does_the_same() -> None:
    async def ask() -> None:
        own = ollama.AsyncClient(host=URL)
        whole = (await own.chat(MODEL, MESSAGES, options=GREEDY)).message.content
        stream = await own.chat(MODEL, MESSAGES, options=GREEDY, stream=True)
        expect("".join([part.message.content async for part in stream]) == whole, whole)
        expect((await own.generate(MODEL, QUESTION, options=GREEDY)).done)
        expect(len((await own.embed(MODEL, [QUESTION])).embeddings) == 1)
        expect((await own.list()).models and (await own.ps()).models and (await own.show(MODEL)).modelinfo)
        called = await ollama.AsyncClient(host=CALLING).chat(MODEL, MESSAGES, tools=[add])
        expect(called.message.tool_calls[0].function.arguments == {"x": 7}, called)

    asyncio.run(ask())


if __name__ == "__main__":
    report(
        "ollama",
        [
            a_chat_is_answered_with_measured_times,
            a_stream_says_the_same_as_a_whole_answer,
            a_prompt_is_answered_and_continued,
            a_raw_prompt_is_continued_as_it_is,
            an_empty_prompt_loads_the_model,
            a_schema_is_enforced,
            log_probs_are_given,
            a_seed_gives_the_same_answer_again,
            all_of_its_options_are_read,
            images_are_refused,
            an_unknown_model_is_not_found,
            models_are_listed_and_shown,
            texts_become_vectors,
            thoughts_stand_apart,
            a_function_is_called_and_answered,
            models_are_made_copied_and_deleted,
            a_model_is_made_of_files_and_answers,
            models_are_pulled_if_they_are_here,
            an_asynchronous_client_does_the_same,
        ],
    )
