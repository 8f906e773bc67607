"""The table of architectures says what is so: each model file of mlx-lm has a row, and rows are as a trial shows."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

import parallm.model
from tests.model.architectures import DIFFERENT, UNTRIED, Row, figures_of, model_files, table_of, trial
from tests.tiny_models import ARCHITECTURES

TABLE = Path(parallm.model.__file__).parent / "ARCHITECTURES.md"
SAMPLE = ("olmoe", "mellum", "stablelm", "gptj")
"""Files that no other test tries, a few of each kind."""
ROW = re.compile(
    r"\| (?P<name>[\w.-]+) \| (?P<served>[^|]+) \| (?P<trained>[^|]+) \| (?P<targets>[^|]*) \| (?P<tokens>[^|]+) \|"
)


def written() -> dict[str, Row]:
    matches = [match for line in TABLE.read_text().splitlines() if (match := ROW.fullmatch(line))]
    rows = {match["name"]: match.groupdict() for match in matches if match["name"] not in ("file", "---")}
    return {
        name: Row(served=row["served"], trained=row["trained"], targets=row["targets"].strip(), tokens=row["tokens"])
        for name, row in rows.items()
    }


def test_the_table_has_a_row_for_each_model_file_and_is_as_it_is_written() -> None:
    rows = written()
    assert list(rows) == model_files()
    assert table_of(rows) == TABLE.read_text()
    assert {name for name, row in rows.items() if not row.is_tried} <= UNTRIED.keys() | DIFFERENT.keys() | {
        "gear",
        "recurrent_gemma",
    }
    assert set(model_files()) - UNTRIED.keys() <= ARCHITECTURES.keys()


def test_the_figures_count_rows() -> None:
    row = Row(served="batched", trained="packed", targets="", tokens="equal")
    rows = {"a": row, "b": Row(served="row by row", trained="packed", targets="", tokens="differ")}
    assert figures_of(rows) == {"architectures.tried": 1, "architectures.batched": 1, "architectures.packed": 1}


@pytest.mark.parametrize("name", SAMPLE)
def test_a_row_is_what_a_trial_shows(name: str) -> None:
    assert trial(name) == written()[name]


@pytest.mark.slow
def test_all_rows_are_what_trials_show(record_property: Callable[[str, object], None]) -> None:
    rows = {name: trial(name) for name in model_files()}
    for figure, value in figures_of(rows).items():
        record_property(figure, value)
    assert rows == written()
