import asyncio
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from parallm.errors import ConfigError
from parallm.server.operation.auth import ROLES, read_keys
from parallm.server.operation.sockets import bind
from parallm.server.settings import ApiKey, KeyRole, ServerSettings
from tests.server.conftest import make_app

KEYS = {role: f"{role}-0123456789abcdef" for role in ("inference", "training", "admin")}
BODY = {"model": "policy", "prompt": "hello", "max_tokens": 2}
Send = Callable[..., httpx.Response]


def stored(role: KeyRole) -> ApiKey:
    return ApiKey(name=role, role=role, sha256=hashlib.sha256(KEYS[role].encode()).hexdigest())


@pytest.fixture
def send(engine: Any, tokenizer: Any) -> Send:
    """`send("GET", path, settings=..., headers=...)`: one request to a server with three keys, or with `settings`."""
    with_keys = ServerSettings(api_keys=(stored("inference"), stored("training"), stored("admin")))

    async def call(method: str, path: str, settings: ServerSettings = with_keys, **options: Any) -> httpx.Response:
        app = make_app(engine, tokenizer, settings=settings, keys=read_keys(settings))
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, **options)

    return lambda *arguments, **options: asyncio.run(call(*arguments, **options))


def bearer(role: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {KEYS[role]}"}


def test_without_a_key_and_with_a_wrong_one_nothing_but_public_routes_answers(send: Send) -> None:
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic YTpi"}, {"x-api-key": "\u00e4"}):
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        refused = send("POST", "/v1/completions", json=BODY, headers=raw)
        assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
        assert refused.json()["error"]["code"] == "invalid_api_key"
    assert send("GET", "/health").status_code == 200


def test_a_key_counts_as_bearer_and_as_x_api_key(send: Send) -> None:
    assert send("POST", "/v1/completions", json=BODY, headers=bearer("inference")).status_code == 200
    assert send("POST", "/v1/completions", json=BODY, headers={"x-api-key": KEYS["inference"]}).status_code == 200
    assert send("GET", "/v1/models", headers={"authorization": f"bearer  {KEYS['training']} "}).status_code == 200


def test_a_role_includes_those_below_it_and_none_above(send: Send) -> None:
    found = {role: send("GET", "/v1/training/status", headers=bearer(role)) for role in KEYS}
    assert {role: response.status_code for role, response in found.items()} == {
        "inference": 403,
        "training": 200,
        "admin": 200,
    }
    message = "this route needs a key with the role training; yours has the role inference"
    assert found["inference"].json()["error"]["message"] == message


def test_without_keys_every_route_is_open_but_control_can_be_off(send: Send) -> None:
    assert send("GET", "/v1/training/status", settings=ServerSettings()).status_code == 200
    off = ServerSettings(control_routes=False)
    assert send("GET", "/v1/training/status", settings=off).status_code == 403
    assert send("GET", "/v1/models", settings=off).status_code == 200


def test_browsers_get_cors_headers_for_named_origins_only(send: Send) -> None:
    asks = {"Origin": "https://ours.example", "Access-Control-Request-Method": "POST"}
    named = ServerSettings(cors_origins=("https://ours.example",))
    assert send("OPTIONS", "/v1/completions", settings=named, headers=asks).headers["access-control-allow-origin"]
    for settings, origin in ((ServerSettings(), "https://ours.example"), (named, "https://evil.example")):
        answer = send("OPTIONS", "/v1/completions", settings=settings, headers=asks | {"Origin": origin})
        assert "access-control-allow-origin" not in answer.headers


def test_every_route_has_a_role_and_every_role_a_route(app: Any) -> None:
    assert {"inference", "training", "public"} <= set(ROLES.values())
    found = {f"{method.upper()} {path}" for path, methods in app.openapi()["paths"].items() for method in methods}
    assert found == set(ROLES)


def test_keys_come_from_the_environment_and_from_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TEST_KEY", KEYS["admin"])
    (tmp_path / "key").write_text(KEYS["admin"] + "\n")
    settings = ServerSettings(
        api_keys=(
            ApiKey(name="a", role="admin", env="TEST_KEY"),
            ApiKey(name="b", role="admin", file=str(tmp_path / "key")),
        )
    )
    assert {key.digest for key in read_keys(settings)} == {hashlib.sha256(KEYS["admin"].encode()).digest()}


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (ApiKey(name="a", role="admin"), "server.api_keys a: give exactly one of env, file and sha256"),
        (ApiKey(name="a", role="admin", env="NOT_SET"), "NOT_SET is not set; set it to the key"),
        (ApiKey(name="a", role="admin", env="SHORT"), "SHORT holds 5 characters; a key has at least 16"),
        (ApiKey(name="a", role="admin", file="/nowhere/key"), "the file /nowhere/key cannot be read"),
    ],
)
def test_a_key_that_cannot_be_read_is_refused(key: ApiKey, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHORT", "short")
    with pytest.raises(ConfigError, match=message):
        read_keys(ServerSettings(api_keys=(key,)))


def test_a_name_stands_for_one_key() -> None:
    with pytest.raises(ConfigError, match="the name admin stands there twice"):
        read_keys(ServerSettings(api_keys=(stored("admin"), stored("admin"))))


def test_other_machines_are_not_let_in_without_a_key() -> None:
    with pytest.raises(ConfigError, match=r"no keys; name one with 'server.api_keys=.*with 127.0.0.1"):
        bind(ServerSettings(host="0.0.0.0", port=0))
    bind(ServerSettings(host="0.0.0.0", port=0, control_routes=False)).close()
    bind(ServerSettings(host="0.0.0.0", port=0, api_keys=(stored("admin"),))).close()
