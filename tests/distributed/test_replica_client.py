"""What a trainer makes of a server's answers, and of none."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest

from parallm.distributed.rollout_engines.replica_client import EngineLost, EngineRefused, ReplicaClient
from parallm.errors import ContextTooLong, NotFinite
from parallm.server.control.replica_schemas import API, JoinBody, SampleBody, SampledCompletion, SampledSpan
from parallm.server.failures import Failure
from parallm.types import Completion, GenerationRequest, SamplingParams

URL = "http://node:8000"
JOIN = JoinBody(
    api=API,
    session="s",
    owner="node:run",
    policy="policy",
    base="tiny",
    base_sha256="a",
    tokenizer_sha256="b",
    max_context=8,
)
REQUEST = GenerationRequest(request_id="a", prompt_tokens=(1,), sampling=SamplingParams(max_tokens=4), n=2)
SAMPLE = SampleBody.of(REQUEST, session="s", request_id="a-0", model="policy@1")
ONE = SampledCompletion(
    index=0,
    tokens=[5],
    logprobs=[-0.5],
    text="5",
    finish_reason="stop",
    weight_versions=[SampledSpan(version=1, digest="d", start=0, end=1)],
)
OTHER = ONE.model_copy(update={"index": 1})
Answer = Callable[[httpx.Request], httpx.Response]


def with_client(answer: Answer, work: Callable[[ReplicaClient], Any]) -> Any:
    async def main() -> Any:
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as http:
            return await work(ReplicaClient(URL, http, headers={"Authorization": "Bearer key"}))

    return asyncio.run(main())


def joined(answer: Answer) -> Any:
    return with_client(answer, lambda client: client.join(JOIN))


def sampled(answer: Answer) -> list[SampledCompletion]:
    async def work(client: ReplicaClient) -> list[SampledCompletion]:
        return [one async for one in client.sample(SAMPLE)]

    found: list[SampledCompletion] = with_client(answer, work)
    return found


def failing(status: int, code: str | None, message: str = "why") -> Answer:
    answer = Failure(status, code, message=message).answer.model_dump_json()
    return lambda request: httpx.Response(status, text=answer)


def streaming(*pieces: str, then: Exception | None = None) -> Answer:
    async def content() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece.encode()
        if then is not None:
            raise then

    return lambda request: httpx.Response(200, content=content())


def event(one: SampledCompletion) -> str:
    return f"data: {one.model_dump_json()}\n\n"


def test_completions_come_as_they_end_with_the_key_that_was_given() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        assert request.headers["authorization"] == "Bearer key"
        assert SampleBody.model_validate_json(request.content) == SAMPLE
        return streaming(": alive\n\n", event(OTHER), event(ONE))(request)

    assert sampled(answer) == [OTHER, ONE]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (streaming(event(ONE)), "ended its answer 1 completions too early"),
        (streaming(event(ONE), then=httpx.ReadTimeout("silent")), "does not answer: silent"),
        (streaming(event(ONE), then=httpx.RemoteProtocolError("")), "does not answer: RemoteProtocolError"),
        (failing(503, "draining", "the server shuts down"), "the server shuts down"),
        (failing(404, "model_not_found", "no policy@1"), "no policy@1"),
        (failing(429, "engine_full"), "why"),
        (failing(502, None, ""), URL),
    ],
)
def test_a_request_that_another_engine_may_answer_is_lost(answer: Answer, said: str) -> None:
    with pytest.raises(EngineLost, match=said):
        sampled(answer)


def test_an_error_in_the_middle_of_a_stream_is_that_of_the_engine() -> None:
    text = Failure(503, "engine_stopped", message="the device thread has ended").answer.model_dump_json()
    with pytest.raises(EngineLost, match="http://node:8000: the device thread has ended"):
        sampled(streaming(event(ONE), f"data: {text}\n\n"))


@pytest.mark.parametrize(
    ("status", "code", "kind"), [(400, "context_length_exceeded", ContextTooLong), (422, "not_finite", NotFinite)]
)
def test_a_request_that_no_engine_could_answer_fails(status: int, code: str, kind: type[Exception]) -> None:
    with pytest.raises(kind, match="http://node:8000: why"):
        sampled(failing(status, code))


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (failing(404, "unknown_url"), "has no POST /v1/replica/join: .* older than this trainer"),
        (failing(401, "invalid_api_key", "a key is needed"), "a key is needed; set PARALLM_API_KEY to its key"),
        (failing(403, "not_allowed"), "why"),
        (failing(409, "unavailable", "this server has the base x"), "this server has the base x"),
        (lambda request: httpx.Response(200, json={"api": 7}), "answers in another form"),
        (lambda request: httpx.Response(200, text="<html>"), "answers in another form"),
    ],
)
def test_a_server_that_has_to_be_changed_refuses(answer: Answer, said: str) -> None:
    with pytest.raises(EngineRefused, match=said):
        joined(answer)


def test_a_server_that_is_not_there_may_come() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("All connection attempts failed")

    with pytest.raises(EngineLost, match="http://node:8000 does not answer: All connection"):
        joined(answer)
    with pytest.raises(EngineLost):
        joined(failing(503, "engine_stopped"))


def test_a_completion_with_what_json_has_no_number_for_comes_as_it_is() -> None:
    least = replace(ONE.completion("a"), logprobs=(float("-inf"),))
    again = sampled(streaming(event(SampledCompletion.of(least, {1: "d"})), event(OTHER)))[0]
    assert isinstance(again.completion("a"), Completion)
    assert again.completion("a") == least
