import hashlib
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from parallm.errors import ConfigError
from parallm.server.operation.auth import StoredKey
from parallm.server.operation.request_context import request_log, writing_request_log
from tests.server.conftest import make_app

BODY = {"model": "policy", "prompt": "hello", "max_tokens": 3}
Call = Callable[..., httpx.Response]


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("stream", [False, True])
def test_each_request_is_one_line_of_json(call: Call, tmp_path: Path, stream: bool) -> None:
    with writing_request_log(str(tmp_path / "log")):
        call("POST", "/v1/completions", json=BODY | {"stream": stream}, headers={"x-request-id": "mine"})
    call("GET", "/health")
    (line,) = lines_of(tmp_path / "log")
    assert {name: line[name] for name in ("message", "level", "request_id", "method", "path", "status")} == {
        "message": "request",
        "level": "info",
        "request_id": "mine",
        "method": "POST",
        "path": "/v1/completions",
        "status": 200,
    }
    assert (line["model"], line["prompt_tokens"], line["completion_tokens"]) == ("policy", 5, 3)


def test_the_line_of_a_refused_request_names_its_key(engine: Any, tokenizer: Any, tmp_path: Path) -> None:
    key = "reader-0123456789abcdef"
    stored = StoredKey(name="reader", role="inference", digest=hashlib.sha256(key.encode()).digest())
    app = make_app(engine, tokenizer, keys=(stored,))
    with writing_request_log(str(tmp_path / "log")), TestClient(app, base_url="http://localhost") as client:
        for path, presented in (("/pause", key), ("/resume", "another"), ("/pause?mode=keep", None)):
            client.post(path, headers={} if presented is None else {"x-api-key": presented})
    lines = lines_of(tmp_path / "log")
    assert [(line["status"], line["api_key"]) for line in lines] == [(403, "reader"), (401, None), (401, None)]


def test_nothing_that_a_client_sends_begins_a_line(call: Call, tmp_path: Path) -> None:
    evil = 'a\n{"message": "forged"}\r\u2028'
    with writing_request_log(str(tmp_path / "log")):
        call("POST", "/v1/completions", json=BODY | {"model": evil})
        call("GET", "/%0A%7B%22message%22:%22forged%22%7D")
        call("GET", "/health", headers=[(b"x-request-id", b'a"}\x0b{')])
    text = (tmp_path / "log").read_text()
    assert [line["message"] for line in map(json.loads, text.split("\n")[:-1])] == ["request"] * 3
    assert text.isascii()
    assert "\r" not in text


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_is_logged_with_the_id_of_its_request(
    app: FastAPI, engine: Any, tmp_path: Path, stream: bool
) -> None:
    engine.crash = RuntimeError("broken\nglass")
    with writing_request_log(str(tmp_path / "log")), TestClient(app, base_url="http://localhost") as client:
        client.post("/v1/completions", json=BODY | {"stream": stream}, headers={"x-request-id": "r1"})
    failed, request = lines_of(tmp_path / "log")
    assert (failed["level"], failed["request_id"], request["request_id"]) == ("error", "r1", "r1")
    assert "RuntimeError: broken\nglass" in failed["exception"]


def test_without_a_log_nothing_is_written_and_afterwards_nothing_is_left(tmp_path: Path) -> None:
    before = (list(request_log.handlers), list(logging.getLogger("parallm.server").handlers))
    with writing_request_log(None):
        assert not request_log.isEnabledFor(logging.INFO)
    with writing_request_log(str(tmp_path / "log")):
        assert request_log.isEnabledFor(logging.INFO)
    assert not request_log.isEnabledFor(logging.INFO)
    assert (request_log.handlers, logging.getLogger("parallm.server").handlers) == before


def test_a_log_that_cannot_be_written_stops_the_start(tmp_path: Path) -> None:
    folder = str(tmp_path)
    with pytest.raises(ConfigError, match=r"server.request_log=.*cannot be written"), writing_request_log(folder):
        pass
