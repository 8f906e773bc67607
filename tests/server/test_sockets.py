import asyncio
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

from parallm.server.operation.http_server import HttpServer
from parallm.server.operation.sockets import ListenError, bind
from parallm.server.settings import ServerSettings


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
    settings = ServerSettings(uds=str(path), drain_seconds=0)
    with bind(settings):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.exists()  # as after a crash
    assert asyncio.run(health(app, settings, transport=httpx.AsyncHTTPTransport(uds=str(path)))) == 200
    assert not path.exists()


def test_a_unix_socket_in_use_and_a_file_in_its_place_are_left_alone(tmp_path: Path) -> None:
    settings = ServerSettings(uds=str(tmp_path / "server"))
    with bind(settings), pytest.raises(ListenError, match=r"server.uds=.* is in use"):
        bind(settings)
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(ListenError, match="or is a file; choose another"):
        bind(ServerSettings(uds=str(tmp_path / "notes")))
    with pytest.raises(ListenError, match=r"cannot listen on server.uds=/nowhere/server"):
        bind(ServerSettings(uds="/nowhere/server"))
    assert (tmp_path / "notes").read_text() == "mine"


@pytest.mark.parametrize("address", [{"host": "0.0.0.0"}, {"port": 9000}])
def test_a_host_or_a_port_beside_a_unix_socket_is_refused(tmp_path: Path, address: dict[str, Any]) -> None:
    ((name, given),) = address.items()
    with pytest.raises(ListenError, match=rf"server\.{name}={given} names one; leave server\.uds out"):
        bind(ServerSettings(uds=str(tmp_path / "server"), **address))


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
