"""Requests of programs that cannot run here, as their sources send them; the last word is the file with them.

`reads` names what the program takes from the last line of an answer, `dates` what it gives to `datetime.fromisoformat`.
"""

import json
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from checking import expect, report, server_and_model

URL, _ = server_and_model()


def read(value: Any, path: str) -> Any:
    for name in path.split("."):
        value = value[int(name) if name.isdigit() else name]
    return value


def check(request: Mapping[str, Any], status: int, answer: str) -> None:
    """Raise AssertionError unless the program could read this answer."""
    expect(status == request.get("status", 200), (status, answer))
    lines = [json.loads(line) for line in answer.split("\n") if line]
    for path in request["reads"]:
        read(lines[-1], path)
    for path in request.get("dates", ()):
        datetime.fromisoformat(read(lines[-1], path)).timestamp()
    body = request.get("body", {})
    if "error" not in lines[-1] and request["path"] in ("/api/chat", "/api/generate"):
        expect(lines[-1]["done"] and lines[-1]["model"] == body["model"], answer)
        expect((len(lines) > 1) <= body["stream"] and not any(line["done"] for line in lines[:-1]), answer)


def send(request: Mapping[str, Any]) -> None:
    body = json.dumps(request["body"]).encode() if "body" in request else None
    headers = {"Content-Type": "application/json"}
    asked = urllib.request.Request(URL + request["path"], body, headers, method=request.get("method", "POST"))
    try:
        with urllib.request.urlopen(asked) as answer:
            check(request, answer.status, answer.read().decode())
    except urllib.error.HTTPError as error:
        check(request, error.code, error.read().decode())


def named(request: Mapping[str, Any]) -> Callable[[], None]:
    call = partial(send, request)
    call.__name__ = request["what"].replace(" ", "_")  # type: ignore[attr-defined]
    return call


if __name__ == "__main__":
    recorded = json.loads((Path(__file__).parent / sys.argv[-1]).read_text())
    report("pip", [named(request) for request in recorded["requests"]], recorded["program"])
