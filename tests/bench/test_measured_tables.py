"""Rows of the tables of measurements name figures that there are, with their bars, and lines of JSON fill them."""

import json
from pathlib import Path

import pytest
from bench.measured import HEADER, bar_of, figures_in, merged_lines, rows, tables, write_tables
from bench.measurement import bars, shown

ROOT = Path(__file__).parents[2]
ROW = "| 8B: tokens/s | not yet measured | >= 2.1 | `engine.gpu.8b.b128.vs_batchgenerator` | - | - |"
LINE = {"figures": {"engine.gpu.8b.b128.vs_batchgenerator": 2.34}, "machine": "H200", "commit": "0123456789"}


@pytest.mark.parametrize("file", tables(ROOT), ids=lambda file: str(file.relative_to(ROOT)))
def test_each_row_names_figures_and_their_bars(file: Path) -> None:
    found = list(rows(file.read_text()))
    assert found
    for line, cells in found:
        assert len(cells) == 6, line
        names = figures_in(cells[3])
        assert names, line
        assert set(names) <= bars().keys(), line
        assert cells[2] == bar_of(names), line


def test_a_row_is_filled_once_all_its_figures_are_there(tmp_path: Path) -> None:
    file = tmp_path / "MEASURED.md"
    two = ROW.replace("`engine.gpu", "`engine.gpu.8b.b1.vs_floor` `engine.gpu").replace(">= 2.1", "<= 1.4; >= 2.1")
    file.write_text(f"# Measured\n\n{HEADER}\n|---|---|---|---|---|---|\n{ROW}\n{two}\n\nThe end.\n")
    write_tables(tmp_path, [f"words\n{json.dumps(LINE)}\n"])
    filled, left = (line for line, _ in rows(file.read_text()))
    figure = "`engine.gpu.8b.b128.vs_batchgenerator`"
    assert filled == f"| 8B: tokens/s | 2.34x | >= 2.1 | {figure} | H200 | 0123456 |"
    assert left == two
    assert file.read_text().endswith("The end.\n")


def test_a_new_row_is_filled_by_the_last_line_that_has_its_figures(tmp_path: Path) -> None:
    """Its bar is a dash before, so that a line without its figures changes it, too."""
    file = tmp_path / "MEASURED.md"
    file.write_text(f"{HEADER}\n|---|---|---|---|---|---|\n{ROW.replace('>= 2.1', '-')}\n")
    other = LINE | {"machine": "M1", "figures": {"engine.gpu.8b.b1.vs_floor": 9.0}}
    later = LINE | {"machine": "H300", "figures": {"engine.gpu.8b.b128.vs_batchgenerator": 2.5}}
    write_tables(tmp_path, [f"{json.dumps(line)}\n" for line in (LINE, other, later)])
    ((_, cells),) = rows(file.read_text())
    assert (cells[1], cells[2], cells[4]) == ("2.5x", ">= 2.1", "H300")


def test_lines_of_one_machine_and_commit_are_merged() -> None:
    """Those that a command printed until it was stopped, in the middle of a line."""
    more = LINE | {"figures": {"engine.gpu.8b.b128.vs_batchgenerator": 2.5, "engine.gpu.8b.b1.vs_floor": 1.3}}
    missing = LINE | {"figures": {"engine.gpu.8b.b1.vs_floor": None}}
    other = LINE | {"commit": "fedcba", "figures": {"engine.gpu.8b.b1.vs_floor": 9.0}}
    stopped = json.dumps(LINE | {"figures": {"engine.gpu.8b.b128.vs_batchgenerator": 7.0}})
    outputs = [f"words\n{json.dumps(LINE)}\n{{'peer': 1}}\n", f"{json.dumps(more)}\n{json.dumps(missing)}\n"]
    outputs += [f"{json.dumps(other)}\n{stopped}", f"{stopped[:40]}\n"]
    assert [line["figures"] for line in merged_lines(outputs)] == [more["figures"], other["figures"]]


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("update.8b.vs_mlx_lm", 1.2734, "1.27x"),
        ("quickstart.accuracy_after", 0.994, "99.4%"),
        ("update.8b.peak_gb", 45.97, "46 GB"),
        ("publish.p99_ms", 8.123, "8.12 ms"),
        ("fuzz.requests", 116741, "116,741"),
        ("oracle.worst_error", 1.2e-7, "1.2e-07"),
        ("engine.join.vs_step", 0.042, "0.042x"),
    ],
)
def test_values_have_the_units_of_their_figures(name: str, value: float, text: str) -> None:
    assert shown(name, value) == text
