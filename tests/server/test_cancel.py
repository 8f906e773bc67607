"""Who may end which request."""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from parallm.server.operation.auth import StoredKey
from parallm.server.settings import KeyRole, ServerSettings
from tests.server.conftest import make_app

NAMES: dict[str, KeyRole] = {"reader": "inference", "other": "inference", "trainer": "training", "boss": "admin"}
SENT = {"model": "policy", "prompt": "hi", "request_id": "r1", "max_tokens": 2}
CANCEL = "/v1/requests/r1/cancel"


def key_of(name: str) -> dict[str, str]:
    return {"x-api-key": f"{name}-0123456789abcdef"}


@pytest.fixture
def on_one_loop(engine: Any, tokenizer: Any) -> Callable[..., None]:
    """Run a coroutine function with a client of an endless engine, which knows these keys."""
    engine.is_endless = True

    async def main(
        work: Callable[[httpx.AsyncClient], Awaitable[None]], names: dict[str, KeyRole], settings: ServerSettings
    ) -> None:
        digests = {name: hashlib.sha256(key_of(name)["x-api-key"].encode()).digest() for name in names}
        app = make_app(
            engine,
            tokenizer,
            settings=settings,
            keys=tuple(StoredKey(name=name, role=role, digest=digests[name]) for name, role in names.items()),
        )
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=10) as client:
            await work(client)

    return lambda work, names=NAMES, settings=None: asyncio.run(main(work, names, settings or ServerSettings()))


async def begin(client: httpx.AsyncClient, engine: Any, headers: dict[str, str]) -> asyncio.Task[httpx.Response]:
    """A request of `r1` that the engine is at."""
    asked = asyncio.create_task(client.post("/v1/completions", json=SENT, headers=headers))
    async with asyncio.timeout(5):
        while not engine.requests:
            await asyncio.sleep(0.001)
    return asked


@pytest.mark.parametrize("canceller", ["reader", "boss"])
def test_a_request_is_ended_by_its_own_key_or_an_admins(
    on_one_loop: Callable[..., None], engine: Any, canceller: str
) -> None:
    async def work(client: httpx.AsyncClient) -> None:
        asked = await begin(client, engine, key_of("reader"))
        answer = await client.post(CANCEL, headers=key_of(canceller))
        assert answer.json() == {"status": "aborted", "aborted": 1}
        assert (await asked).json()["choices"][0]["finish_reason"] == "abort"

    on_one_loop(work)


@pytest.mark.parametrize("canceller", ["other", "trainer"])
def test_a_request_of_another_key_is_as_if_it_were_not_there(
    on_one_loop: Callable[..., None], engine: Any, canceller: str
) -> None:
    async def work(client: httpx.AsyncClient) -> None:
        asked = await begin(client, engine, key_of("reader"))
        answers = [await client.post(path, headers=key_of(canceller)) for path in (CANCEL, "/v1/requests/r2/cancel")]
        assert [answer.status_code for answer in answers] == [404, 404]
        told, unknown = (answer.text for answer in answers)
        assert told.replace("r1", "r2") == unknown
        assert (await client.get("/v1/queue", headers=key_of("boss"))).json()["num_in_flight"] == 1
        assert not asked.done()
        await client.post(CANCEL, headers=key_of("boss"))
        await asked

    on_one_loop(work)


def test_a_request_that_a_pause_holds_is_ended_by_its_own_key_alone(on_one_loop: Callable[..., None]) -> None:
    async def work(client: httpx.AsyncClient) -> None:
        await client.post("/pause?mode=keep", headers=key_of("boss"))
        asked = asyncio.create_task(client.post("/v1/completions", json=SENT, headers=key_of("reader")))
        async with asyncio.timeout(5):
            while (await client.get("/v1/queue", headers=key_of("boss"))).json()["num_held"] == 0:
                await asyncio.sleep(0.001)
        assert (await client.post(CANCEL, headers=key_of("other"))).status_code == 404
        assert (await client.post(CANCEL, headers=key_of("reader"))).json()["aborted"] == 1
        assert (await asked).json()["choices"][0]["finish_reason"] == "abort"

    on_one_loop(work)


def test_without_keys_this_machine_ends_any_request_unless_control_is_off(
    on_one_loop: Callable[..., None], engine: Any
) -> None:
    async def work(client: httpx.AsyncClient) -> None:
        asked = await begin(client, engine, {})
        assert (await client.post("/v1/requests/r2/cancel")).json() == {"status": "aborted", "aborted": 0}
        assert (await client.post(CANCEL)).json()["aborted"] == 1
        await asked

    async def refused(client: httpx.AsyncClient) -> None:
        assert (await client.post(CANCEL)).status_code == 404

    on_one_loop(work, {})
    on_one_loop(refused, {}, ServerSettings(control_routes=False))
