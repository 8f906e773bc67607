"""What strangers send: keys that are none or too weak, archives with tricks, endless bodies, lines in headers, URLs."""

import asyncio
import hashlib
import io
import json
import pickle
import re
import socket
import stat
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from fastapi import FastAPI

from parallm.checkpoint.adapter_store import AdapterStore
from parallm.checkpoint.persistent_table import PersistentTable
from parallm.device.governor import Governor
from parallm.device.thread import DeviceThread
from parallm.model.adapters.initial import starting_adapter
from parallm.model.adapters.table import AdapterTable
from parallm.model.load import load_shared_model
from parallm.model.settings import ModelSettings
from parallm.server.openapi import DOCUMENTS
from parallm.server.operation.auth import RANK, ROLES, read_keys
from parallm.server.operation.http_server import HttpServer
from parallm.server.operation.sockets import bind
from parallm.server.settings import ApiKey, ServerSettings
from tests.server.conftest import make_app

KEYS = {role: f"{role}-0123456789abcdef" for role in ("inference", "training", "admin")}
API_KEYS = tuple(
    ApiKey(name=role, role=role, sha256=hashlib.sha256(key.encode()).hexdigest())  # type: ignore[arg-type]
    for role, key in KEYS.items()
)
SENT = 64 * 1024 * 1024
Make = Callable[..., FastAPI]


