import asyncio
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from parallm.errors import EngineFull, InvalidRequest
from parallm.server.engine_gateway import MANY_STREAMS, EngineGateway, StreamCoalescer, names_request
from parallm.server.operation.request_metrics import RequestMetrics
from parallm.server.settings import ServerSettings
from parallm.types import GenerationRequest, SamplingParams

Call = Callable[..., httpx.Response]
REQUEST = GenerationRequest(
    request_id="cmpl-r1#0", prompt_tokens=(104, 105), sampling=SamplingParams(max_tokens=2), model="policy", n=2
)


def gateway_of(engine: Any) -> EngineGateway:
    return EngineGateway(engine, settings=ServerSettings(), metrics=RequestMetrics("nano"))


async def soon(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not is_true():
            await asyncio.sleep(0.001)


def test_while_paused_requests_wait_and_then_go_on(engine: Any) -> None:
    async def main() -> None:
        gateway = gateway_of(engine)
        await gateway.pause("keep")
        assert engine.is_paused
        work = asyncio.create_task(gateway.generate(REQUEST))
        await soon(lambda: gateway.num_held == 1)
        assert engine.requests == []
        await gateway.resume()
        assert [completion.text for completion in await work] == ["hi", "hi"]
        assert (engine.is_paused, gateway.num_held, gateway.num_in_flight) == (False, 0, 0)

    asyncio.run(main())


def test_a_request_that_has_not_woken_waits_through_the_next_pause(engine: Any) -> None:
    async def main() -> None:
        gateway = gateway_of(engine)
        await gateway.pause("keep")
        work = asyncio.create_task(gateway.generate(REQUEST))
        await soon(lambda: gateway.num_held == 1)
        await gateway.resume()
        await gateway.pause("abort")
        await asyncio.sleep(0.01)
        assert engine.requests == []
        assert gateway.num_held == 1
        await gateway.resume()
        assert [completion.text for completion in await work] == ["hi", "hi"]

    asyncio.run(main())


def test_a_request_that_waits_can_be_cancelled_and_its_id_used_again(engine: Any) -> None:
    async def main() -> None:
        gateway = gateway_of(engine)
        await gateway.pause("keep")
        works = [asyncio.create_task(gateway.generate(REQUEST)), asyncio.create_task(listed(gateway))]
        await soon(lambda: gateway.num_held == 2)
        with pytest.raises(InvalidRequest, match="'cmpl-r1' is in use"):
            await gateway.generate(REQUEST)
        assert await gateway.cancel("r1") == 1
        assert [(one.tokens, one.finish_reason) for one in await works[0]] == [((), "abort")] * 2
        assert await gateway.cancel_all() == 1
        assert [event.completion.finish_reason for event in await works[1]] == ["abort", "abort"]
        await gateway.resume()
        assert len(await gateway.generate(REQUEST)) == 2

    async def listed(gateway: EngineGateway) -> list[Any]:
        return [event async for event in gateway.stream(replace(REQUEST, request_id="r2"))]

    asyncio.run(main())


def test_a_pause_holds_a_bounded_number_of_requests(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parallm.server.engine_gateway.MAX_HELD", 1)

    async def main() -> None:
        gateway = gateway_of(engine)
        await gateway.pause("keep")
        work = asyncio.create_task(gateway.generate(REQUEST))
        await soon(lambda: gateway.num_held == 1)
        with pytest.raises(EngineFull, match="1 requests wait already"):
            await gateway.generate(replace(REQUEST, request_id="r2"))
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        assert gateway.num_held == 0

    asyncio.run(main())


def test_pausing_with_abort_ends_what_runs_with_what_it_has(engine: Any) -> None:
    engine.is_endless = True

    async def main() -> None:
        gateway = gateway_of(engine)
        work = asyncio.create_task(gateway.generate(replace(REQUEST, n=1)))
        await soon(lambda: bool(engine.requests))
        await gateway.pause("abort")
        assert gateway.num_in_flight == 0
        assert [(one.tokens, one.finish_reason) for one in await work] == [((104, 105), "abort")]

    asyncio.run(main())


def test_pausing_with_wait_returns_when_nothing_runs(engine: Any) -> None:
    engine.is_endless = True

    async def main() -> None:
        gateway = gateway_of(engine)
        work = asyncio.create_task(gateway.generate(replace(REQUEST, n=1)))
        await soon(lambda: bool(engine.requests))
        pausing = asyncio.create_task(gateway.pause("wait"))
        await asyncio.sleep(0.02)
        assert not pausing.done()
        await gateway.cancel("r1")
        await asyncio.wait_for(pausing, 5)
        assert (await work)[0].finish_reason == "abort"

    asyncio.run(main())


def test_a_pause_that_waits_ends_when_somebody_resumes(engine: Any) -> None:
    engine.is_endless = True

    async def main() -> None:
        gateway = gateway_of(engine)
        work = asyncio.create_task(gateway.generate(replace(REQUEST, n=1)))
        await soon(lambda: bool(engine.requests))
        pausing = asyncio.create_task(gateway.pause("wait"))
        await soon(lambda: gateway.is_paused)
        await gateway.resume()
        await asyncio.wait_for(pausing, 5)
        assert not work.done()
        await gateway.cancel("r1")
        await work

    asyncio.run(main())


def test_a_probe_that_leaves_during_a_pause_waits_no_longer(app: FastAPI) -> None:
    left, sent = asyncio.Event(), ["http.request"]

    async def receive() -> dict[str, Any]:
        if sent:
            return {"type": sent.pop(), "body": b"", "more_body": False}
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: object) -> None:
        pass

    async def main() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            await client.post("/pause?mode=keep")
            scope = {"type": "http", "method": "GET", "path": "/health_generate", "query_string": b"", "headers": []}
            probe = asyncio.create_task(app(scope, receive, send))
            while (await client.get("/v1/queue")).json()["num_held"] == 0:
                await asyncio.sleep(0.001)
            left.set()
            await asyncio.wait_for(probe, 5)
            assert (await client.get("/v1/queue")).json()["num_held"] == 0

    asyncio.run(main())


@pytest.mark.parametrize(
    ("request_id", "name", "is_meant"),
    [
        ("cmpl-a#0", "a", True),
        ("cmpl-a#1", "cmpl-a", True),
        ("chatcmpl-a", "a", True),
        ("a#0", "a", True),
        ("cmpl-a-1#0", "a", False),
        ("cmpl-ab#0", "a", False),
    ],
)
def test_a_request_is_called_by_the_id_of_its_answer_or_by_the_clients_own(
    request_id: str, name: str, is_meant: bool
) -> None:
    assert names_request(request_id, name) is is_meant


@pytest.fixture
def on_one_loop(app: FastAPI) -> Callable[[Callable[[httpx.AsyncClient], Awaitable[None]]], None]:
    """Run a coroutine function with a client; all its requests are on one event loop."""

    async def main(work: Callable[[httpx.AsyncClient], Awaitable[None]]) -> None:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=10) as client:
            await work(client)

    return lambda work: asyncio.run(main(work))


