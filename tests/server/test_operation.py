import asyncio
import json
import re
from collections.abc import AsyncGenerator, Callable
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from starlette.types import Message

from parallm.server.generation import EventStream
from parallm.server.operation import routes_operation
from parallm.server.operation.http_server import HttpServer
from parallm.server.operation.sockets import bind
from parallm.server.settings import ServerSettings
from tests.server.conftest import make_app

FREE_PORT = ServerSettings(port=0)
BODY = {"model": "policy", "prompt": "hello"}
Call = Callable[..., httpx.Response]
Chat = Callable[..., httpx.Response]


@pytest.fixture
def app_with(engine: Any, tokenizer: Any) -> Callable[..., FastAPI]:
    """An application with these settings."""
    return lambda **settings: make_app(engine, tokenizer, settings=ServerSettings(**settings))


def series(text: str) -> dict[str, float]:
    """Value by name and labels, histogram buckets left out."""
    lines = [line for line in text.splitlines() if not line.startswith("#") and "_bucket" not in line]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def test_metrics_count_tokens_ends_and_routes_under_vllms_names(app: FastAPI) -> None:
    with TestClient(app, base_url="http://localhost") as client:
        for stream in (False, True):
            client.post("/v1/completions", json=BODY | {"n": 2, "max_tokens": 3, "stream": stream})
        client.post("/v1/chat/completions", json={"model": "nobody", "messages": [{"role": "user", "content": "x"}]})
        client.get("/nowhere/really")
        found = series(client.get("/metrics").text)
    of = '{engine="0",model_name="nano"}'
    assert found[f"vllm:prompt_tokens_total{of}"] == 10
    assert found[f"vllm:generation_tokens_total{of}"] == 12
    assert found['vllm:request_success_total{engine="0",finished_reason="length",model_name="nano"}'] == 4
    assert found[f"vllm:time_to_first_token_seconds_count{of}"] == 1
    assert found[f"vllm:inter_token_latency_seconds_count{of}"] == 4
    assert found[f"vllm:request_generation_tokens_sum{of}"] == 12
    assert found['http_requests_total{handler="/v1/completions",method="POST",status="2xx"}'] == 2
    assert found['http_requests_total{handler="/v1/chat/completions",method="POST",status="4xx"}'] == 1
    assert found['http_requests_total{handler="none",method="GET",status="4xx"}'] == 1


def test_metrics_tell_of_versions_training_and_rollouts(call: Call) -> None:
    found = series(call("GET", "/metrics").text)
    assert found['parallm:adapter_served_version{adapter="policy"}'] == 3
    assert found['parallm:adapter_versions{adapter="policy"}'] == 2
    assert found['parallm:adapter_bytes{adapter="policy"}'] == 2000
    assert found['parallm:training_steps_total{policy="policy"}'] == 4
    assert found['parallm:training_state{policy="policy",state="updating"}'] == 1
    assert found['parallm:tokens_total{traffic="rollout"}'] == 11
    of = '{engine="0",model_name="nano"}'
    assert found[f"vllm:kv_cache_usage_perc{of}"] == 0.25
    assert found[f"vllm:num_preemptions_total{of}"] == 2
    assert found[f"vllm:prefix_cache_queries_total{of}"] == 70
    assert found[f"vllm:prefix_cache_hits_total{of}"] == 16
    spoken = ("drafts", "draft_tokens", "accepted_tokens")
    assert [found[f"vllm:spec_decode_num_{name}_total{of}"] for name in spoken] == [3, 9, 5]
    assert found['vllm:num_requests_waiting{engine="0",model_name="nano"}'] == 0