@pytest.fixture(scope="module")
def device() -> Iterator[DeviceThread]:
    made = DeviceThread(Governor(serving_share=0.7, engine_share=0.5))
    yield made
    made.stop()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The folder of adapters, with a link out of it; beside it lies a secret."""
    folder = tmp_path / "root"
    folder.mkdir()
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "adapter_config.json").write_text('{"secret": "password"}')
    (folder / "link").symlink_to(tmp_path / "secret")
    return folder


@pytest.fixture
def make(engine: Any, tokenizer: Any) -> Make:
    """An application with these settings."""

    def build(adapters: AdapterStore | None = None, **settings: Any) -> FastAPI:
        found = ServerSettings(**{"max_body_bytes": 20_000, "max_adapter_bytes": 100_000, "ollama": True} | settings)
        return make_app(engine, tokenizer, settings=found, keys=read_keys(found), adapters=adapters)

    return build


@pytest.fixture
def with_store(make: Make, device: DeviceThread, tiny_model: Callable[[str], Path], root: Path) -> FastAPI:
    """An application that takes adapters for a real model."""
    model = device.call(partial(load_shared_model, ModelSettings(path=str(tiny_model("llama"))))).result(60)
    kept = PersistentTable(device, AdapterTable(), trained=())
    start = device.call(partial(starting_adapter, ModelSettings(), model, 0)).result(60)
    return make(AdapterStore(device, model, kept, root=str(root), max_bytes=100_000, max_names=4, start=start))


def send_all(app: FastAPI, *requests: dict[str, Any]) -> list[httpx.Response]:
    async def run() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=10) as client:
            return [await client.request(**request) for request in requests]

    return asyncio.run(run())


def request_to(row: str, headers: dict[str, str], **more: Any) -> dict[str, Any]:
    method, _, path = row.partition(" ")
    named = re.sub(r"\{\w+\}", "poet", path)
    return {"method": method, "url": f"http://localhost{named}", "headers": headers, **more}


def test_no_route_answers_without_a_key_or_with_a_wrong_one(make: Make) -> None:
    guarded = [row for row, role in ROLES.items() if role != "public"]
    wrong: tuple[dict[str, str], ...] = (
        {},
        {"Authorization": "Bearer wrong-0123456789abcdef"},
        {"x-api-key": KEYS["admin"][:-1]},
    )
    for headers in wrong:
        answers = send_all(make(api_keys=API_KEYS), *(request_to(row, headers) for row in guarded))
        assert {answer.status_code for answer in answers} == {401}
    assert len(guarded) > 60


@pytest.mark.parametrize("role", ["inference", "training"])
def test_no_route_answers_a_key_of_a_lower_role(make: Make, role: str) -> None:
    above = [row for row, needed in ROLES.items() if RANK[needed] > RANK[role]]  # type: ignore[index]
    headers = {"Authorization": f"Bearer {KEYS[role]}"}
    answers = send_all(make(api_keys=API_KEYS), *(request_to(row, headers) for row in above))
    assert {answer.status_code for answer in answers} == {403}
    assert len(above) > 30


def test_no_control_route_answers_where_they_are_off(make: Make) -> None:
    control = [row for row, role in ROLES.items() if role in ("training", "admin")]
    answers = send_all(make(control_routes=False), *(request_to(row, {}) for row in control))
    assert {answer.status_code for answer in answers} == {403}


class Evil:
    """Makes the file `where` when it is unpickled."""

    def __init__(self, where: Path) -> None:
        self._where = where

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._where,)


def archive(*members: tuple[str, bytes], mode: int = stat.S_IFREG) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as opened:
        for name, content in members:
            info = zipfile.ZipInfo(name)
            info.external_attr = (mode | 0o600) << 16
            opened.writestr(info, content, zipfile.ZIP_DEFLATED)
    return packed.getvalue()


def test_uploads_with_tricks_are_refused_and_leave_nothing(with_store: FastAPI, tmp_path: Path) -> None:
    pickled = pickle.dumps(Evil(tmp_path / "executed"))
    config, weights = ("adapter_config.json", b"{}"), "adapter_model.safetensors"
    tricks = [
        archive(config, (f"../../../../{tmp_path}/root/{weights}", b"x")),
        archive(config, (f"{tmp_path}/root/{weights}", b"x")),
        archive(config, (f"..\\{weights}", b"x")),
        archive(("adapter_config.json", b"/etc/passwd"), (weights, b"/etc/passwd"), mode=stat.S_IFLNK),
        archive(config, ("adapter_model.bin", pickled)),
        archive(config, (weights, pickled)),
        archive(config, (weights, bytes(50_000_000))),
        pickled,
    ]
    before = sorted(tmp_path.rglob("*"))
    uploads = [{"method": "PUT", "url": "/v1/adapters/poet", "content": trick} for trick in tricks]
    aliases = [{"method": "POST", "url": "/upload_adapter?name=poet", "content": trick} for trick in tricks]
    raw = [{"method": "POST", "url": "/update_adapter_weights?name=policy", "content": pickled}]
    for answer in send_all(with_store, *uploads, *aliases, *raw):
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_adapter"), answer.text
    assert sorted(tmp_path.rglob("*")) == before


def test_names_and_paths_do_not_lead_out_of_the_root(with_store: FastAPI, tmp_path: Path) -> None:
    good = archive(("adapter_config.json", b"{}"), ("adapter_model.safetensors", b"x"))
    names = ("..%2f..%2fetc", "%2e%2e", "a%00b", "a%0ab", "~root", "a%5c..")
    uploads = [{"method": "PUT", "url": f"/v1/adapters/{name}", "content": good} for name in names]
    paths = ("../secret", str(tmp_path / "secret"), "link", "/etc", "file:///etc", "~", "link/../../secret", "x\0", "")
    loads = [{"method": "POST", "url": "/v1/adapters/load", "json": {"name": "poet", "path": path}} for path in paths]
    for answer in send_all(with_store, *uploads, *loads):
        assert answer.status_code in (400, 404), answer.text
        assert "password" not in answer.text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["root", "secret"]


@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize(
    ("path", "status"), [("/v1/completions", 413), ("/upload_adapter?name=a", 413), ("/nowhere", 404)]
)
def test_the_rest_of_a_body_that_is_refused_is_not_read(
    with_store: FastAPI, path: str, status: int, is_chunked: bool
) -> None:
    answer, num_sent = asyncio.run(upload_to(with_store, path, is_chunked))
    assert answer.startswith(f"HTTP/1.1 {status} ")
    assert "connection: close" in answer.lower()
    assert num_sent < SENT / 4


def test_the_body_of_a_request_without_a_key_is_not_read(make: Make) -> None:
    answer, num_sent = asyncio.run(upload_to(make(api_keys=API_KEYS), "/v1/completions", is_chunked=True))
    assert answer.startswith("HTTP/1.1 401 ")
    assert num_sent < SENT / 4


async def upload_to(app: FastAPI, path: str, is_chunked: bool) -> tuple[str, int]:
    settings = ServerSettings(port=0, drain_seconds=0)
    server = HttpServer(app, bind(settings), settings)
    await server.start()
    try:
        port = urlsplit(server.url).port
        assert port is not None
        return await asyncio.to_thread(send_as_much_as_is_taken, port, path, is_chunked)
    finally:
        await server.stop()


def send_as_much_as_is_taken(port: int, path: str, is_chunked: bool) -> tuple[str, int]:
    """The answer, and how many bytes of the body the connection took before it was closed."""
    piece = bytes(65_536)
    length = "Transfer-Encoding: chunked" if is_chunked else f"Content-Length: {SENT}"
    framed = b"%x\r\n%s\r\n" % (len(piece), piece) if is_chunked else piece
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{length}\r\n\r\n".encode())
        num_sent = 0
        try:
            while num_sent < SENT:
                connection.sendall(framed)
                num_sent += len(piece)
        except ConnectionError:
            pass
        return connection.recv(65_536).decode(), num_sent


@pytest.mark.parametrize(("num_bytes", "closes"), [(1000, False), (1 << 20, False), ((1 << 20) + 1, True)])
def test_a_small_body_that_is_refused_keeps_its_connection(make: Make, num_bytes: int, closes: bool) -> None:
    (answer,) = send_all(make(), {"method": "POST", "url": "/nowhere", "content": bytes(num_bytes)})
    assert (answer.status_code, "connection" in answer.headers) == (404, closes)


def test_nothing_that_a_client_sends_becomes_a_header_or_a_line_of_an_event_stream(make: Make) -> None:
    evil = "x\r\nset-cookie: a=b\r\n\r\ndata: forged"
    body: dict[str, Any] = {"model": "policy", "prompt": "a", "max_tokens": 2, "request_id": evil, "user": evil}
    headers = [(b"x-request-id", evil.encode()), (b"traceparent", evil.encode())]
    app = make()
    others: list[dict[str, Any]] = [{}, {"stream": True}, {"model": evil}, {evil: 1}]
    posts = [{"method": "POST", "url": "/v1/completions", "json": body | more, "headers": headers} for more in others]
    gets = [{"method": "GET", "url": "/v1/models/%0d%0aset-cookie:a=b", "headers": headers}]
    for answer in send_all(app, *posts, *gets):
        assert "set-cookie" not in answer.headers
        assert not any("\n" in value or "\r" in value for value in answer.headers.values())
        assert not any(line.startswith(("set-cookie", "data: forged")) for line in answer.text.splitlines())


def with_urls(value: Any, url: str) -> Any:
    """The same with `url` in place of every text."""
    if isinstance(value, dict):
        return {name: with_urls(item, url) for name, item in value.items()}
    if isinstance(value, list):
        return [with_urls(item, url) for item in value]
    return url if isinstance(value, str) else value


def test_no_route_fetches_what_a_client_names(with_store: FastAPI, monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up: list[Any] = []

    def look_up(*arguments: Any, **_: Any) -> list[Any]:
        looked_up.append(arguments)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    examples = {row: dict(document.example) for row, document in DOCUMENTS.items() if document.example is not None}
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/x"
        for where in (url, "http://internal.example/x", "https://internal.example/x", r"\\internal.example\x"):
            image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": where}}]}
            bodies = [(row, with_urls(example, where)) for row, example in examples.items()]
            # one field at a time, too, so that the others do not stop it before
            bodies += [(row, example | {name: where}) for row, example in examples.items() for name in example]
            bodies += [("POST /v1/chat/completions", {"model": "policy", "messages": [image]})]
            named = {"Referer": where, "X-Forwarded-Host": where, "traceparent": where}
            send_all(with_store, *(request_to(row, named, content=json.dumps(body)) for row, body in bodies))
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()
    assert looked_up == []
