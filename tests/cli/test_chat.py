"""A conversation at the terminal."""

import builtins
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from parallm.cli.chat import Answer
from parallm.cli.program import run
from tests.cli.conftest import Answering


class Terminal:
    def isatty(self) -> bool:
        return True


@pytest.fixture
def converse(
    answering: Answering, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[str, str]]:
    """Type these lines into a conversation with `policy`; return what stands on the screen, and the errors."""
    monkeypatch.setattr(sys, "stdin", Terminal())

    def type_lines(*lines: str) -> tuple[str, str]:
        typed: Iterator[str] = iter(lines)

        def read(_: str) -> str:
            try:
                return next(typed)
            except StopIteration:
                raise EOFError from None

        monkeypatch.setattr(builtins, "input", read)
        assert run(["run", "policy", "--host", answering.url]) == 0
        printed = capsys.readouterr()
        return printed.out, printed.err

    return type_lines


def test_a_conversation_grows_and_can_be_set_shown_cleared_and_saved(
    converse: Callable[..., tuple[str, str]], tmp_path: Path
) -> None:
    saved = tmp_path / "talk.jsonl"
    out, err = converse(
        "/set system brief",
        "/set parameter max_tokens 90",
        "hi",
        '"""two',
        'lines"""',
        "/show",
        f"/save {saved}",
        "/clear",
        "again",
        "/set parameter color blue",
        "/nonsense",
        "/bye",
        "never read",
    )
    first = "<system>brief<user>hi 0"
    assert out.splitlines()[1:4] == [first, f"<system>brief<user>hi<assistant>{first}<user>two", "lines 0"]
    assert "max_tokens  90" in out
    assert out.splitlines()[-1] == "<system>brief<user>again 0"
    assert [json.loads(line)["content"] for line in saved.read_text().splitlines()][:3] == ["hi", first, "two\nlines"]
    assert err.splitlines() == [
        "color: no parameter; there are temperature, top_p, top_k, min_p, max_tokens, seed, repetition_penalty",
        "/nonsense: unknown; /? shows the commands",
    ]


def test_ctrl_c_ends_an_answer_and_the_conversation_goes_on(
    converse: Callable[..., tuple[str, str]], answering: Answering
) -> None:
    engine = answering.engine
    engine.is_endless = True

    def interrupt() -> None:
        while not engine.requests:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    out, _ = converse("hello", "/show")
    thread.join()
    assert "\nmodel  policy\n" in out
    deadline = time.monotonic() + 20
    while not engine.num_aborted and time.monotonic() < deadline:
        time.sleep(0.01)
    assert engine.num_aborted == 1


def test_what_cannot_be_answered_is_told_and_forgotten(
    converse: Callable[..., tuple[str, str]], answering: Answering
) -> None:
    answering.engine.max_context = 40
    out, err = converse("x" * 60, "hi", "/bye")
    assert out.splitlines()[-1] == "<user>hi 0"
    assert "context" in err or "limit" in err


def test_marks_of_reasoning_stand_around_it() -> None:
    def delta(**fields: Any) -> dict[str, Any]:
        return {"choices": [{"delta": fields}]}

    events = [delta(reasoning_content="a"), delta(reasoning_content="b"), delta(content="c")]
    shown, hidden = Answer(hides_thinking=False), Answer(hides_thinking=True)
    assert "".join(map(shown.read, events)) == "Thinking...\nab\n...done thinking.\n\nc"
    assert "".join(map(hidden.read, events)) == "c"
    assert (shown.text, hidden.text) == ("c", "c")
