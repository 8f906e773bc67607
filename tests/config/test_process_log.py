"""The log of a process, as text and as JSON."""

import json
import logging
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from parallm.config.process_log import LogLevel, error_line, logging_to
from parallm.metrics.log_capture import captured_logs
from parallm.server.operation.request_context import request_log, writing_request_log

own, foreign = logging.getLogger("parallm.trainer.loop"), logging.getLogger("another.program")


def say_everything() -> None:
    for logger in (own, foreign):
        for level in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR):
            logger.log(level, "%s\nsays %s", logger.name, logging.getLevelName(level).lower())


@pytest.mark.parametrize(
    ("level", "file", "terminal"),
    [
        (None, ["info", "warning", "error"], ["warning", "error"]),
        ("debug", ["debug", "info", "warning", "error"], ["debug", "info", "warning", "error"]),
        ("error", ["error"], ["error"]),
    ],
)
def test_a_level_counts_for_the_file_and_for_standard_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], level: LogLevel | None, file: list[str], terminal: list[str]
) -> None:
    with logging_to(tmp_path / "run.log", level, "text"):
        say_everything()
    own.error("nobody listens any more")
    text = (tmp_path / "run.log").read_text()
    assert [line.partition("says ")[2] for line in text.splitlines() if line.startswith("says")] == file
    assert capsys.readouterr().err == "".join(f"parallm: {one.upper()}: {own.name}\nsays {one}\n" for one in terminal)


def lines_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize(("level", "least"), [(None, 1), ("debug", 0), ("warning", 2)])
def test_as_json_standard_error_gets_what_the_file_gets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], level: LogLevel | None, least: int
) -> None:
    foreign.setLevel(logging.DEBUG)  # as some programs do
    with logging_to(tmp_path / "run.log", level, "json"):
        say_everything()
        foreign.setLevel(logging.NOTSET)
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn("soon to be gone", DeprecationWarning, stacklevel=1)
    own.error("nobody listens any more")
    written = capsys.readouterr().err
    assert (tmp_path / "run.log").read_text() == written
    *lines, warning = lines_of(written)
    levels = ["debug", "info", "warning", "error"]
    expected = [(own.name, one) for one in levels[least:]] + [(foreign.name, one) for one in levels[2:]]
    assert [(line["logger"], line["level"]) for line in lines] == expected
    assert [line["message"] for line in lines] == [f"{name}\nsays {one}" for name, one in expected]
    assert warning["logger"] == "py.warnings"
    assert warning.keys() == {"time", "level", "logger", "message", "request_id"}


def test_an_exception_is_part_of_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with logging_to(tmp_path / "run.log", None, "json"):
        try:
            raise ValueError("no")
        except ValueError:
            own.exception("it failed")
    (line,) = lines_of(capsys.readouterr().err)
    assert line["exception"].endswith("ValueError: no")
    assert lines_of(error_line("model.path: none"))[0]["message"] == "model.path: none"


def test_a_display_takes_text_from_the_console_and_leaves_json_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown: list[str] = []
    capture = partial(captured_logs, lambda text, _: shown.append(text))
    with logging_to(tmp_path / "run.log", None, "json"), capture():
        own.warning("careful")
    assert ([line["message"] for line in lines_of(capsys.readouterr().err)], shown) == (["careful"], [])
    with logging_to(tmp_path / "run.log", None, "text"), writing_request_log("stderr"), capture():
        own.warning("again")
        request_log.info("request")
    assert shown == ["again"]
    assert [line["message"] for line in lines_of(capsys.readouterr().err)] == ["request"]


def test_failures_stand_once_on_standard_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with logging_to(tmp_path / "run.log", None, "json"), writing_request_log("stderr"):
        logging.getLogger("parallm.server.failures").error("failed")
        request_log.info("request")
    assert [line["message"] for line in lines_of(capsys.readouterr().err)] == ["failed", "request"]
    assert [line["message"] for line in lines_of((tmp_path / "run.log").read_text())] == ["failed"]
