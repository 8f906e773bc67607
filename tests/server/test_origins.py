"""What pages in browsers send to a server on this machine, and by which names programs may call it."""

import asyncio
import hashlib
import re
import socket
from collections.abc import Callable, Mapping
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.types import Message, Scope

from parallm.server.dashboard.assets import PLOTLY, Assets
from parallm.server.dashboard.routes_page import PAGE_FOLDER
from parallm.server.operation.auth import read_keys
from parallm.server.operation.middleware import Origins
from parallm.server.settings import ApiKey, ServerSettings
from tests.server.conftest import make_app

KEY = "admin-0123456789abcdef"
API_KEYS = (ApiKey(name="admin", role="admin", sha256=hashlib.sha256(KEY.encode()).hexdigest()),)
OWN = "http://127.0.0.1:8000"
FOREIGN: Mapping[str, Mapping[str, str]] = {
    "a name that was made to mean this machine": {"Host": "evil.example:8000"},
    "a page of another origin": {"Origin": "https://evil.example"},
    "an embedded address": {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "image"},
    "a page of another port": {"Sec-Fetch-Site": "same-site"},
}
DOCUMENTS = ("/docs", "/docs/try", "/openapi.json")
Ask = Callable[..., list[httpx.Response]]


@pytest.fixture
def ask(engine: Any, tokenizer: Any) -> Ask:
    """Send requests `(method, path, headers)` to a server with these settings, one after the other."""

    def send(requests: list[tuple[str, str, Mapping[str, str]]], **settings: Any) -> list[httpx.Response]:
        return asyncio.run(send_all(application(engine, tokenizer, **settings), requests))

    return send


def application(engine: Any, tokenizer: Any, **settings: Any) -> FastAPI:
    found = ServerSettings(**settings)
    return make_app(engine, tokenizer, settings=found, keys=read_keys(found))


async def send_all(app: FastAPI, requests: list[tuple[str, str, Mapping[str, str]]]) -> list[httpx.Response]:
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url=OWN, timeout=10) as client:
        return [await client.request(method, path, headers=dict(headers)) for method, path, headers in requests]


def every_route(app: FastAPI) -> list[tuple[str, str]]:
    """Method and path of each operation of the OpenAPI document, of each route beside it, and of the page's files."""
    named = {(method.upper(), path) for path, methods in app.openapi()["paths"].items() for method in methods}
    named |= {
        (method, route.path_format)
        for route in app.routes
        if isinstance(route, APIRoute)
        for method in route.methods or ()
    }
    assets = Assets(PAGE_FOLDER)
    files = [("GET", f"/dashboard/{assets.digest}/{name}") for name in (*assets.names, PLOTLY)]
    others = [("GET", "/openapi.json"), ("GET", "/docs"), ("GET", "/docs/try"), ("GET", "/nowhere"), *files]
    return [*sorted((method, re.sub(r"{[^}]+}", "poet", path)) for method, path in named), *others]


async def status_of(app: FastAPI, method: str, path: str, headers: Mapping[str, str]) -> int:
    """Return the status of an answer, and leave: a stream of events has no end of its own."""
    status: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    bodies = [{"type": "http.request", "body": b"", "more_body": False}]

    async def receive() -> Message:
        if bodies:
            return bodies.pop()
        await asyncio.wait((status,))
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start" and not status.done():
            status.set_result(message["status"])

    all_headers = {"Host": "127.0.0.1:8000"} | dict(headers)
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(name.lower().encode(), value.encode()) for name, value in all_headers.items()],
        "client": ("127.0.0.1", 4321),
        "server": ("127.0.0.1", 8000),
    }
    asking = asyncio.ensure_future(app(scope, receive, send))
    try:
        await asyncio.wait((asking, status), timeout=20, return_when=asyncio.FIRST_COMPLETED)
        assert status.done(), f"{method} {path} did not answer"
        return status.result()
    finally:
        await asyncio.wait((asking,), timeout=0.2)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


def statuses(app: FastAPI, headers: Mapping[str, str]) -> dict[str, int]:
    """Return the status of each route for these headers, by method and path."""

    async def main() -> dict[str, int]:
        return {f"{method} {path}": await status_of(app, method, path, headers) for method, path in every_route(app)}

    return asyncio.run(main())


def answered(app: FastAPI, headers: Mapping[str, str]) -> list[str]:
    """Return the routes that do not refuse."""
    return [route for route, status in statuses(app, headers).items() if status != 403]


@pytest.mark.parametrize("ollama", [False, True])
@pytest.mark.parametrize("with_keys", [False, True])
def test_no_route_answers_what_a_foreign_page_sends(engine: Any, tokenizer: Any, with_keys: bool, ollama: bool) -> None:
    app = application(engine, tokenizer, api_keys=API_KEYS if with_keys else (), ollama=ollama)
    key = {"Authorization": f"Bearer {KEY}"} if with_keys else {}
    for name, headers in FOREIGN.items():
        assert (name, answered(app, key | dict(headers))) == (name, [])
        assert (name, answered(app, headers)) == (name, [])
    own = statuses(app, key)
    assert [route for route, status in own.items() if status == 403] == []
    assert len(own) > 120
    assert "GET /dashboard/" in own


@pytest.mark.parametrize("headers", FOREIGN.values(), ids=FOREIGN)
def test_routes_without_the_check_are_found(
    engine: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, headers: Mapping[str, str]
) -> None:
    app, check = application(engine, tokenizer), Origins.check
    holes = {"/v1/models", "/v1/training/stop", "/dashboard/", "/v1/adapters/poet/archive"}

    def leaky(origins: Origins, scope: Scope, found: Headers) -> None:
        if scope["path"] not in holes:
            check(origins, scope, found)

    monkeypatch.setattr(Origins, "check", leaky)
    assert {route.partition(" ")[2] for route in answered(app, headers)} == holes


