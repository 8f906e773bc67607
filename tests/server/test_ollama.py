"""Ollama's routes over a model that repeats its prompt."""

import json
from collections.abc import Callable
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from parallm.errors import EngineFull, EngineStopped
from parallm.model.chat.tokenizer import ChatTokenizer
from parallm.server.ollama import answers
from parallm.server.ollama.answers import LOAD_SECONDS
from parallm.server.ollama.cards import short_number
from parallm.server.ollama.routes_embed import normalized
from parallm.server.operation.auth import read_keys
from parallm.server.settings import ApiKey, ServerSettings
from tests.server.conftest import CharacterTokenizer, EchoEngine, application, card, make_app, send_to
from tests.server.test_tasks import EMBED, LetterEncoder

Call = Callable[..., httpx.Response]
HELLO = [{"role": "user", "content": "hello"}]
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALLED = '<tool_call>{"name": "add", "arguments": {"x": 7}}</tool_call>'
SECONDS = 1_000_000_000


@pytest.fixture(scope="module")
def echo() -> EchoEngine:
    return EchoEngine()


@pytest.fixture(scope="module")
def plain_app(echo: EchoEngine) -> FastAPI:
    return application(echo, CharacterTokenizer())


@pytest.fixture(scope="module")
def hermes_app(echo: EchoEngine, hermes: ChatTokenizer) -> FastAPI:
    return application(echo, hermes)


@pytest.fixture(scope="module")
def embedding_app(echo: EchoEngine) -> FastAPI:
    fields = {"encoder": LetterEncoder(found=EMBED), "catalog": lambda: (card(3),)}
    return make_app(echo, CharacterTokenizer(), **fields, settings=ServerSettings(ollama=True))


@pytest.fixture
def engine(echo: EchoEngine) -> EchoEngine:
    """Return the engine of all applications here, as it is at first."""
    vars(echo).update(vars(EchoEngine()))
    return echo


@pytest.fixture
def call(engine: EchoEngine, plain_app: FastAPI) -> Call:
    return partial(send_to, plain_app)


@pytest.fixture
def call_hermes(engine: EchoEngine, hermes_app: FastAPI) -> Call:
    engine.max_context = 2000
    return partial(send_to, hermes_app)


@pytest.fixture
def embedding(engine: EchoEngine, embedding_app: FastAPI) -> Call:
    engine.max_context = 20
    return partial(send_to, embedding_app)


