"""Numbers as people read them, the same in the live display, on lines, in the summary and beside the curves."""

import math
from pathlib import Path
from typing import TextIO

from rich import box
from rich.console import Console
from rich.table import Table

WIDE = 240
"""Characters of a line where no terminal limits it."""
MISSING = "-"
FILES = "files"
"""Name of the row that holds a path, in the header and in the summary."""


def number(value: object, digits: int = 3) -> str:
    """Return about `digits` digits, without an exponent between 0.001 and 100,000; `-` for what is no number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return MISSING
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if size == 0:
        return "0"
    if size >= 100_000 or size < 0.001:
        return f"{value:.{digits - 1}e}"
    if isinstance(value, int) or size >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    decimals = digits - (math.floor(math.log10(size)) + 1 if size >= 1 else 0)
    return f"{value:.{decimals if size >= 0.01 else digits + 1}f}"


def percent(value: object) -> str:
    """Return a fraction as a percentage with one decimal."""
    return f"{value:.1%}" if isinstance(value, int | float) and math.isfinite(value) else MISSING


def accuracy(value: object, low: object, high: object) -> str:
    """Return an accuracy with its interval."""
    return MISSING if percent(value) == MISSING else f"{percent(value)} ({percent(low)} to {percent(high)})"


def duration(seconds: object) -> str:
    """Return a time span in its two largest units; `-` for what is no number."""
    if not isinstance(seconds, int | float) or not math.isfinite(seconds):
        return MISSING
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def short_path(path: Path) -> str:
    """Return a path as one would type it here: relative where it lies inside of the current folder."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def plain_table() -> Table:
    """Return a table whose only line is below its titles."""
    return Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)


def console_on(stream: TextIO) -> Console:
    return Console(file=stream, highlight=False, width=None if stream.isatty() else WIDE)
