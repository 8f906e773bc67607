import asyncio
import os
import shutil
import socket
import ssl
import stat
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from parallm.errors import ConfigError
from parallm.server.operation.auth import read_keys
from parallm.server.operation.http_server import HttpServer
from parallm.server.operation.sockets import ListenError, bind
from parallm.server.settings import ApiKey, ServerSettings
from tests.server.conftest import make_app


async def health(app: FastAPI, settings: ServerSettings, **client_options: object) -> int:
    server = HttpServer(app, bind(settings), settings)
    await server.start()
    try:
        base = "http://localhost" if settings.uds else server.url
        async with httpx.AsyncClient(base_url=base, **client_options) as client:  # type: ignore[arg-type]
            return (await client.get("/health")).status_code
    finally:
        await server.stop()


def test_a_unix_socket_is_for_its_owner_and_is_gone_afterwards(app: FastAPI, tmp_path: Path) -> None:
    path = tmp_path / "server"
    settings = ServerSettings(uds=str(path), port=None, drain_seconds=0)
    with bind(settings):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == []
    crashed = socket.socket(socket.AF_UNIX)
    crashed.bind(str(path))
    crashed.close()
    Path(f"{path}.lock").write_text("1")
    assert asyncio.run(health(app, settings, transport=httpx.AsyncHTTPTransport(uds=str(path)))) == 200
    assert list(tmp_path.iterdir()) == []


