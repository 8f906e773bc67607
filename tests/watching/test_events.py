"""The stream of events over real sockets: what a page gets, after a break too, and that it delays no end."""

import asyncio
import hashlib
import json
import time
from collections.abc import Mapping
from typing import Any

import pytest
from fastapi import FastAPI

from parallm.metrics.news import MAX_WATCHERS
from parallm.metrics.watching import Watching
from parallm.server.operation.auth import read_keys
from parallm.server.operation.http_server import HttpServer
from parallm.server.operation.sockets import bind
from parallm.server.settings import ApiKey, KeyRole, ServerSettings
from tests.server.conftest import send_to
from tests.watching.conftest import FREE_PORT, application, opened, row, served

KEYS: Mapping[KeyRole, str] = {"inference": "inference-0123456789abcdef", "training": "training-0123456789abcdef"}
API_KEYS = tuple(
    ApiKey(name=role, role=role, sha256=hashlib.sha256(key.encode()).hexdigest()) for role, key in KEYS.items()
)


def test_a_page_gets_the_state_first_and_then_each_step(app: FastAPI, watching: Watching) -> None:
    run = watching.runs["policy"]
    run.step(row(1))

    async def watch() -> list[Any]:
        async with served(app) as client, opened(client) as page:
            hello = await page.next()
            run.step(row(2))
            run.evaluation({"step": 2, "heldout/accuracy": 0.5})
            return [hello, *[await page.next("step", "evaluation") for _ in range(2)]]

    hello, step, evaluation = asyncio.run(watch())
    assert (hello["event"], hello["epoch"], hello["last"]) == ("hello", run.history.epoch, 1)
    assert hello["status"]["state"] == "updating"
    assert hello["last_step_row"]["reward/mean"] == 0.125
    assert (step["event"], step["policy"], step["step"], step["reward/mean"]) == ("step", "policy", 2, 0.25)
    assert (evaluation["event"], evaluation["heldout/accuracy"]) == ("evaluation", 0.5)


def test_a_page_that_comes_back_gets_the_steps_it_lacks(app: FastAPI, watching: Watching) -> None:
    run = watching.runs["policy"]
    for step in range(1, 6):
        run.step(row(step))

    async def events(query: str, number: int) -> list[Any]:
        async with served(app) as client, opened(client, f"/v1/events?{query}") as page:
            return [await page.next() for _ in range(number)]

    missed = asyncio.run(events(f"since=3&epoch={run.history.epoch}", 3))
    assert [(event["event"], event.get("step")) for event in missed] == [("hello", None), ("step", 4), ("step", 5)]
    assert missed[2]["reward/mean"] == 0.625
    assert [event["event"] for event in asyncio.run(events("since=3&epoch=other", 2))] == ["hello", "lost"]
    for step in range(6, 400):
        run.step(row(step))
    assert [event["event"] for event in asyncio.run(events(f"since=3&epoch={run.history.epoch}", 2))] == [
        "hello",
        "lost",
    ]


def test_dropped_steps_begin_another_epoch(app: FastAPI, watching: Watching) -> None:
    run = watching.runs["policy"]
    run.step(row(1))
    first = send_to(app, "GET", "/v1/runs/current/history").json()["epoch"]
    run.go_on_after(0)
    assert send_to(app, "GET", "/v1/runs/current/history").json()["epoch"] != first


