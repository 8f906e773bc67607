"""Requests of Open WebUI and continue.dev, as their sources send them, are answered in the form that they read."""

import json
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from parallm.model.chat.tokenizer import ChatTokenizer
from parallm.server.settings import ServerSettings
from tests.server.conftest import EchoEngine, card, make_app, send_to
from tests.server.test_tasks import EMBED, LetterEncoder

PROGRAMS = Path(__file__).parents[1] / "interop" / "clients" / "programs"
FILES = ("open_webui.json", "continue.json")
REQUESTS = [request for name in FILES for request in json.loads((PROGRAMS / name).read_text())["requests"]]


@pytest.fixture(scope="module")
def served(hermes: ChatTokenizer) -> FastAPI:
    engine, settings = EchoEngine(max_context=2000, says="5"), ServerSettings(ollama=True)
    catalog = lambda: (card(3),)  # noqa: E731
    return make_app(engine, hermes, encoder=LetterEncoder(found=EMBED), catalog=catalog, settings=settings)


@pytest.fixture(scope="module")
def program() -> Iterator[dict[str, Any]]:
    """Return what the program of the interop tests defines."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(PROGRAMS)
        patch.setattr(sys, "argv", ["recorded_requests.py", "http://localhost", "model"])
        yield runpy.run_path(str(PROGRAMS / "recorded_requests.py"))


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda request: request["what"].replace(" ", "-"))
def test_a_recorded_request_is_answered(served: FastAPI, program: dict[str, Any], request_: dict[str, Any]) -> None:
    options = {"json": request_["body"]} if "body" in request_ else {}
    response = send_to(served, request_.get("method", "POST"), request_["path"], **options)
    program["check"](request_, response.status_code, response.text)


def test_an_answer_without_what_the_program_reads_is_a_fault(program: dict[str, Any]) -> None:
    request = {"path": "/api/tags", "reads": ["models.0.name"], "dates": ["models.0.at"]}
    program["check"](request, 200, '{"models": [{"name": "a", "at": "9999-01-01T00:00:00+00:00"}]}')
    for status, answer in ((404, '{"error": "no"}'), (200, '{"models": []}'), (200, '{"models": [{"name": "a"}]}')):
        with pytest.raises((AssertionError, KeyError, IndexError)):
            program["check"](request, status, answer)
    chat = {"path": "/api/chat", "reads": [], "body": {"model": "a", "stream": False}}
    program["check"](chat, 200, '{"model": "a", "done": true}')
    for answer in ('{"model": "b", "done": true}', '{"model": "a", "done": false}\n{"model": "a", "done": true}'):
        with pytest.raises(AssertionError):
            program["check"](chat, 200, answer)