def test_a_unix_socket_in_use_and_a_file_in_its_place_are_left_alone(tmp_path: Path) -> None:
    settings = ServerSettings(uds=str(tmp_path / "server"), port=None)
    with bind(settings), pytest.raises(ListenError, match=rf"server.uds=.* is in use by process {os.getpid()}; end"):
        bind(settings)
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(tmp_path / "server"))
        other.listen()
        with pytest.raises(ListenError, match="is in use by another process"):
            bind(settings)
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(ListenError, match="or is a file; choose another"):
        bind(ServerSettings(uds=str(tmp_path / "notes"), port=None))
    with pytest.raises(ListenError, match=r"cannot listen on server.uds=/nowhere/server"):
        bind(ServerSettings(uds="/nowhere/server", port=None))
    assert (tmp_path / "notes").read_text() == "mine"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"uds": "@parallm"}, "no mode protects a name in the abstract namespace"),
        ({"uds": "/tmp/" + "x" * 120}, r"has 125 bytes, and the system takes 10\d; choose a shorter path"),
        (
            {"uds": "/tmp/parallm", "uds_mode": 660},
            "uds_mode=660 lets other users connect and there are no keys",
        ),
        ({"uds": None}, "leave nothing to listen on"),
        ({"uds": "/tmp/parallm", "ssl_certfile": "a.pem"}, "HTTP over a unix socket has no TLS"),
    ],
)
def test_a_unix_socket_that_cannot_or_must_not_be_is_refused(
    fields: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", lambda *_, **__: None)
    with pytest.raises(ConfigError, match=message):
        bind(ServerSettings(port=None, **fields))


async def ask(server: HttpServer, path: Path, **headers: str) -> tuple[int, int]:
    """Return the statuses of a route for admins, over TCP and over the unix socket."""
    over_tcp = httpx.AsyncClient(base_url=server.url, trust_env=False)
    over_unix = httpx.AsyncClient(base_url="http://any.name", transport=httpx.AsyncHTTPTransport(uds=str(path)))
    async with over_tcp, over_unix:
        answers = [await client.post("/flush_cache", headers=headers) for client in (over_tcp, over_unix)]
    return answers[0].status_code, answers[1].status_code


@pytest.mark.parametrize("mode", [600, 660])
def test_a_server_listens_on_both_and_the_owner_of_the_socket_has_a_key_that_counts_there_alone(
    engine: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    monkeypatch.setenv("A_KEY", "0123456789abcdef")
    keys = (ApiKey(name="operator", role="admin", env="A_KEY"),)
    path, token_path = tmp_path / "server", tmp_path / "server.token"
    settings = ServerSettings(port=0, uds=str(path), uds_mode=mode, api_keys=keys, drain_seconds=0)  # type: ignore[arg-type]

    async def run() -> list[tuple[int, int]]:
        app = make_app(engine, tokenizer, settings=settings, keys=read_keys(settings))
        server = HttpServer(app, bind(settings), settings)
        assert not token_path.exists()
        await server.start()
        assert stat.S_IMODE(path.stat().st_mode) == int(str(mode), 8)
        assert stat.S_IMODE(token_path.stat().st_mode) == 0o600
        found = [
            await ask(server, path, **({"x-api-key": key} if key else {}))
            for key in ("", token_path.read_text(), "0123456789abcdef")
        ]
        await server.stop()
        return found

    assert asyncio.run(run()) == [(401, 401), (401, 200), (200, 200)]
    assert list(tmp_path.iterdir()) == []


def test_without_keys_the_owner_needs_none_and_another_name_of_the_host_is_refused_over_tcp_alone(
    app: FastAPI, tmp_path: Path
) -> None:
    path = tmp_path / "server"
    settings = ServerSettings(port=0, uds=str(path), drain_seconds=0)

    async def run() -> list[int]:
        server = HttpServer(app, bind(settings), settings)
        await server.start()
        assert not (tmp_path / "server.token").exists()
        over_tcp = httpx.AsyncClient(base_url=server.url, trust_env=False)
        over_unix = httpx.AsyncClient(base_url="http://any.name", transport=httpx.AsyncHTTPTransport(uds=str(path)))
        async with over_tcp, over_unix:
            clients = [(over_tcp, {}), (over_tcp, {"host": "any.name"}), (over_unix, {})]
            found = [(await client.get("/v1/models", headers=headers)).status_code for client, headers in clients]
        await server.stop()
        return found

    assert asyncio.run(run()) == [200, 403, 200]


@pytest.fixture
def certificate(tmp_path: Path) -> str:
    """Of 127.0.0.1, signed by itself; its key is in the file with `.key` at the end."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    path = str(tmp_path / "certificate.pem")
    options = "-x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=127.0.0.1 -addext subjectAltName=IP:127.0.0.1"
    command = ["openssl", "req", *options.split(), "-keyout", path + ".key", "-out", path]
    subprocess.run(command, capture_output=True, check=True)
    return path


def test_https_with_a_certificate_and_clients_that_show_theirs(app: FastAPI, certificate: str) -> None:
    settings = ServerSettings(
        port=0, drain_seconds=0, ssl_certfile=certificate, ssl_keyfile=certificate + ".key", ssl_ca_certs=certificate
    )
    trusting = ssl.create_default_context(cafile=certificate)
    with pytest.raises(httpx.TransportError):
        asyncio.run(health(app, settings, verify=trusting, trust_env=False))
    trusting.load_cert_chain(certificate, certificate + ".key")
    assert asyncio.run(health(app, settings, verify=trusting, trust_env=False)) == 200


def test_connections_that_never_begin_with_tls_make_room_for_clients(app: FastAPI, certificate: str) -> None:
    settings = ServerSettings(
        port=0, drain_seconds=0, ssl_certfile=certificate, ssl_keyfile=certificate + ".key", max_connections=4
    )

    async def run() -> list[int]:
        server = HttpServer(app, bind(settings), settings)
        await server.start()
        port = httpx.URL(server.url).port
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
        trusting = ssl.create_default_context(cafile=certificate)
        async with httpx.AsyncClient(base_url=server.url, verify=trusting, trust_env=False) as client:
            statuses = [(await client.get("/health")).status_code for _ in range(3)]
        ended = await asyncio.gather(*(reader.read() for reader, _ in silent[:16]), return_exceptions=True)
        for _, writer in silent:
            writer.close()
        await server.stop()
        return statuses if len(ended) == 16 else []

    assert asyncio.run(run()) == [200, 200, 200]


def test_a_wrong_certificate_stops_the_start_before_the_port_is_taken(tmp_path: Path) -> None:
    (tmp_path / "wrong.pem").write_text("not a certificate")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for path in (tmp_path / "wrong.pem", tmp_path / "missing.pem"):
        with pytest.raises(ListenError, match=r"server.ssl_certfile=.* cannot be used: .*; give PEM files"):
            bind(ServerSettings(port=port, ssl_certfile=str(path)))
    with pytest.raises(ListenError, match=r"need server.ssl_certfile"):
        bind(ServerSettings(port=port, ssl_keyfile="key.pem"))