def test_metrics_are_openmetrics_where_asked_for(call: Call) -> None:
    response = call("GET", "/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    assert response.headers["content-type"].startswith("application/openmetrics-text")
    assert response.text.endswith("# EOF\n")
    assert call("GET", "/metrics").headers["content-type"].startswith("text/plain")


def test_no_label_of_a_metric_comes_from_a_client(app: FastAPI) -> None:
    with TestClient(app, base_url="http://localhost") as client:
        before = len(series(client.get("/metrics").text))
        for place in range(20):
            client.request(f"VERB{place}", f"/v1/{place}")
            client.post("/v1/completions", json=BODY | {"model": f"model-{place}"})
        after = len(series(client.get("/metrics").text))
    assert after - before < 12


def test_the_server_is_ready_while_the_engine_answers(call: Call, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert call("GET", "/ready").json() == {"status": "ready"}
    monkeypatch.setattr(routes_operation, "SECONDS_TO_ANSWER", 0.05)
    engine.is_stuck = True
    assert call("GET", "/ready").status_code == 503
    assert call("GET", "/health").status_code == 200


def test_a_request_id_comes_back_if_it_is_harmless_and_is_made_if_not(call: Call) -> None:
    assert call("GET", "/health", headers={"x-request-id": "job-7/a"}).headers["x-request-id"] == "job-7/a"
    for given in ("", "two words", "x" * 129, "caf\u00e9"):
        response = call("GET", "/health", headers=[(b"x-request-id", given.encode())])
        assert re.fullmatch("[0-9a-f]{32}", response.headers["x-request-id"])
    assert re.fullmatch("[0-9a-f]{32}", call("GET", "/nowhere").headers["x-request-id"])


@pytest.mark.parametrize("header", [{}, {"x-request-timeout": "0.05"}])
def test_an_answer_that_takes_too_long_is_aborted(
    app_with: Callable[..., FastAPI], engine: Any, header: dict[str, str]
) -> None:
    engine.is_endless = True
    with TestClient(app_with(request_seconds=60 if header else 0.05), base_url="http://localhost") as client:
        whole = client.post("/v1/completions", json=BODY, headers=header)
        stream = client.post("/v1/completions", json=BODY | {"stream": True}, headers=header)
    assert (whole.status_code, whole.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert whole.headers["x-should-retry"] == "false"
    assert '"code":"deadline_exceeded"' in stream.text.split("\n\n")[-2]
    assert engine.num_aborted == 2


def test_a_time_that_is_none_is_refused(call: Call) -> None:
    for given in ("soon", "-1", "nan", "inf"):
        response = call("POST", "/v1/completions", json=BODY, headers={"x-request-timeout": given})
        assert response.json()["error"]["message"].endswith("and must be a number of seconds above 0")


def test_a_prompt_above_its_limit_is_refused_on_every_route(app_with: Callable[..., FastAPI]) -> None:
    with TestClient(app_with(max_prompt_tokens=4), base_url="http://localhost") as client:
        refused = client.post("/v1/completions", json=BODY)
        chat = {"model": "policy", "messages": [{"role": "user", "content": "hi"}], "stream": True}
        assert client.post("/v1/chat/completions", json=chat).status_code == 400
    assert refused.json()["error"]["message"] == (
        "the prompt has 5 tokens, the limit is 4; shorten it or raise server.max_prompt_tokens"
    )


async def started(app: FastAPI, drain_seconds: float) -> HttpServer:
    server = HttpServer(app, bind(FREE_PORT), ServerSettings(drain_seconds=drain_seconds))
    await server.start()
    return server


def test_draining_refuses_new_requests_and_lets_old_ones_finish(app: FastAPI, engine: Any) -> None:
    engine.is_stuck = True

    async def run() -> None:
        server = await started(app, 10)
        async with httpx.AsyncClient(base_url=server.url) as client:
            old = asyncio.create_task(client.post("/v1/completions", json=BODY | {"max_tokens": 2}))
            while not engine.requests:
                await asyncio.sleep(0.01)
            stopping = asyncio.create_task(server.stop())
            await asyncio.sleep(0.05)
            new = await client.post("/v1/completions", json=BODY)
            assert (new.status_code, new.headers["retry-after"]) == (503, "20")
            assert new.json()["error"]["code"] == "draining"
            assert (await client.get("/ready")).status_code == 503
            assert (await client.get("/health_generate")).status_code == 503
            for looks in ("/health", "/metrics", "/v1/models", "/v1/queue"):
                assert (await client.get(looks)).status_code == 200
            engine.is_stuck = False
            assert (await old).status_code == 200
            await stopping

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
def test_what_outlives_the_drain_is_aborted_and_says_so(app: FastAPI, engine: Any, stream: bool) -> None:
    engine.is_endless = True

    async def run() -> httpx.Response:
        server = await started(app, 0.1)
        async with httpx.AsyncClient(base_url=server.url) as client:
            request = asyncio.create_task(client.post("/v1/completions", json=BODY | {"stream": stream}))
            while not engine.requests:
                await asyncio.sleep(0.01)
            await server.stop()
            return await request

    answer = asyncio.run(run())
    last = answer.text.removesuffix("\n\n").rpartition("data: ")[2]
    assert (answer.status_code, json.loads(last)["error"]["code"]) == (200 if stream else 503, "draining")
    assert engine.num_aborted == 1


def test_a_client_that_takes_nothing_is_given_up_and_its_sources_are_closed() -> None:
    closed: list[str] = []

    async def endless(name: str) -> AsyncGenerator[bytes, None]:
        try:
            while True:
                yield b"data: x\n\n"
        finally:
            closed.append(name)

    async def run() -> int:
        num_sent = 0

        async def send(message: Message) -> None:
            nonlocal num_sent
            num_sent += 1
            if num_sent > 3:
                await asyncio.Event().wait()

        async def receive() -> Message:
            await asyncio.Event().wait()
            raise AssertionError

        source = endless("source")
        await anext(source)
        stream = EventStream(endless("events"), source, name="a", stall_seconds=0.05, failed=lambda _: b"")
        await stream({"type": "http"}, receive, send)
        return num_sent

    assert asyncio.run(run()) == 4
    assert closed == ["events", "source"]