@pytest.mark.parametrize(
    ("pause", "resume"),
    [
        ("/pause?mode=keep&clear_cache=false", "/resume"),
        ("/pause_generation", "/continue_generation"),
        ("/areal_pause_generation", "/areal_continue_generation"),
    ],
)
def test_pause_holds_new_requests_until_resume_under_all_names(on_one_loop: Any, pause: str, resume: str) -> None:
    async def work(client: httpx.AsyncClient) -> None:
        assert (await client.post(pause)).json() == {"status": "paused", "is_paused": True}
        assert (await client.get("/is_paused")).json() == {"is_paused": True}
        asked = asyncio.create_task(client.post("/v1/completions", json={"model": "policy", "prompt": "hi"}))
        await asyncio.sleep(0.02)
        queue = (await client.get("/v1/queue")).json()
        assert (queue["num_held"], queue["num_in_flight"], queue["is_paused"]) == (1, 0, True)
        assert (await client.post(resume, json={})).json()["status"] == "resumed"
        assert (await asked).status_code == 200

    on_one_loop(work)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/abort_requests", {"request_ids": ["r1", "unknown"]}),
        ("/v1/requests/cmpl-r1/cancel", None),
        ("/abort_request", {"rid": "r1"}),
        ("/abort_request", {"rid": "", "abort_all": True}),
    ],
)
def test_a_request_is_ended_by_its_id_and_answers_with_what_it_has(
    on_one_loop: Any, engine: Any, path: str, body: dict[str, Any] | None
) -> None:
    engine.is_endless = True

    async def work(client: httpx.AsyncClient) -> None:
        sent = {"model": "policy", "prompt": "hi", "request_id": "r1", "max_tokens": 2}
        asked = asyncio.create_task(client.post("/v1/completions", json=sent))
        while not engine.requests:
            await asyncio.sleep(0.001)
        assert (await client.post(path, json=body)).json() == {"status": "aborted", "aborted": 1}
        choice = (await asked).json()["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == ("hi", "abort")

    on_one_loop(work)


def test_caches_are_forgotten_under_all_names(call: Call, engine: Any) -> None:
    for method, path in (("POST", "/reset_prefix_cache"), ("GET", "/flush_cache"), ("POST", "/flush_cache")):
        assert call(method, path).json() == {"success": True}
    assert engine.num_resets == 3


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/pause?mode=sideways", None),
        ("/pause?mod=keep", None),
        ("/pause_generation", {"mode": "sideways"}),
        ("/abort_request", {}),
        ("/abort_requests", {"request_ids": "r1"}),
        ("/resume", {"now": True}),
        ("/v1/completions", {"model": "policy", "prompt": "hi", "request_id": "a#1"}),
    ],
)
def test_wrong_bodies_of_control_routes_are_refused(call: Call, path: str, body: dict[str, Any] | None) -> None:
    response = call("POST", path, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_warming_up_generates_for_growing_numbers_of_rows_that_share_nothing(call: Call, engine: Any) -> None:
    answer = call("POST", "/v1/warmup", json={"rows": 6, "prompt_tokens": 3, "model": "policy"})
    assert list(answer.json()["seconds"]) == ["1", "2", "4", "6"]
    assert [(one.n, one.prompt_tokens, one.model) for one in engine.requests] == [
        (rows, (ord("0"),) * 3, "policy") for rows in (1, 2, 4, 6)
    ]
    assert len({one.cache_salt for one in engine.requests}) == 4
    assert call("POST", "/v1/warmup", json={"rows": 0}).status_code == 400


def intervals(engine: Any, num_streams: int, coalesce_ms: float) -> list[float]:
    """Return what the engine is told while streams open one after the other, and close."""
    engine.intervals.clear()
    coalescer = StreamCoalescer(engine, coalesce_ms)
    with ExitStack() as streams:
        for _ in range(num_streams):
            streams.enter_context(coalescer.stream())
    return list(engine.intervals)


def test_the_engine_hears_when_streams_become_many_and_when_they_become_few(engine: Any) -> None:
    assert intervals(engine, MANY_STREAMS + 5, 60) == [0.06, 0.0]


def test_few_streams_are_not_coalesced_nor_are_many_with_an_interval_of_zero(engine: Any) -> None:
    assert intervals(engine, MANY_STREAMS, 60) == intervals(engine, MANY_STREAMS + 1, 0) == []


def test_streams_count_while_they_are_open(engine: Any) -> None:
    gateway = gateway_of(engine)

    async def read(number: int) -> None:
        async for _ in gateway.stream(replace(REQUEST, request_id=f"cmpl-r{number}#0")):
            pass

    async def main() -> None:
        await asyncio.gather(*map(read, range(MANY_STREAMS + 1)))

    asyncio.run(main())
    assert engine.intervals == [ServerSettings().coalesce_ms / 1000, 0.0]
