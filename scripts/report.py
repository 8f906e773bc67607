"""How a measuring script ends: a table for people, then one JSON line for programs."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from parallm.metrics.machine import describe_commit, describe_machine

Figures = Mapping[str, float | None]


def print_table(title: str, rows: Sequence[Sequence[str]]) -> None:
    """Print rows of cells in aligned columns."""
    print(f"\n{title}")
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def print_figures(figures: Figures, device: str = "") -> None:
    """Print the last line of a measuring script. `device` says what multiplied the matrices."""
    machine = describe_machine(device)
    print(json.dumps({"figures": figures, "machine": machine, "commit": describe_commit()}), flush=True)


def last_json(output: str) -> dict[str, Any]:
    """The last line of a program's output, parsed. Raises ValueError if it is not a JSON object."""
    lines = [line for line in output.splitlines() if line.strip()]
    found = json.loads(lines[-1]) if lines else None
    if not isinstance(found, dict):
        raise ValueError(f"expected a JSON object as the last line, found {lines[-1:]!r}")
    return found
