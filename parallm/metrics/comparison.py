"""Evaluations of several models side by side: a table for people and a report as JSON."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from rich.table import Table
from rich.text import Text

from parallm.metrics.formatting import MISSING, console_on, duration, number, percent, plain_table
from parallm.reports import Estimate, EvaluationReport

NARROW = 80
"""Characters: a wider table has its intervals below the values."""
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


Cell = tuple[str, ...]
"""A value and, where there is one, its interval."""


def print_comparison(models: Sequence[Compared], stream: TextIO) -> None:
    """Write what the titles stand for, and a column for each model with 95% intervals."""
    titles = short_titles([(model.name, model.report.version) for model in models])
    console = console_on(stream)
    for title, model in zip(titles, models, strict=True):
        if title != model.name:
            console.print(Text(f"{title}: {model.name}"), soft_wrap=True)
    table = _table(models, titles, has_two_lines=False)
    if console.measure(table).maximum > NARROW:
        table = _table(models, titles, has_two_lines=True)
    console.print(table)


def comparison_report(models: Sequence[Compared], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The same numbers for programs, after `settings` that say how they came about."""
    plain = [asdict(model) for model in models]
    rows = [
        {"name": one["name"], **one["report"], "difference": one["difference"], "seconds": one["seconds"]}
        for one in plain
    ]
    return {**settings, "models": rows}


def short_titles(models: Sequence[tuple[str, int]]) -> list[str]:
    """A short and distinct title for each model, from its folder and version."""
    titles = [_title(name, version) for name, version in models]
    return [
        f"{title} #{titles[: index + 1].count(title)}" if titles.count(title) > 1 else title
        for index, title in enumerate(titles)
    ]


def _title(name: str, version: int) -> str:
    parts = Path(name).parts or (name,)
    telling = [part for part in parts if not UNTELLING.fullmatch(part)]
    short = (telling or parts)[-1]
    ending = f"@{version}" if version else ""
    room = MAX_TITLE - len(ending)
    return (short if len(short) <= room else f"{short[: room - 3]}...") + ending


def _table(models: Sequence[Compared], titles: Sequence[str], *, has_two_lines: bool) -> Table:
    table = plain_table()
    table.add_column("held-out problems", no_wrap=True)
    for title in titles:
        table.add_column(Text(title), overflow="fold")
    for name, cells in _rows(models, titles[0]):
        table.add_row(name, *(Text("\n".join(cell) if has_two_lines else _on_one_line(*cell)) for cell in cells))
    return table


def _on_one_line(value: str, interval: str = "") -> str:
    return f"{value} ({interval})" if interval else value


def _rows(models: Sequence[Compared], first: str) -> list[tuple[str, list[Cell]]]:
    reports = [model.report for model in models]
    rows: list[tuple[str, list[Cell]]] = [
        ("version", [("base" if one.is_base else str(one.report.version or MISSING),) for one in models]),
        ("problems", [(str(report.num_problems),) for report in reports]),
        ("greedy accuracy", [_shown(Estimate(one.accuracy, one.low, one.high), percent) for one in reports]),
    ]
    if len(models) > 1:
        rows.append((f"points above {first}", [_shown(model.difference, _points) for model in models]))
    if reports[0].pass_at:
        samples = f"{reports[0].num_samples} at temperature {number(reports[0].temperature)}"
        rows.append(("samples", [(samples,) for _ in reports]))
    rows += [(f"pass@{k}", [_shown(report.pass_at[k], percent) for report in reports]) for k in reports[0].pass_at]
    rows.append(("reward", [_shown(report.reward, number) for report in reports]))
    for name in sorted({name for report in reports for name in report.reward_parts}):
        rows.append((f"part {name}", [_shown(report.reward_parts.get(name), number) for report in reports]))
    rows.append(("time", [(duration(model.seconds),) for model in models]))
    return rows


def _shown(estimate: Estimate | None, show: Callable[[float], str]) -> Cell:
    if estimate is None:
        return (MISSING,)
    return show(estimate.mean), f"{show(estimate.low)} to {show(estimate.high)}"


def _points(difference: float) -> str:
    """Return percentage points with their sign."""
    return f"{100 * difference:+.1f}"
