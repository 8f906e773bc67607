"""Servers that commands start, and the commands of models beside the first."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from parallm.cli.program import run
from parallm.cli.registry import write_progress
from parallm.client import Client

ROOT = Path(__file__).parents[2]


def test_two_commands_start_one_server_and_stop_ends_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-m", "parallm", "run", "nano", "2 + 3?", "--max-tokens", "2"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    both = [
        subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    printed = [one.communicate(timeout=120) for one in both]
    log = tmp_path / "parallm" / "server.log"
    try:
        assert [one.returncode for one in both] == [0, 0], (printed, log.read_text())
        assert sum("starting a server" in errors for _, errors in printed) == 1
        assert log.read_text().count("run     serve") == 1
    finally:
        assert run(["stop"]) == 0
    assert run(["status"]) == 3
    assert [path.name for path in (tmp_path / "parallm").iterdir() if "sock" in path.name] == []


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    command = [sys.executable, "-m", "parallm", "run", missing, "hi"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert f"model.path={missing}: no such folder" in done.stderr.splitlines()[-1]
    done = subprocess.run(
        [*command, "--no-start"], env=environment, input="", capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr.startswith("parallm: no server answers at ")) == (1, True)


@pytest.mark.parametrize(
    ("words", "request_line", "body"),
    [
        (["pull", "a/b"], "POST /api/pull", b'{"model":"a/b"}'),
        (["cp", "a", "b"], "POST /v1/models/copy", b'{"source":"a","destination":"b"}'),
        (["rm", "a/b"], "DELETE /v1/models/a%2Fb", b""),
        (["stop", "a"], "POST /v1/models/unload", b'{"model":"a"}'),
        (
            ["create", "c", "--from", "a", "--system", "be brief"],
            "POST /v1/models/create",
            b'{"source":"a","model":"c","system":"be brief"}',
        ),
        (
            ["create", "c", "-f", "Modelfile"],
            "POST /v1/models/create",
            b'{"source":"a","system":"x","license":"MIT","model":"c"}',
        ),
    ],
)
def test_a_command_about_models_is_one_request(
    words: list[str], request_line: str, body: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, json={"status": "success"})

    def connect(address: str, **_: Any) -> Client:
        return Client("http://localhost", http=httpx.Client(transport=httpx.MockTransport(answer)))

    monkeypatch.chdir(tmp_path)
    (tmp_path / "Modelfile").write_text("FROM a\nSYSTEM x\nLICENSE MIT\n")
    monkeypatch.setattr("parallm.cli.connection.connect", connect)
    assert run(words) == 0
    (request,) = seen
    assert f"{request.method} {request.url.raw_path.decode()}" == request_line
    assert request.content == body


PULLED = (
    {"status": "pulling manifest"},
    {"status": "pulling ab", "total": 4_000_000, "completed": 0},
    {"status": "pulling ab", "total": 4_000_000, "completed": 3_000_000},
    {"status": "success"},
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_pull_is_shown_as_it_goes_on() -> None:
    pipe, terminal = io.StringIO(), Terminal()
    write_progress(PULLED, pipe)
    write_progress(PULLED, terminal)
    assert pipe.getvalue() == "pulling manifest\npulling ab\nsuccess\n"
    shown = [line.split("\r")[1:] for line in terminal.getvalue().replace("\x1b[K", "").split("\n")]
    assert shown == [["pulling manifest"], ["pulling ab 0% of 4.0 MB", "pulling ab 75% of 4.0 MB"], ["success"], []]


def test_a_pull_that_fails_in_the_middle_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [PULLED[0], {"error": "pull model manifest: a/b: no network"}]
    content = "".join(f"{json.dumps(line)}\n" for line in lines)

    def connect(address: str, **_: Any) -> Client:
        transport = httpx.MockTransport(lambda _: httpx.Response(200, text=content))
        return Client("http://localhost", http=httpx.Client(transport=transport))

    monkeypatch.setattr("parallm.cli.connection.connect", connect)
    assert run(["pull", "a/b"]) == 1
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("pulling manifest\n", "parallm: pull model manifest: a/b: no network\n")


def test_a_modelfile_that_is_missing_or_wrong_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["create", "c", "-f", "/nowhere"]) == 1
    assert capsys.readouterr().err.startswith("parallm: -f /nowhere cannot be read: ")
    (tmp_path / "Modelfile").write_text("FROM a\nNONSENSE 1\n")
    assert run(["create", "c", "-f", str(tmp_path / "Modelfile")]) == 1
    assert "line 2 of the Modelfile" in capsys.readouterr().err