def lines_of(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    assert response.text.endswith("\n")
    assert "\n\n" not in response.text
    return [json.loads(line) for line in response.text.splitlines()]


def chat(call: Call, **fields: Any) -> httpx.Response:
    return call("POST", "/api/chat", json={"model": "policy", "messages": HELLO} | fields)


def generate(call: Call, **fields: Any) -> httpx.Response:
    return call("POST", "/api/generate", json={"model": "policy", "prompt": "hello"} | fields)


def refusal(response: httpx.Response, status: int = 400) -> str:
    assert response.status_code == status, response.text
    (error,) = response.json().values()
    assert isinstance(error, str)
    return error


def prompt_of(engine: EchoEngine) -> str:
    return "".join(map(chr, engine.requests[-1].prompt_tokens))


def test_a_stream_is_lines_whose_last_one_counts(call: Call) -> None:
    *parts, last = lines_of(chat(call))
    assert "".join(part["message"]["content"] for part in parts) == "<user>hello 0"
    assert all(part.keys() == {"model", "created_at", "done", "message"} for part in parts)
    assert last["message"] == {"role": "assistant", "content": ""}
    assert (last["done"], last["done_reason"], last["prompt_eval_count"], last["eval_count"]) == (True, "stop", 11, 14)
    assert last["policy_version"] == 3


def test_a_whole_answer_is_what_a_stream_says(call: Call) -> None:
    answer = chat(call, stream=False).json()
    assert answer["message"] == {"role": "assistant", "content": "<user>hello 0"}
    assert answer.keys() == lines_of(chat(call))[-1].keys()


@pytest.mark.parametrize("stream", [True, False])
def test_times_are_measured(call: Call, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    """The clock goes on by one second each time that it is read: came, asked, then once for each token, and the end."""
    times = count(100)
    monkeypatch.setattr(answers, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    response = chat(call, stream=stream, options={"num_predict": 5})
    last = lines_of(response)[-1] if stream else response.json()
    durations = [last.get(f"{name}_duration") for name in ("total", "load", "prompt_eval", "eval")]
    assert durations == [7 * SECONDS, None, 1 * SECONDS, 4 * SECONDS]
    assert (last["eval_count"], last["done_reason"]) == (5, "length")


class Leased:
    """Says of each request that it waited for its model."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app({**scope, LOAD_SECONDS: 2.5}, receive, send)


def test_a_model_that_was_loaded_for_a_request_is_told(engine: EchoEngine, tokenizer: CharacterTokenizer) -> None:
    app: Any = Leased(application(engine, tokenizer))
    answer = chat(partial(send_to, app), stream=False).json()
    assert answer["load_duration"] == 2.5 * SECONDS
    assert answer["total_duration"] > answer["load_duration"]
    body = {"model": "policy", "keep_alive": 0}
    unloaded = send_to(app, "POST", "/api/generate", json=body).json()
    assert (unloaded["done_reason"], unloaded["response"]) == ("unload", "")


def test_no_prompt_loads_the_model(call: Call) -> None:
    answer = call("POST", "/api/generate", json={"model": "base:latest"}).json()
    assert (answer["model"], answer["done"], answer["done_reason"], answer["response"]) == (
        "base:latest",
        True,
        "load",
        "",
    )
    answer = call("POST", "/api/chat", json={"model": "base", "messages": []}).json()
    assert (answer["done_reason"], answer["message"]) == ("load", {"role": "assistant", "content": ""})
    assert "model 'nobody' not found" in refusal(call("POST", "/api/generate", json={"model": "nobody"}), 404)


def test_the_own_base_is_not_unloaded(call: Call) -> None:
    assert "stays loaded" in refusal(call("POST", "/api/generate", json={"model": "base", "keep_alive": "0s"}), 409)
    assert generate(call, keep_alive=0, stream=False).json()["response"]


@pytest.mark.parametrize(
    ("asked", "meant"),
    [("policy", "policy"), ("policy:latest", "policy"), ("policy:2", "policy@2"), ("base:latest", "base")],
)
def test_names_have_tags(call: Call, engine: EchoEngine, asked: str, meant: str) -> None:
    assert generate(call, model=asked, stream=False).json()["model"] == asked
    assert engine.requests[-1].model == meant


def test_unknown_names_are_not_found(call: Call) -> None:
    for model in ("nobody", "policy:99", "nobody:latest"):
        assert refusal(chat(call, model=model), 404).startswith(f"model '{model}' not found")
    assert refusal(call("POST", "/api/show", json={"model": "nobody"}), 404).startswith("model 'nobody' not found")


def test_a_prompt_is_put_into_the_template(call: Call, engine: EchoEngine) -> None:
    answer = generate(call, system="Add.", stream=False).json()
    assert prompt_of(engine) == "<system>Add.<user>hello"
    assert answer["context"] == [*map(ord, "<system>Add.<user>hello"), *map(ord, "<system>Add.<user>hello 0"), 0]
    generate(call, context=[1, 2, 3])
    assert prompt_of(engine) == "\x01\x02\x03<user>hello"


def test_a_raw_prompt_is_taken_as_it_is(call: Call, engine: EchoEngine) -> None:
    answer = generate(call, raw=True, stream=False).json()
    assert (prompt_of(engine), answer["response"]) == ("hello", "hello 0")
    assert "context" not in answer
    assert "raw mode" in refusal(generate(call, raw=True, system="Add."))


def test_log_probs_stand_beside_the_tokens(call: Call) -> None:
    *parts, _ = lines_of(chat(call, logprobs=True, top_logprobs=1))
    tokens = [token for part in parts for token in part["logprobs"]]
    assert tokens[0] == {
        "token": "<",
        "logprob": -0.25,
        "bytes": [60],
        "top_logprobs": [{"token": "x", "logprob": -0.5, "bytes": [120]}],
    }
    whole = chat(call, logprobs=True, top_logprobs=1, stream=False).json()
    assert (whole["logprobs"], len(tokens)) == (tokens, whole["eval_count"])
    raw = generate(call, raw=True, logprobs=True, stream=False).json()
    assert raw["logprobs"][0]["top_logprobs"] == []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"images": ["aGk="]}, "no images"),
        ({"suffix": "end"}, "does not support insert"),
        ({"template": "{{ .Prompt }}"}, "template is not supported"),
        ({"think": True}, '"policy" does not support thinking'),
        ({"format": "xml"}, "format should be"),
        ({"keep_alive": "soon"}, "keep_alive should be a number of seconds"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"temperature": 1}, "unknown field 'temperature'"),
        ({"_debug_render_only": True}, "_debug_render_only is not supported"),
        ({"prompt": "x" * 300}, "maximum context length"),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(call: Call, fields: dict[str, Any], message: str) -> None:
    assert message in refusal(generate(call, **fields))


def test_values_without_effect_are_accepted(call: Call) -> None:
    fields = {"images": [], "suffix": "", "template": "", "think": False, "format": "", "shift": True, "options": {}}
    assert generate(call, **fields, metadata={"chat": 1}, context=None, keep_alive="-1m").status_code == 200


def test_no_body_is_missing(call: Call) -> None:
    for path in ("/api/generate", "/api/chat", "/api/embed", "/api/show"):
        assert refusal(call("POST", path)) == "missing request body"


def test_errors_after_the_first_token_are_the_last_line(call: Call, engine: EchoEngine) -> None:
    engine.crash = RuntimeError("the device is lost")
    *_, last = lines_of(chat(call))
    assert last == {"error": "the server failed to answer; its log has the cause"}
    engine.crash = EngineStopped("the engine has stopped")
    assert refusal(chat(call, stream=False), 503) == "the engine has stopped"


def test_errors_of_keys_and_routes_have_ollamas_form(
    engine: EchoEngine, tokenizer: CharacterTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_KEY", "k" * 32)
    settings = ServerSettings(ollama=True, api_keys=(ApiKey(name="a", role="inference", env="TEST_KEY"),))
    app = make_app(engine, tokenizer, settings=settings, keys=read_keys(settings))
    assert "needs an API key" in refusal(send_to(app, "GET", "/api/tags"), 401)
    assert send_to(app, "GET", "/").text == "Ollama is running"
    assert "this route takes POST" in refusal(send_to(app, "GET", "/api/chat"), 405)


def test_without_the_setting_there_is_no_such_route(engine: EchoEngine, tokenizer: CharacterTokenizer) -> None:
    app = make_app(engine, tokenizer)
    assert "server.ollama=false" in refusal(send_to(app, "POST", "/api/chat", json={}), 404)
    assert "Ollama" not in send_to(app, "GET", "/").text


def test_a_full_engine_is_busy(call: Call, engine: EchoEngine) -> None:
    engine.refusal = EngineFull("the queue is full")
    assert refusal(chat(call), 503) == "the queue is full"


# chats that are too long ----------------------------------------------------------------------------------------------

LONG = [
    {"role": "system", "content": "S"},
    *({"role": role, "content": f"{number}" * 30} for number in range(1, 5) for role in ("user", "assistant")),
    {"role": "user", "content": "last"},
]


def test_the_oldest_messages_are_dropped(call: Call, engine: EchoEngine) -> None:
    response = chat(call, messages=LONG)
    assert lines_of(response)[-1]["prompt_eval_count"] <= 200
    assert (
        prompt_of(engine)
        == f"<system>S<user>{'3' * 30}<assistant>{'3' * 30}<user>{'4' * 30}<assistant>{'4' * 30}<user>last"
    )
    assert response.headers["x-dropped-messages"] == "4"
    short = chat(call, messages=LONG, options={"num_ctx": 40})
    assert prompt_of(engine) == "<system>S<user>last"
    assert short.headers["x-dropped-messages"] == "8"
    assert "x-dropped-messages" not in chat(call).headers


def test_a_chat_that_may_not_lose_messages_is_refused(call: Call) -> None:
    assert "maximum context length" in refusal(chat(call, messages=LONG, truncate=False))
    assert "maximum context length" in refusal(chat(call, messages=[{"role": "user", "content": "x" * 300}]))
    assert "num_ctx" not in refusal(chat(call, messages=LONG, options={"num_ctx": 10}))


def test_no_result_stands_without_its_call(call_hermes: Call, engine: EchoEngine) -> None:
    call = {"function": {"name": "add", "arguments": {"x": 1}}}
    turns = [
        {"role": "user", "content": "a" * 40},
        *(
            message
            for number in range(6)
            for message in (
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "content": f"{number}" * 40},
            )
        ),
    ]
    response = chat(call_hermes, messages=turns, tools=[ADD], options={"num_ctx": 300}, think=False)
    assert response.status_code == 200, response.text
    assert int(response.headers["x-dropped-messages"]) % 2 == 1


# thinking and functions -----------------------------------------------------------------------------------------------


@pytest.fixture
def thoughts(hermes: ChatTokenizer, engine: EchoEngine) -> Callable[[], str]:
    return lambda: hermes.decode(engine.requests[-1].prompt_tokens, special=True)


@pytest.mark.parametrize(("think", "thinks"), [(None, True), (True, True), (False, False)])
def test_models_think_unless_they_are_told_not_to(
    call_hermes: Call, thoughts: Callable[[], str], engine: EchoEngine, think: bool | None, thinks: bool
) -> None:
    engine.says = "Two and three.\n</think>\n\n5" if thinks else "5"
    answer = chat(call_hermes, think=think, stream=False).json()
    assert thoughts().endswith("<think>\n") == thinks
    thinking = {"thinking": "Two and three."} if thinks else {}
    assert answer["message"] == {"role": "assistant", "content": "5"} | thinking
    parts = lines_of(generate(call_hermes, think=think))
    assert "".join(part.get("thinking", "") for part in parts) == thinking.get("thinking", "")
    assert "".join(part["response"] for part in parts) == "5"


def test_levels_of_thought_that_the_template_lacks_are_refused(call_hermes: Call) -> None:
    assert "think is 'low'" in refusal(chat(call_hermes, think="low"))


@pytest.mark.parametrize("stream", [True, False])
def test_a_call_is_one_line_with_arguments_as_an_object(call_hermes: Call, engine: EchoEngine, stream: bool) -> None:
    engine.says = f"I add.{CALLED}{CALLED}"
    response = chat(call_hermes, tools=[ADD], think=False, stream=stream)
    messages = [line["message"] for line in (lines_of(response) if stream else [response.json()])]
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    assert [call["function"] for call in calls] == [
        {"index": index, "name": "add", "arguments": {"x": 7}} for index in (0, 1)
    ]
    assert all(call["id"].startswith("call_") and len(call["id"]) == 13 for call in calls)
    assert "".join(message["content"] for message in messages) == "I add."
    assert (lines_of(response)[-1] if stream else response.json())["done_reason"] == "stop"


CALLS = [
    {"function": {"name": "add", "arguments": {"x": 1}}},
    {"id": "b", "index": 1, "function": {"name": "sub", "arguments": {"x": 2}, "index": 1}},
]
ASKED = [*HELLO, {"role": "assistant", "content": None, "thinking": "Hm.", "tool_calls": CALLS}]


@pytest.mark.parametrize(
    "results",
    [
        [{"content": "1"}, {"content": "2"}],
        [{"content": "2", "tool_name": "sub"}, {"content": "1", "tool_name": "add"}],
        [{"content": "2", "tool_call_id": "b"}, {"content": "1", "tool_call_id": "someone else's"}],
    ],
)
def test_results_find_their_calls(call_hermes: Call, results: list[dict[str, Any]]) -> None:
    messages = [*ASKED, *({"role": "tool"} | result for result in results)]
    assert chat(call_hermes, messages=messages, tools=[ADD]).status_code == 200
    third = refusal(chat(call_hermes, messages=[*messages, {"role": "tool", "content": "3"}], tools=[ADD]))
    assert "messages.4 is the result of a call" in third


def test_a_model_without_functions_refuses_them(call: Call) -> None:
    assert '"policy" does not support tools' in refusal(chat(call, tools=[ADD]))


def test_a_form_constrains_the_answer(call_hermes: Call, engine: EchoEngine) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}}
    for form in ("json", schema):
        assert chat(call_hermes, format=form).status_code == 200
        assert engine.requests[-1].sampling.grammar is not None
        assert generate(call_hermes, format=form, raw=True).status_code == 200
        assert engine.requests[-1].sampling.grammar is not None
    assert chat(call_hermes).status_code == 200
    assert engine.requests[-1].sampling.grammar is None
    assert "format leaves no place" in refusal(chat(call_hermes, format="json", tools=[ADD]))


# vectors --------------------------------------------------------------------------------------------------------------


def test_vectors_have_the_length_one(embedding: Call) -> None:
    answer = embedding("POST", "/api/embed", json={"model": "policy:latest", "input": ["aaabbbb", "b"]}).json()
    assert np.allclose(answer["embeddings"], [[0.6, 0.8], [0.0, 1.0]])
    assert (answer["model"], answer["prompt_eval_count"]) == ("policy:latest", 8)
    short = embedding("POST", "/api/embed", json={"model": "base", "input": "aaabbbb", "dimensions": 1}).json()
    assert short["embeddings"] == [[1.0]]
    all_of_it = embedding("POST", "/api/embed", json={"model": "base", "input": "aaabbbb", "dimensions": 99}).json()
    assert np.allclose(all_of_it["embeddings"], [[0.6, 0.8]])
    assert normalized(np.zeros((1, 2), np.float32)).tolist() == [[0, 0]]


def test_the_older_route_leaves_vectors_as_they_are(embedding: Call) -> None:
    body = {"model": "base", "prompt": "aaabbbb"}
    assert embedding("POST", "/api/embeddings", json=body | {"input": ["aaabbbb"]}).json() == {"embedding": [3.0, 4.0]}
    assert embedding("POST", "/api/embeddings", json={"model": "base"}).json() == {"embedding": []}


def test_long_texts_are_cut_unless_that_is_refused(embedding: Call) -> None:
    body = {"model": "base", "input": "a" * 30}
    assert embedding("POST", "/api/embed", json=body).json()["prompt_eval_count"] == 20
    assert embedding("POST", "/api/embed", json=body | {"options": {"num_ctx": 5}}).json()["prompt_eval_count"] == 5
    assert "maximum context length" in refusal(embedding("POST", "/api/embed", json=body | {"truncate": False}))
    few = {"input": "a" * 9, "options": {"num_ctx": 5}, "truncate": False}
    assert "num_ctx is 5" in refusal(embedding("POST", "/api/embed", json=body | few))


@pytest.mark.parametrize("nothing", [[], "", None])
def test_no_text_has_no_vector(embedding: Call, nothing: object) -> None:
    assert embedding("POST", "/api/embed", json={"model": "base", "input": nothing}).json()["embeddings"] == []


@pytest.mark.parametrize("wrong", [[1, 2], [[1]], {"text": "a"}, ["a", ""], ["a"] * 2049])
def test_inputs_that_are_no_texts_are_refused(embedding: Call, wrong: object) -> None:
    assert "input" in refusal(embedding("POST", "/api/embed", json={"model": "base", "input": wrong}))


def test_who_makes_no_vectors_says_so(call: Call, embedding: Call) -> None:
    body = {"model": "nobody", "input": "a"}
    assert refusal(embedding("POST", "/api/embed", json=body), 404) == 'model "nobody" not found, try pulling it first'
    assert '"base" does not support embedding' in refusal(
        call("POST", "/api/embed", json={"model": "base", "input": "a"})
    )


# lists ----------------------------------------------------------------------------------------------------------------


def test_all_names_are_listed_with_their_tags(call: Call) -> None:
    models = call("GET", "/api/tags").json()["models"]
    assert [model["name"] for model in models] == [
        "policy:latest",
        "base:latest",
        "best:latest",
        "policy:3",
        "policy:2",
    ]
    assert all(model["model"] == model["name"] and len(model["digest"]) == 64 for model in models)
    by_name = {model["name"]: model for model in models}
    assert by_name["base:latest"]["details"] == {
        "parent_model": "",
        "format": "safetensors",
        "family": "llama",
        "families": ["llama"],
        "parameter_size": "2.50M",
        "quantization_level": "F32",
    }
    assert by_name["policy:3"]["details"]["parent_model"] == "base:latest"
    assert by_name["policy:3"]["size"] == by_name["base:latest"]["size"] + 1000
    assert by_name["base:latest"]["modified_at"] == "2023-11-14T22:13:20.000000Z"
    assert call("HEAD", "/api/tags").status_code == call("HEAD", "/").status_code == 200


def test_every_listed_name_is_shown_and_answers(call: Call) -> None:
    for model in call("GET", "/api/tags").json()["models"]:
        page = call("POST", "/api/show", json={"name": model["name"]}).json()
        assert (page["details"], page["capabilities"]) == (model["details"], model["capabilities"])
        assert page["model_info"]["llama.context_length"] == 200
        assert page["modelfile"].splitlines()[1].startswith("FROM ")
        assert generate(call, model=model["name"], stream=False).json()["model"] == model["name"]


def test_what_is_loaded_stays(call: Call) -> None:
    models = call("GET", "/api/ps").json()["models"]
    assert [(model["name"], model["size"]) for model in models] == [
        ("policy:latest", 11_001_000),
        ("base:latest", 11_000_000),
        ("best:latest", 11_001_000),
    ]
    assert {(model["expires_at"], model["size_vram"], model["context_length"]) for model in models} == {
        ("9999-01-01T00:00:00+00:00", 0, 200)
    }


def test_the_cloud_is_absent(call: Call) -> None:
    assert call("GET", "/api/status").json() == {"cloud": {"disabled": True, "source": "config"}}
    assert "no account at ollama.com" in refusal(call("POST", "/api/push", json={"model": "base"}), 409)
    assert call("GET", "/api/version").json()["version"].split(".")[0] == "0"


def test_a_model_that_makes_vectors_can_do_so(embedding: Call) -> None:
    by_name = {model["name"]: model["capabilities"] for model in embedding("GET", "/api/tags").json()["models"]}
    assert by_name["base:latest"] == ["completion", "embedding"]


@pytest.mark.parametrize(
    ("number", "text"), [(999, "999"), (835_584, "835.58K"), (596_049_920, "596.05M"), (8_030_261_248, "8.0B")]
)
def test_numbers_of_parameters_are_short(number: int, text: str) -> None:
    assert short_number(number) == text
