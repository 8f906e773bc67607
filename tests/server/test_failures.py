"""What clients are told when something goes wrong, and what the engine is told when a client goes."""

import asyncio
import json
from collections.abc import Callable, MutableMapping
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from parallm.errors import EngineFull, EngineStopped, NotFinite

Call = Callable[..., httpx.Response]


@pytest.mark.parametrize("stream", [False, True])
def test_an_unknown_model_is_404_with_the_choices(complete: Call, chat: Call, stream: bool) -> None:
    for send in (complete, chat):
        response = send(model="policy@9", stream=stream)
        error = response.json()["error"]
        assert (response.status_code, error["param"], error["code"]) == (404, "model", "model_not_found")
        assert "policy@3" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_engine_is_429_and_says_when_to_come_back(complete: Call, engine: Any, stream: bool) -> None:
    engine.refusal = EngineFull("4096 requests wait already")
    response = complete(stream=stream)
    assert (response.status_code, response.headers["retry-after"]) == (429, "1")
    assert response.json()["error"]["type"] == "rate_limit_error"


@pytest.mark.parametrize("stream", [False, True])
def test_a_stopped_engine_is_503(complete: Call, call: Call, engine: Any, stream: bool) -> None:
    engine.is_alive = False
    assert complete(stream=stream).status_code == 503
    assert call("GET", "/health").status_code == 503


@pytest.mark.parametrize("stream", [False, True])
def test_numbers_that_are_not_finite_are_the_models_fault_and_not_asked_again(
    complete: Call, engine: Any, stream: bool
) -> None:
    engine.refusal = NotFinite("with hot@1 the model computes numbers that are not finite")
    response = complete(stream=stream)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (422, "model", "not_finite")
    assert "hot@1" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_bug_is_500_without_its_details(complete: Call, engine: Any, stream: bool) -> None:
    engine.refusal = RuntimeError("secret")
    response = complete(stream=stream)
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert "secret" not in response.text
    assert response.headers["x-request-id"]


def test_a_prompt_beyond_the_context_is_named_so(complete: Call) -> None:
    error = complete(max_tokens=196).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "max_tokens")
    assert "the limit is 200" in error["message"]
    assert "engine." not in error["message"]  # clients have no hand on settings of the engine


@pytest.mark.parametrize(
    ("crash", "code"),
    [
        (EngineStopped("gone"), "engine_stopped"),
        (NotFinite("hot@1"), "not_finite"),
        (RuntimeError("secret"), "internal_error"),
    ],
)
def test_a_failure_within_a_stream_is_an_event_and_no_done(
    complete: Call, engine: Any, crash: Exception, code: str
) -> None:
    engine.crash = crash
    response = complete(stream=True)
    events = response.text.rstrip().split("\n\n")
    assert response.status_code == 200
    assert json.loads(events[0].removeprefix("data: "))["choices"][0]["text"] == "h"
    assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == code
    assert "secret" not in response.text


def test_one_bad_prompt_of_several_fails_the_request_and_aborts_the_rest(complete: Call, engine: Any) -> None:
    engine.is_endless = True
    assert complete(prompt=[[97], [1000]]).status_code == 400
    assert engine.num_aborted == 1


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/completions", 405), ("POST", "/v1/models", 405), ("GET", "/v9", 404), ("POST", "/health/", 404)],
)
def test_wrong_paths_and_methods_have_the_same_shape(call: Call, method: str, path: str, status: int) -> None:
    response = call(method, path)
    assert response.status_code == status
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def test_a_path_or_a_field_that_is_nearly_right_is_told_so(call: Call, complete: Call) -> None:
    message = call("POST", "/v1/completion", json={}).json()["error"]["message"]
    assert message == "POST /v1/completion: no such route; did you mean /v1/completions?"
    assert call("GET", "/x").json()["error"]["message"].endswith("GET /openapi.json shows what there is")
    assert call("GET", "/v1/completions").json()["error"]["message"].endswith("this route takes POST")
    assert complete(max_token=4).json()["error"]["message"] == "unknown field 'max_token'; did you mean 'max_tokens'?"


def test_kserves_clients_get_its_form_of_errors_with_the_way_out(call: Call) -> None:
    for method, path in (("POST", "/v2/repository/index"), ("GET", "/v2/models/base/stats"), ("GET", "/v2/modelz")):
        answer = call(method, path)
        assert (answer.status_code, answer.json().keys()) == (404, {"error"})
        assert answer.json()["error"].startswith(f"{method} {path}: no such route; of KServe's protocol this server")
        assert "loaded at /v1/models/load" in answer.json()["error"]
    wrong = call("GET", "/v2/models/base/infer")
    assert (wrong.status_code, wrong.json()["error"]) == (405, "GET /v2/models/base/infer: this route takes POST")
    assert "PUT one to /v1/rl/policies/NAME" in call("GET", "/v2/models/nobody").json()["error"]
    assert call("GET", "/v2/rerank").json()["error"]["message"].endswith("this route takes POST")


async def send_and_leave(app: FastAPI, engine: Any, body: dict[str, Any]) -> list[MutableMapping[str, Any]]:
    """One request over raw ASGI whose client leaves once the engine works on it. Returns what was sent to it."""
    sent: list[MutableMapping[str, Any]] = []
    messages = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive() -> MutableMapping[str, Any]:
        if messages:
            return messages.pop()
        while not engine.requests:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.02)
        return {"type": "http.disconnect"}

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
    async with asyncio.timeout(5):
        await app(scope, receive, send)
    return sent


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_aborts_its_request(app: FastAPI, engine: Any, stream: bool) -> None:
    engine.is_endless = True
    body = {"model": "policy", "prompt": ["a", "b"], "stream": stream}
    sent = asyncio.run(send_and_leave(app, engine, body))
    assert engine.num_aborted == 2
    assert len(sent) > 2 if stream else sent[0]["status"] == 499
