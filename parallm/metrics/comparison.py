"""Evaluations of several models side by side: a table for people and a report as JSON."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from parallm.metrics.formatting import MISSING, duration, number, percent
from parallm.reports import Estimate, EvaluationReport

NARROW, WIDE = 80, 240
"""Characters: a table that is wider than the first has its intervals below the values; no line is longer than the
second where no terminal limits it."""
MAX_TITLE = 24
UNTELLING = re.compile(r"adapter(_peft)?|latest|step_\d+|\d+|[\d_-]{10,}")
"""Names of folders inside a run, of jobs and of times, which say less than the name of their run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One model of a comparison."""

    name: str
    """Folder of an adapter, or `base`."""
    is_base: bool
    report: EvaluationReport
    difference: Estimate | None
    """Accuracy above that of the first model, problem by problem; None for the first one."""
    seconds: float


@dataclass(frozen=True, slots=True)
class Cell:
    """A value and, where there is one, its interval."""

    value: str
    interval: str = ""

    def text(self, *, has_two_lines: bool) -> str:
        if not self.interval:
            return self.value
        return f"{self.value}\n{self.interval}" if has_two_lines else f"{self.value} ({self.interval})"


def print_comparison(models: Sequence[Compared], stream: TextIO) -> None:
    """Write what the titles stand for, and a column for each model with 95% intervals."""
    titles = short_titles([(model.name, model.report.version) for model in models])
    console = Console(file=stream, highlight=False, width=None if stream.isatty() else WIDE)
    for title, model in zip(titles, models, strict=True):
        if title != model.name:
            console.print(Text(f"{title}: {model.name}"), soft_wrap=True)
    table = _table(models, titles, has_two_lines=False)
    if console.measure(table).maximum > NARROW:
        table = _table(models, titles, has_two_lines=True)
    console.print(table)


def comparison_report(models: Sequence[Compared], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The same numbers for programs, after `settings` that say how they came about."""
    return {
        **settings,
        "models": [
            {"name": one.name, **asdict(one.report), "difference": _plain(one.difference), "seconds": one.seconds}
            for one in models
        ],
    }


def short_titles(models: Sequence[tuple[str, int]]) -> list[str]:
    """A short and distinct title for each model, from its folder and version."""
    titles = [_title(name, version) for name, version in models]
    seen: Counter[str] = Counter()
    numbered = []
    for title in titles:
        seen[title] += 1
        numbered.append(f"{title} #{seen[title]}" if titles.count(title) > 1 else title)
    return numbered


def _title(name: str, version: int) -> str:
    parts = Path(name).parts or (name,)
    telling = [part for part in parts if not UNTELLING.fullmatch(part)]
    short = (telling or parts)[-1]
    ending = f"@{version}" if version else ""
    room = MAX_TITLE - len(ending)
    return (short if len(short) <= room else f"{short[: room - 3]}...") + ending


def _table(models: Sequence[Compared], titles: Sequence[str], *, has_two_lines: bool) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("held-out problems", no_wrap=True)
    for title in titles:
        table.add_column(Text(title), overflow="fold")
    for name, cells in _rows(models, titles[0]):
        table.add_row(name, *(Text(cell.text(has_two_lines=has_two_lines)) for cell in cells))
    return table


def _rows(models: Sequence[Compared], first: str) -> list[tuple[str, list[Cell]]]:
    reports = [model.report for model in models]
    rows = [
        ("version", [Cell(_version(model)) for model in models]),
        ("problems", [Cell(str(report.num_problems)) for report in reports]),
        ("greedy accuracy", [_share(Estimate(one.accuracy, one.low, one.high)) for one in reports]),
    ]
    if len(models) > 1:
        rows.append((f"points above {first}", [_points(model.difference) for model in models]))
    if reports[0].pass_at:
        samples = f"{reports[0].num_samples} at temperature {number(reports[0].temperature)}"
        rows.append(("samples", [Cell(samples) for _ in reports]))
    rows += [(f"pass@{k}", [_share(report.pass_at[k]) for report in reports]) for k in reports[0].pass_at]
    rows.append(("reward", [_mean(report.reward) for report in reports]))
    for name in sorted({name for report in reports for name in report.reward_parts}):
        parts = [report.reward_parts.get(name) for report in reports]
        rows.append((f"part {name}", [Cell(MISSING) if part is None else _mean(part) for part in parts]))
    rows.append(("time", [Cell(duration(model.seconds)) for model in models]))
    return rows


def _version(model: Compared) -> str:
    """An adapter of another program has none."""
    return "base" if model.is_base else str(model.report.version or MISSING)


def _share(estimate: Estimate) -> Cell:
    return Cell(percent(estimate.mean), f"{percent(estimate.low)} to {percent(estimate.high)}")


def _mean(estimate: Estimate) -> Cell:
    return Cell(number(estimate.mean), f"{number(estimate.low)} to {number(estimate.high)}")


def _points(difference: Estimate | None) -> Cell:
    """In percentage points, with signs."""
    if difference is None:
        return Cell(MISSING)
    low, mean, high = (f"{100 * value:+.1f}" for value in (difference.low, difference.mean, difference.high))
    return Cell(mean, f"{low} to {high}")


def _plain(difference: Estimate | None) -> dict[str, float] | None:
    return None if difference is None else asdict(difference)
