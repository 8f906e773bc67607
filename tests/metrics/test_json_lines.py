"""Rows that survive NaN, kill -9 and full disks."""

import json
import logging
import math
from io import FileIO
from pathlib import Path

import numpy
import pytest

from parallm.metrics import json_lines
from parallm.metrics.json_lines import JsonLines, read_rows, to_json


def test_each_row_is_on_disk_when_append_returns(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "rows.jsonl")
    lines.append({"step": 1}, {"step": 2})
    assert (tmp_path / "rows.jsonl").read_text(encoding="utf-8") == '{"step": 1}\n{"step": 2}\n'


def test_numbers_that_json_cannot_hold_become_null() -> None:
    row = {
        "a": math.nan,
        "b": [math.inf, 1.5],
        "c": {"d": -math.inf},
        "e": numpy.float32(0.5),
        "f": Path("x"),
        "g": True,
    }
    assert json.loads(to_json(row)) == {"a": None, "b": [None, 1.5], "c": {"d": None}, "e": 0.5, "f": "x", "g": True}


def test_a_half_written_line_costs_only_itself(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"step": 1}\n{"step": 2, "rew', encoding="utf-8")
    JsonLines(file).append({"step": 3})
    assert [row["step"] for row in read_rows(file)] == [1, 3]


@pytest.mark.parametrize("damage", ["[" * 100_000, '{"step": 2, "a": ' + "[" * 900 + "]" * 900 + "}", "1" * 9999])
def test_a_damaged_line_costs_only_itself(tmp_path: Path, damage: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(f'{{"step": 1}}\n{damage}\n{{"step": 3}}\n', encoding="utf-8")
    assert [row["step"] for row in read_rows(file)] == [1, 3]
    JsonLines(file).drop_from(3)
    assert file.read_text(encoding="utf-8") == '{"step": 1}\n'


def test_rows_from_a_step_on_can_be_dropped(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    lines = JsonLines(file)
    lines.append(*({"step": step} for step in (1, 2, 3, 3, 4)))
    lines.drop_from(3)
    assert file.read_text(encoding="utf-8") == '{"step": 1}\n{"step": 2}\n'


@pytest.mark.parametrize("text", ["line\nbreak", "separator\u2028inside", "half a pair \ud800", "na\u00efve"])
def test_any_text_comes_back(tmp_path: Path, text: str) -> None:
    lines = JsonLines(tmp_path / "rows.jsonl")
    lines.append({"step": 1, "text": text})
    lines.drop_from(2)
    assert read_rows(tmp_path / "rows.jsonl") == [{"step": 1, "text": text}]


def test_rows_that_a_disk_refuses_are_written_when_it_takes_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "gone" / "rows.jsonl"
    lines = JsonLines(file)
    with caplog.at_level(logging.WARNING):
        lines.append({"step": 1}, {"step": 1})
        lines.append({"step": 2})
    told = f"cannot write {file}: No such file or directory; its rows wait in memory until it can"
    assert [record.message for record in caplog.records] == [told]
    assert lines.num_unwritten == 3
    file.parent.mkdir()
    lines.append({"step": 3})
    assert file.read_text() == '{"step": 1}\n{"step": 1}\n{"step": 2}\n{"step": 3}\n'
    assert lines.num_unwritten == 0


def test_without_a_file_left_no_row_is_lost_and_nothing_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "rows.jsonl"
    lines = JsonLines(file)
    lines.append({"step": 1})
    with monkeypatch.context() as without_files:
        without_files.setattr(Path, "open", refuse)
        lines.append({"step": 2})
        lines.drop_from(1)
        lines.append({"step": 1, "again": True}, {"step": 2, "again": True})
    lines.flush()
    assert file.read_text() == '{"step": 1, "again": true}\n{"step": 2, "again": true}\n'


def refuse(*_: object, **__: object) -> None:
    raise OSError(24, "Too many open files")


def test_a_disk_that_fills_up_within_a_row_gets_its_rest_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "rows.jsonl"
    lines = JsonLines(file)
    with monkeypatch.context() as full:
        full.setattr(json_lines, "open_to_append", lambda path: FullDisk(path, num_bytes=16))
        lines.append({"step": 1}, {"step": 2})
        assert file.read_text() == '{"step": 1}\n{"st'
        lines.append({"step": 3})
    lines.flush()
    assert file.read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3}\n'


class FullDisk(FileIO):
    """Takes so many bytes."""

    def __init__(self, path: Path, num_bytes: int) -> None:
        super().__init__(path, "ab")
        self._left = num_bytes - path.stat().st_size if path.exists() else num_bytes

    def write(self, content: bytes) -> int:  # type: ignore[override]
        taken = super().write(content[: max(0, self._left)])
        self._left -= taken
        if not taken:
            raise OSError(28, "No space left on device")
        return taken


def test_a_half_written_row_that_is_dropped_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "rows.jsonl"
    lines = JsonLines(file)
    with monkeypatch.context() as full:
        full.setattr(json_lines, "open_to_append", lambda path: FullDisk(path, num_bytes=16))
        lines.append({"step": 1}, {"step": 2})
    lines.drop_from(2)
    lines.append({"step": 2, "again": True})
    assert file.read_text() == '{"step": 1}\n{"step": 2, "again": true}\n'


def test_rows_that_wait_have_a_limit_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(json_lines, "MAX_BYTES", 60)
    lines = JsonLines(tmp_path / "gone" / "rows.jsonl")
    for step in range(20):
        lines.append({"step": step})
    assert 0 < lines.num_unwritten < 6
    assert "the oldest rows are let go" in caplog.text


def test_a_half_written_row_that_is_let_go_spoils_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "rows.jsonl"
    lines = JsonLines(file)
    with monkeypatch.context() as full:
        full.setattr(json_lines, "MAX_BYTES", 30)
        full.setattr(json_lines, "open_to_append", lambda path: FullDisk(path, num_bytes=16))
        lines.append(*({"step": step} for step in (1, 2, 3, 4)))
    lines.flush()
    assert [row["step"] for row in read_rows(file)] == [1, 4]


def test_a_file_that_is_not_there_has_no_rows(tmp_path: Path) -> None:
    assert read_rows(tmp_path / "nothing.jsonl") == []