@pytest.mark.parametrize("readers", ["reading", "standing still"])
def test_open_pages_do_not_delay_the_end(app: FastAPI, watching: Watching, readers: str) -> None:
    """The control: an ordinary request in flight is waited for as long as `drain_seconds`."""

    async def seconds_to_end() -> tuple[float, list[Any]]:
        server = HttpServer(app, bind(FREE_PORT), FREE_PORT)
        await server.start()
        host, port = server.url.removeprefix("http://").split(":")
        pages = [await asyncio.open_connection(host, int(port)) for _ in range(3)]
        for reader, writer in pages:
            writer.write(b"GET /v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await reader.readuntil(b"\n\n")
        began = time.monotonic()
        ends = [asyncio.create_task(reader.read()) for reader, _ in pages] if readers == "reading" else []
        await server.stop()
        seconds = time.monotonic() - began
        texts = [await end for end in ends]
        for _, writer in pages:
            writer.close()
        return seconds, texts

    seconds, texts = asyncio.run(seconds_to_end())
    assert seconds < 1.0
    for text in texts:
        assert text.count(b'event: bye\ndata: {"reason":"draining"}\n\n') == 1


def test_a_page_counts_neither_as_work_nor_as_a_slow_request(app: FastAPI) -> None:
    async def run() -> tuple[float, str]:
        async with served(app) as client:
            async with opened(client) as page:
                await page.next()
                idle = app.state.drain.idle_seconds()
            await asyncio.sleep(0.05)
            return idle, (await client.get("/metrics")).text

    idle, metrics = asyncio.run(run())
    assert idle > 0
    assert 'http_requests_total{handler="/v1/events"' in metrics
    assert 'http_request_duration_seconds_count{handler="/v1/events"' not in metrics


def test_a_page_that_leaves_is_forgotten(app: FastAPI, watching: Watching) -> None:
    async def run() -> None:
        async with served(app) as client:
            async with opened(client) as page:
                await page.next()
                assert watching.news.num_watchers == 1
            async with asyncio.timeout(5):
                while watching.news.num_watchers:
                    await asyncio.sleep(0.01)

    asyncio.run(run())


def test_a_stream_outlives_the_time_of_a_request(watching: Watching) -> None:
    settings = ServerSettings(port=0, request_seconds=0.2)

    async def run() -> Any:
        async with served(application(watching, settings=settings), settings) as client, opened(client) as page:
            await page.next()
            await asyncio.sleep(0.4)
            watching.runs["policy"].step(row(1))
            return await page.next("step")

    assert asyncio.run(run())["step"] == 1


def test_one_page_too_many_is_refused_with_the_limit(app: FastAPI, watching: Watching) -> None:
    async def run() -> Any:
        watching.news._watchers.update(object() for _ in range(MAX_WATCHERS))  # type: ignore[misc]
        async with served(app) as client:
            answer = await client.get("/v1/events")
            watching.news._watchers.clear()
            return answer

    refusal = asyncio.run(run())
    assert refusal.status_code == 429
    assert "64 pages watch already, which is the limit; close one" in refusal.json()["error"]["message"]


def test_watching_needs_the_role_that_may_see_what_training_makes(watching: Watching) -> None:
    settings = ServerSettings(port=0, api_keys=API_KEYS)
    app = application(watching, settings=settings, keys=read_keys(settings))
    for path in ("/v1/events", "/v1/runs/current/history"):
        assert send_to(app, "GET", path).status_code == 401
        assert send_to(app, "GET", path, headers={"x-api-key": KEYS["inference"]}).status_code == 403

    async def run() -> Any:
        async with served(app, settings) as client, opened(client, **{"x-api-key": KEYS["training"]}) as page:
            return await page.next()

    assert asyncio.run(run())["event"] == "hello"
    session = send_to(app, "GET", "/v1/session", headers={"x-api-key": KEYS["inference"]}).json()
    assert (session["role"], session["key"], session["has_keys"]) == ("inference", "inference", True)


def test_without_keys_a_session_has_every_role(app: FastAPI, watching: Watching) -> None:
    session = send_to(app, "GET", "/v1/session").json()
    assert (session["role"], session["key"], session["has_keys"]) == ("admin", None, False)
    assert (session["run"], session["trains"], session["serves"]) == (watching.run_id, [], True)


def test_events_are_one_line_of_json_whatever_a_row_holds(app: FastAPI, watching: Watching) -> None:
    async def run() -> Any:
        async with served(app) as client, opened(client) as page:
            await page.next()
            watching.runs["policy"].step(row(1, nan=float("nan")) | {"update/skipped": "a\n\ud800</script>"})
            return await page.next("step")

    step = asyncio.run(run())
    assert (step["nan"], step["update/skipped"]) == (None, "a\n\ud800</script>")
    assert json.dumps(step)