def test_a_link_leads_to_pages_alone(engine: Any, tokenizer: Any) -> None:
    link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    pages = answered(application(engine, tokenizer), link)
    assert sorted(pages) == sorted(f"GET {path}" for path in ("/", "/dashboard", "/dashboard/", *DOCUMENTS))


def test_a_refused_name_is_told_with_the_way_out(ask: Ask) -> None:
    (answer,) = ask([("GET", "/v1/models", {"Host": "llm.example.org"})])
    assert answer.json()["error"]["message"] == (
        "'llm.example.org' is no name of this server; call it by its address or as localhost, or add the name to "
        "server.allowed_hosts"
    )
    assert answer.json()["error"]["code"] == "not_allowed"


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:8000", 200),
        ("127.0.0.1:8000", 200),
        ("192.168.1.7:8000", 200),
        ("[::1]:8000", 200),
        ("named.example:8000", 200),
        (socket.gethostname(), 200),
        ("evil.example", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost@evil.example", 403),
        ("localhost, evil.example", 403),
        ("[::1", 403),
        ("127.0.0.1:", 200),
        ("127.0.0.1:x", 403),
        ("", 403),
    ],
)
def test_a_server_is_called_by_its_addresses_and_names(ask: Ask, host: str, status: int) -> None:
    (answer,) = ask([("GET", "/v1/models", {"Host": host})], allowed_hosts=("named.example",))
    assert answer.status_code == status


def test_with_keys_a_server_of_other_machines_has_whatever_name_they_know(ask: Ask) -> None:
    key = {"Authorization": f"Bearer {KEY}", "Host": "llm.example.org"}
    asked = [("GET", "/v1/models", key)]
    network = {"api_keys": API_KEYS, "host": "0.0.0.0"}
    assert ask(asked, **network)[0].status_code == 200
    assert ask(asked, **network, allowed_hosts=("other.example",))[0].status_code == 403
    assert ask(asked, **network, allowed_hosts=("llm.example.org",))[0].status_code == 200
    assert ask(asked, api_keys=API_KEYS, allowed_hosts=("*",))[0].status_code == 200
    assert ask([("GET", "/v1/models", {"Host": "gpubox"})], host="0.0.0.0", control_routes=False)[0].status_code == 403


def test_a_unix_socket_has_whatever_name_its_clients_make_up(ask: Ask) -> None:
    refused = ask([("GET", "/v1/models", {"Host": "parallm"})], uds="/tmp/socket")[0]
    assert refused.status_code == 403  # over TCP; tests/server/test_sockets.py asks over the socket


ODD = ("http://[", "http://[::1", "http://", "null", "", "//", "http://127.0.0.1:8001", "x")


@pytest.mark.parametrize("origin", ODD)
def test_an_odd_origin_is_a_foreign_one(ask: Ask, origin: str) -> None:
    answers = ask([("GET", "/v1/models", {"Origin": origin}), ("POST", "/v1/completions", {"Origin": origin})])
    assert [answer.status_code for answer in answers] == [403, 403]


def test_pages_of_ours_and_of_named_origins_may_ask(ask: Ask) -> None:
    ours = {"Origin": OWN, "Sec-Fetch-Site": "same-origin"}
    named = {"Origin": "https://app.example", "Sec-Fetch-Site": "cross-site"}
    typed = {"Sec-Fetch-Site": "none"}
    answers = ask([("GET", "/v1/models", one) for one in (ours, named, typed)], cors_origins=("https://app.example",))
    assert [answer.status_code for answer in answers] == [200, 200, 200]


def test_a_link_of_another_page_leads_to_the_document(ask: Ask) -> None:
    link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    frame = link | {"Sec-Fetch-Dest": "iframe"}
    answers = ask([("GET", path, link) for path in ("/docs", "/openapi.json", "/docs/try")])
    assert [answer.status_code for answer in answers] == [307, 200, 200]
    refused = ask([("GET", "/docs", frame), ("GET", "/v1/models", link)])
    assert [answer.status_code for answer in refused] == [403, 403]


@pytest.mark.parametrize("path", ["/flush_cache", "/health_generate"])
def test_a_get_that_acts_does_so_for_programs_and_for_no_page(ask: Ask, engine: Any, path: str) -> None:
    pages = [{"Referer": "https://evil.example/"}, {"Sec-Fetch-Site": "cross-site"}, {"Referer": "http://["}]
    refused = ask([("GET", path, headers) for headers in pages])
    assert [answer.status_code for answer in refused] == [403, 403, 403]
    assert (engine.num_resets, engine.requests) == (0, [])
    served = ask([("GET", path, {}), ("GET", path, {"Sec-Fetch-Site": "same-origin", "Referer": f"{OWN}/docs/try"})])
    assert [answer.status_code for answer in served] == [200, 200]
    assert engine.num_resets + len(engine.requests) == 2


def test_a_body_whose_length_is_told_in_two_ways_is_refused_and_closes(ask: Ask) -> None:
    (answer,) = ask([("POST", "/v1/completions", {"Content-Length": "5", "Transfer-Encoding": "chunked"})])
    assert (answer.status_code, answer.headers["connection"]) == (400, "close")
    assert "Transfer-Encoding" in answer.json()["error"]["message"]
