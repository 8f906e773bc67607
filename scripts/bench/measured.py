"""Tables of measurements: the rows of the MEASURED.md files, which `scripts/figures --write` fills from lines of JSON.

A row names its figures; what was measured, the bars, the machine and the commit are filled in once the lines of one
machine and commit have all of them. Other rows stay as they are.
"""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import bench.measure  # noqa: F401  # registers the measurements
from bench.measurement import Bar, bars, shown

HEADER = "| what | measured | bar | figures | machine | commit |"


def tables(root: Path) -> list[Path]:
    """The documents with such tables."""
    files = (*sorted(root.glob("*.md")), *sorted((root / "parallm").rglob("*.md")))
    return [file for file in files if HEADER in file.read_text()]


def rows(text: str) -> Iterator[tuple[str, list[str]]]:
    """The lines of rows, each with its cells."""
    is_inside = False
    for line in text.splitlines():
        if line == HEADER:
            is_inside = True
        elif not line.startswith("|"):
            is_inside = False
        elif is_inside and not line.startswith("|---"):
            yield line, [cell.strip() for cell in line.strip("|").split("|")]


def figures_in(cell: str) -> list[str]:
    return re.findall("`([^`]+)`", cell)


def write_tables(root: Path, outputs: Sequence[str]) -> None:
    """Fill the rows of all tables below `root` with the lines of JSON in these outputs. Says which rows."""
    lines = merged_lines(outputs)
    for file in tables(root):
        text = file.read_text()
        for line, cells in rows(text):
            for one in lines:
                cells = filled(cells, one)
            if (new := f"| {' | '.join(cells)} |") != line:
                text = text.replace(line, new)
                print(f"{file.relative_to(root)}: {cells[0]}")
        file.write_text(text)


def merged_lines(outputs: Sequence[str]) -> list[dict[str, Any]]:
    """One line for each machine and commit, with the latest value of each figure. A line that was cut off is none."""
    merged: dict[tuple[str, str], dict[str, Any]] = {}
    for output in outputs:
        for text in output.splitlines(keepends=True):
            if text.startswith('{"figures"') and text.endswith("}\n"):
                line = json.loads(text)
                found = merged.setdefault((line["machine"], line["commit"]), line | {"figures": {}})
                found["figures"] |= {name: value for name, value in line["figures"].items() if value is not None}
    return list(merged.values())


def filled(cells: Sequence[str], line: dict[str, Any]) -> list[str]:
    """The row's cells with what the line has measured; as it was where the line lacks one of its figures."""
    what, measured, _, figures, machine, commit = cells
    names = figures_in(figures)
    values = [line["figures"].get(name) for name in names]
    if all(value is not None for value in values):
        measured = "; ".join(shown(name, value) for name, value in zip(names, values, strict=True))
        machine, commit = line["machine"], line["commit"][:7]
    return [what, measured, bar_of(names), figures, machine, commit]


def bar_of(names: Sequence[str]) -> str:
    """The bars of the figures; a dash for one without."""
    known = bars()
    texts = [known.get(name, Bar()).text() or "-" for name in names]
    return "; ".join(texts) if set(texts) != {"-"} else "-"
