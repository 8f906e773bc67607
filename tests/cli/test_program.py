"""The words of the program, what it prints, and how it ends."""

import io
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from parallm.cli.connection import address_of, connect, get
from parallm.cli.models import size_text
from parallm.cli.program import COMMANDS, PROGRAMS, make_parser, run
from tests.cli.conftest import Answering

ROOT = Path(__file__).parents[2]
LIGHT = """
import json, sys
sys.argv = ["parallm", *{words!r}]
from parallm.__main__ import main
try:
    main()
except SystemExit as end:
    heavy = [name for name in ("mlx.core", "hydra", "pydantic", "rich", "numpy", "fastapi") if name in sys.modules]
    print(json.dumps([end.code, heavy]), file=sys.stderr)
"""
"""Runs the program; its last line tells the exit code and which of these modules it has loaded."""


def outcome(words: list[str], host: str = "") -> tuple[int, list[str], str]:
    """Return exit code, heavy modules and standard output of the program in a process of its own."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PARALLM_HOST": host}
    command = [sys.executable, "-c", LIGHT.format(words=words)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    code, heavy = json.loads(done.stderr.splitlines()[-1])
    return code, heavy, done.stdout


@pytest.fixture
def call(answering: Answering, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run a command against the server; return exit code, standard output and standard error."""

    def send(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = run([words[0], "--host", answering.url, *words[1:]])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return send


def test_every_command_of_the_program_says_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--help"], *([name, "--help"] for name in COMMANDS)):
        with pytest.raises(SystemExit) as end:
            run(words)
        assert end.value.code == 0
    page = make_parser().format_help()
    assert all(f"\n    {name} " in page or f"\n  {name} " in page for name in (*COMMANDS, *PROGRAMS))


def test_without_words_and_with_wrong_ones_the_exit_code_is_that_of_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 2
    with pytest.raises(SystemExit) as end:
        run(["lits"])
    assert end.value.code == 2
    assert "lits: no such command, did you mean list?" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run(["show"])
    assert "the following arguments are required: MODEL" in capsys.readouterr().err
    for words in (["list", "more"], ["run", "base", "--loud", "hello"]):
        with pytest.raises(SystemExit):
            run(words)
        assert f"parallm: {words[-1] if len(words) == 2 else '--loud'}: unknown; " in capsys.readouterr().err


def test_a_list_loads_neither_mlx_nor_the_libraries_of_a_server(answering: Answering) -> None:
    code, heavy, printed = outcome(["list"], answering.url)
    assert (code, heavy) == (0, [])
    assert printed.startswith("NAME ")


def test_the_program_serve_is_the_command_serve(tmp_path: Path) -> None:
    code, heavy, printed = outcome(["serve", "--help"])
    assert (code, "mlx.core" in heavy, "hydra" in heavy) == (0, False, True)  # that these are found is the control
    assert printed.startswith("python -m parallm.serve ")


def test_models_are_printed_as_columns_and_as_json(call: Any) -> None:
    code, out, _ = call("list")
    assert code == 0
    assert out.splitlines()[:2] == ["NAME      BASE  VERSION", "policy    nano  3"]
    names = [model["id"] for model in json.loads(call("list", "--json")[1])["data"]]
    assert names == ["policy", "base", "best", "policy@3", "policy@2"]
    assert call("ps")[1].splitlines()[1].split() == ["policy", "200"]
    assert "policy_version           2\n" in call("show", "best")[1]


def test_an_answer_is_streamed_and_an_error_is_one_line(
    call: Any, monkeypatch: pytest.MonkeyPatch, answering: Answering
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("and more"))
    code, out, err = call("run", "policy", "hello", "--max-tokens", "60", "--verbose", "--system", "be brief")
    assert (code, out) == (0, "<system>be brief<user>hello\n\nand more 0\n")
    assert "tokens, first after " in err
    assert answering.engine.requests[-1].sampling.max_tokens == 60
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    code, out, err = call("run", "poet", "hello")
    assert (code, out) == (1, "")
    assert err.startswith("parallm: no model 'poet'; there are ")
    assert call("run", "policy", "--think=high", "hello")[2].startswith("parallm: reasoning_effort is not supported")
    assert call("run", "policy", "--think=hard", "hello")[2].startswith("parallm: think hard: neither true nor false")
    assert call("run", "policy")[2].startswith("parallm: nothing to answer")


def test_an_error_in_the_middle_of_an_answer_ends_the_command(
    call: Any, monkeypatch: pytest.MonkeyPatch, answering: Answering
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    answering.engine.crash = RuntimeError("out of luck")
    code, out, err = call("run", "policy", "hello")
    assert (code, out) == (1, "<")
    assert err.startswith("parallm: ")


def test_a_server_that_trains_nothing_says_so(call: Any) -> None:
    assert call("training")[:2] == (0, "updating, step 4 of 9, version 3\n")
    code, _, err = call("training", "pause")
    assert (code, err.startswith("parallm: this process serves and does not train")) == (1, True)
    assert call("adapters", "save", "poet")[0] == 1
    for action in ("evaluate", "stop"):
        code, _, err = call("training", action)
        assert (code, err.startswith("parallm: this process serves and does not train")) == (1, True)
    code, _, err = call("adapters", "rollback")
    assert (code, err.startswith("parallm: ")) == (1, True)


def test_the_status_tells_a_server_from_none_and_from_something_else(call: Any, tmp_path: Path, capsys: Any) -> None:
    code, out, _ = call("status", "--json")
    report = json.loads(out)
    assert (code, report["status"], report["pid"]) == (0, "running", os.getpid())
    assert report["models"][0] == "policy"
    assert report["training"]["step"] == 4
    assert call("status")[1].splitlines()[2] == "training updating, step 4 of 9, version 3"
    assert run(["status", "--host", f"unix:{tmp_path}/none"]) == 3
    assert run(["list", "--host", f"unix:{tmp_path}/none"]) == 1
    assert "start one with `parallm serve`, or name it with --host" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "address"),
    [
        ("unix:/run/a", "unix:/run/a"),
        ("/run/a", "unix:/run/a"),
        ("https://a.example/x", "https://a.example/x"),
        ("a.example:80", "http://a.example:80"),
        (":9", "http://127.0.0.1:9"),
        ("a.example", "http://a.example:8000"),
        ("[::1]", "http://[::1]:8000"),
        (None, "http://127.0.0.1:8000"),
    ],
)
def test_an_address_may_be_short(given: str | None, address: str) -> None:
    assert address_of(given) == address


def test_the_owner_of_a_socket_sends_the_key_that_lies_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "server"
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(path))
        with connect(f"unix:{path}") as client:
            assert client._request(get("/"))["headers"] == {}
        Path(f"{path}.token").write_text("of the owner")
        with connect(f"unix:{path}") as client:
            assert client._request(get("/"))["headers"] == {"Authorization": "Bearer of the owner"}
        monkeypatch.setenv("PARALLM_API_KEY", "given")
        with connect(f"unix:{path}") as client:
            assert client._request(get("/"))["headers"] == {"Authorization": "Bearer given"}


def test_sizes_have_three_digits() -> None:
    assert [size_text(size) for size in (None, 0, 999, 1_500, 99_000_000, 150_000_000_000)] == [
        *("", "0 B", "999 B"),
        *("1.5 kB", "99.0 MB", "150 GB"),
    ]
