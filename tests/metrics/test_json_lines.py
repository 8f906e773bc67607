"""Rows that survive NaN, kill -9 and full disks."""

import json
import logging
import math
from pathlib import Path

import numpy
import pytest

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


def test_a_disk_that_refuses_is_reported_once_and_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "gone" / "rows.jsonl"
    lines = JsonLines(file)
    with caplog.at_level(logging.WARNING):
        lines.append({"step": 1})
        lines.append({"step": 2})
    assert len(caplog.records) == 1
    file.parent.mkdir()
    lines.append({"step": 3})
    assert [row["step"] for row in read_rows(file)] == [3]


def test_a_file_that_is_not_there_has_no_rows(tmp_path: Path) -> None:
    assert read_rows(tmp_path / "nothing.jsonl") == []
