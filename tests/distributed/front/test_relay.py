"""Requests that reach a worker, whatever becomes of the first one that is asked."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from bench.fake_worker import FakeWorker

from parallm.distributed.front import relay, workers
from parallm.server.settings import ServerSettings
from tests.distributed.front.conftest import Fronted, bodies

WithFront = Callable[..., None]
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
MISSING = (404, {"error": {"message": "no model", "code": "model_not_found", "type": "x", "param": "model"}})


def closing(serve: Serve) -> Serve:
    """Close each connection at the end of `serve`, however that comes."""

    async def run(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    return run


def error_of(response: httpx.Response) -> Any:
    return response.json()["error"]


def test_answers_come_through_unchanged(with_front: WithFront) -> None:
    fake = FakeWorker("a")

    async def test(front: Fronted) -> None:
        response = await front.chat(temperature=0.5)
        assert response.status_code == 200
        assert response.json()["choices"][0]["message"]["content"] == "xxxx"
        assert response.headers["x-request-id"] == fake.requests[-1][2]["x-request-id"]
        assert bodies(fake)[-1]["temperature"] == 0.5
        streamed = await front.chat(stream=True)
        assert streamed.headers["content-type"].startswith("text/event-stream")
        lines = streamed.text.split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""]
        assert len(lines) == 6

    with_front(test, fake)


def test_events_are_handed_on_as_they_come(with_front: WithFront) -> None:
    async def test(front: Fronted) -> None:
        body = {"messages": [], "max_tokens": 4, "stream": True}
        times = []
        async with front.client.stream("POST", "/v1/chat/completions", json=body) as response:
            async for _ in response.aiter_text():
                times.append(time.perf_counter())
        assert times[-1] - times[0] > 0.2

    with_front(test, FakeWorker(seconds_per_token=0.1))


@pytest.mark.parametrize("stream", [False, True])
def test_a_worker_lost_before_the_first_byte_is_replaced(with_front: WithFront, stream: bool) -> None:
    dying, other = FakeWorker("dying"), FakeWorker("other")
    dying.dies = lambda number: number == 0

    async def test(front: Fronted) -> None:
        for number in range(8):
            response = await front.chat(str(number), stream=stream)
            assert response.status_code == 200
            assert '"other"' in response.text
            await front.until_up(2)
        assert len(bodies(dying)) >= 4

    with_front(test, dying, other)


def test_an_answer_that_breaks_off_before_its_end_is_asked_for_again(with_front: WithFront) -> None:
    """A whole answer is handed on only when all of it has come."""

    async def test(front: Fronted) -> None:
        cut = b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n{"

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n" if b"/ready" in head else cut)
            writer.close()

        server = await asyncio.start_server(closing(serve), "127.0.0.1", 0)
        async with server:
            other = front.workers.all[0].address
            port = server.sockets[0].getsockname()[1]
            front.workers.set({0: f"http://127.0.0.1:{port}", 1: f"http://127.0.0.1:{other.port}"})
            await front.until_up(2)
            assert [(await front.chat(str(number))).status_code for number in range(6)] == [200] * 6
            await front.forget_workers()

    with_front(test, FakeWorker())


def test_a_request_that_ends_every_worker_is_given_up(with_front: WithFront) -> None:
    fakes = [FakeWorker() for _ in range(4)]
    for fake in fakes:
        fake.dies = lambda number: number == 0

    async def test(front: Fronted) -> None:
        response = await front.chat()
        assert response.status_code == 502
        assert error_of(response)["code"] == "worker_lost"
        assert response.headers["x-should-retry"] == "false"
        assert sum(len(fake.requests) for fake in fakes) == relay.MAX_LOST

    with_front(test, *fakes)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_a_stream_that_a_worker_cannot_end_ends_with_an_error(with_front: WithFront, path: str) -> None:
    dying = FakeWorker()
    dying.dies = lambda number: number == 2

    async def test(front: Fronted) -> None:
        dying.route_of_chats = path
        body = {"messages": [], "max_tokens": 8, "stream": True}
        response = await front.client.post(path, json=body)
        assert response.status_code == 200
        *events, last, end = response.text.split("\n\n")
        assert (len(events), end) == (2, "")
        assert "[DONE]" not in response.text
        error = json.loads(last.removeprefix("event: error\n").removeprefix("data: "))
        assert (error if path == "/v1/responses" else error["error"])["code"] == "worker_lost"

    with_front(test, dying)


def test_half_an_event_is_not_handed_on(with_front: WithFront) -> None:
    async def test(front: Fronted) -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = await reader.readuntil(b"\r\n\r\n")
            if b"/ready" in head:
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
            else:
                writer.write(
                    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
                )
                text = b'data: {"a": 1}\n\ndata: {"a": '
                writer.write(b"%x\r\n%b\r\n" % (len(text), text))
                await writer.drain()
                await asyncio.sleep(0.05)
            writer.close()

        server = await asyncio.start_server(closing(serve), "127.0.0.1", 0)
        async with server:
            front.workers.set({0: f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"})
            await front.until_up(1)
            first, last, _ = (await front.chat(stream=True)).text.split("\n\n")
            assert first == 'data: {"a": 1}'
            assert json.loads(last.removeprefix("data: "))["error"]["code"] == "worker_lost"
            await front.forget_workers()

    with_front(test)


def test_requests_wait_for_a_worker(with_front: WithFront) -> None:
    late = FakeWorker()

    async def test(front: Fronted) -> None:
        waiting = [asyncio.create_task(front.chat(str(number))) for number in range(5)]
        while front.workers.num_waiting < 5:
            await asyncio.sleep(0.01)
        assert (await front.client.get("/ready")).status_code == 503
        assert (await front.client.get("/health")).status_code == 200
        await late.start()
        front.workers.set({0: late.url})
        assert [(await one).status_code for one in waiting] == [200] * 5
        late.stop()

    with_front(test)


def test_without_a_worker_a_request_ends_in_time(with_front: WithFront) -> None:
    async def test(front: Fronted) -> None:
        response = await front.chat()
        assert response.status_code == 503
        assert error_of(response)["code"] == "no_worker"
        assert response.headers["retry-after"] == str(relay.RETRY_SECONDS)

    with_front(test, hold_seconds=0.2)


def test_only_so_many_requests_wait(with_front: WithFront, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "MAX_WAITING", 3)

    async def test(front: Fronted) -> None:
        waiting = [asyncio.create_task(front.chat(str(number))) for number in range(3)]
        while front.workers.num_waiting < 3:
            await asyncio.sleep(0.01)
        response = await front.chat()
        assert (response.status_code, "3 requests" in response.text) == (503, True)
        await asyncio.gather(*waiting)

    with_front(test, hold_seconds=1)


def test_a_worker_that_starts_again_is_taken_in(with_front: WithFront) -> None:
    first = FakeWorker("first")

    async def test(front: Fronted) -> None:
        port = first.port
        await front.chat()
        first.stop()
        waiting = asyncio.create_task(front.chat())
        await asyncio.sleep(0.2)
        again = FakeWorker("again")
        await again.start(port)
        assert (await waiting).json()["model"] == "again"
        again.stop()

    with_front(test, first)


def test_a_worker_that_does_not_answer_is_left(with_front: WithFront, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "READY_SECONDS", 0.1)
    monkeypatch.setattr(workers, "SECONDS_BETWEEN_LOOKS", 0.1)

    async def test(front: Fronted) -> None:
        is_frozen = False

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while head := await reader.readuntil(b"\r\n\r\n"):
                if b"/ready" in head and not is_frozen:
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")

        server = await asyncio.start_server(closing(serve), "127.0.0.1", 0)
        other = front.workers.all[0].address
        frozen = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        front.workers.set({0: frozen, 1: f"http://127.0.0.1:{other.port}"})
        await front.until_up(2)
        is_frozen = True
        began = time.perf_counter()
        assert [(await front.chat(str(number))).status_code for number in range(4)] == [200] * 4
        assert time.perf_counter() - began < 5
        await front.forget_workers()
        server.close()

    with_front(test, FakeWorker())


@pytest.mark.parametrize(("status", "code"), [(503, "draining"), (429, "engine_full")])
def test_a_worker_that_refuses_is_replaced(with_front: WithFront, status: int, code: str) -> None:
    refusal = (status, {"error": {"message": "not now", "code": code}})
    refusing, other = FakeWorker(answers={"POST /v1/chat/completions": refusal}), FakeWorker("other")

    async def test(front: Fronted) -> None:
        for number in range(4):
            assert (await front.chat(str(number))).json()["model"] == "other"
        other.answers["POST /v1/chat/completions"] = refusal
        response = await front.chat()
        assert (response.status_code, error_of(response)["code"]) == (status, code)

    with_front(test, refusing, other, hold_seconds=0.3)


def models(*versions: int) -> tuple[int, Any]:
    return 200, {"data": [{"id": "policy"}, {"id": "base"}, *({"id": f"policy@{number}"} for number in versions)]}


def test_a_version_that_one_worker_lacks_comes_from_another(with_front: WithFront) -> None:
    old = FakeWorker("old", answers={"POST /v1/chat/completions": MISSING})

    async def test(front: Fronted) -> None:
        for number in range(4):
            assert (await front.chat(str(number), model="policy@12")).json()["model"] == "new"

    with_front(test, old, FakeWorker("new"))


def test_the_next_version_is_waited_for(with_front: WithFront) -> None:
    answers = {"POST /v1/chat/completions": MISSING, "GET /v1/models": models(10, 11)}
    fake = FakeWorker(answers=answers)

    async def test(front: Fronted) -> None:
        asking = asyncio.create_task(front.chat(model="policy@12"))
        await asyncio.sleep(0.3)
        assert not asking.done()
        del fake.answers["POST /v1/chat/completions"]
        assert (await asking).status_code == 200

    with_front(test, fake)


@pytest.mark.parametrize("model", ["policy@13", "policy@9", "poet@1", "policy@", "nothing"])
def test_no_other_version_is_waited_for(with_front: WithFront, model: str) -> None:
    answers = {"POST /v1/chat/completions": MISSING, "GET /v1/models": models(10, 11)}

    async def test(front: Fronted) -> None:
        began = time.perf_counter()
        response = await front.chat(model=model)
        assert (response.status_code, error_of(response)) == (404, MISSING[1]["error"])
        assert time.perf_counter() - began < 1

    with_front(test, FakeWorker(answers=answers))


def test_a_client_that_leaves_ends_its_request(with_front: WithFront) -> None:
    fake = FakeWorker(seconds_per_token=0.2)

    async def test(front: Fronted) -> None:
        for stream in (False, True):
            with pytest.raises(httpx.ReadTimeout):
                await front.client.post(
                    "/v1/chat/completions",
                    json={"messages": [], "max_tokens": 100, "stream": stream},
                    timeout=httpx.Timeout(0.3 if not stream else 0.1),
                )
        while fake.num_left < 2:
            await asyncio.sleep(0.02)
        assert front.workers.all[0].load == 0

    with_front(test, fake)


def test_a_client_that_leaves_while_it_waits_is_forgotten(with_front: WithFront) -> None:
    async def test(front: Fronted) -> None:
        with pytest.raises(httpx.ReadTimeout):
            await front.client.post("/v1/chat/completions", json={}, timeout=0.2)
        while front.workers.num_waiting:
            await asyncio.sleep(0.02)

    with_front(test)


def test_a_closed_idle_connection_is_no_lost_worker(with_front: WithFront) -> None:
    """One worker closes each connection after its answer without saying so."""

    async def test(front: Fronted) -> None:
        num_answers = 0

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal num_answers
            head = await reader.readuntil(b"\r\n\r\n")
            num_answers += b"/ready" not in head
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(closing(serve), "127.0.0.1", 0)
        async with server:
            front.workers.set({0: f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"})
            await front.until_up(1)
            assert [(await front.chat()).status_code for _ in range(20)] == [200] * 20
            assert num_answers == 20
            await front.forget_workers()

    with_front(test)


def test_draining_refuses_new_requests_and_ends_those_that_wait(with_front: WithFront) -> None:
    settings = ServerSettings(port=0, drain_seconds=0.2)

    async def test(front: Fronted) -> None:
        asyncio.get_running_loop().call_later(0.3, front.workers.end_waiting)
        began = time.perf_counter()
        assert (await front.chat()).status_code == 503
        assert time.perf_counter() - began < 2

    with_front(test, settings=settings)
