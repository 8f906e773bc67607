"""Evaluations of several models side by side: a table for people and a report as JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TextIO

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from parallm.metrics.wording import MISSING, accuracy, duration, number
from parallm.reports import Estimate, EvaluationReport

WIDE = 240
"""Characters of a line where no terminal limits it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One model of a comparison."""

    name: str
    report: EvaluationReport
    difference: Estimate | None
    """Accuracy above that of the first model, problem by problem; None for the first one."""
    seconds: float


def print_comparison(models: Sequence[Compared], stream: TextIO) -> None:
    """Write one column for each model, with 95% intervals."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("held-out problems", no_wrap=True)
    for model in models:
        table.add_column(Text(model.name), overflow="fold")
    for name, cells in _rows(models):
        table.add_row(name, *cells)
    Console(file=stream, highlight=False, width=None if stream.isatty() else WIDE).print(table)


def comparison_report(models: Sequence[Compared], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The same numbers for programs, after `settings` that say how they came about."""
    return {
        **settings,
        "models": [
            {"name": one.name, **asdict(one.report), "difference": _plain(one.difference), "seconds": one.seconds}
            for one in models
        ],
    }


def _rows(models: Sequence[Compared]) -> list[tuple[str, list[str]]]:
    reports = [model.report for model in models]
    rows = [
        ("version", ["base" if report.version == 0 else str(report.version) for report in reports]),
        ("problems", [str(report.num_problems) for report in reports]),
        ("greedy accuracy", [accuracy(report.accuracy, report.low, report.high) for report in reports]),
    ]
    if len(models) > 1:
        rows.append((f"above {models[0].name}", [_points(model.difference) for model in models]))
    samples, temperature = reports[0].num_samples, reports[0].temperature
    for k in reports[0].pass_at:
        passed = [report.pass_at[k] for report in reports]
        cells = [accuracy(one.mean, one.low, one.high) for one in passed]
        rows.append((f"pass@{k} of {samples} at temperature {number(temperature)}", cells))
    rows.append(("reward", [_with_interval(report.reward) for report in reports]))
    for name in sorted({name for report in reports for name in report.reward_parts}):
        parts = [report.reward_parts.get(name) for report in reports]
        rows.append((f"part {name}", [MISSING if part is None else _with_interval(part) for part in parts]))
    rows.append(("time", [duration(model.seconds) for model in models]))
    return rows


def _with_interval(estimate: Estimate) -> str:
    return f"{number(estimate.mean)} ({number(estimate.low)} to {number(estimate.high)})"


def _points(difference: Estimate | None) -> str:
    """In percentage points, with signs."""
    if difference is None:
        return MISSING
    low, mean, high = (f"{100 * value:+.1f}" for value in (difference.low, difference.mean, difference.high))
    return f"{mean} points ({low} to {high})"


def _plain(difference: Estimate | None) -> dict[str, float] | None:
    return None if difference is None else asdict(difference)
