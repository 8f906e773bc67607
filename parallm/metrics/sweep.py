"""The jobs of a sweep side by side: a table for people, `sweep.csv` for programs."""

import csv
import io
import json
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from parallm.metrics.formatting import MISSING, console_on, duration, number, percent, plain_table, short_path
from parallm.metrics.json_lines import write_whole

SUMMARY = "summary.json"
TABLE = "sweep.csv"
COLUMNS = {
    "accuracy_before": ("before", percent),
    "accuracy_after": ("after", percent),
    "accuracy_best": ("best", percent),
    "reward_first": ("reward first", number),
    "reward_last": ("reward last", number),
    "steps": ("steps", number),
    "train_seconds": ("time", duration),
}
"""Figures in the table: their titles and how they are shown."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One job of a sweep that has ended."""

    number: int
    overrides: tuple[str, ...]
    """Such as `seed=0`."""
    folder: Path
    exit_code: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRow:
    """Result of one run of a job; a job has one for each of its policies."""

    job: Job
    policy: str
    """Empty where the job trains one policy."""
    changes: Mapping[str, str]
    """Values of the keys that differ between jobs."""
    figures: Mapping[str, Any]
    """Names without their prefix."""


def report_sweep(jobs: Sequence[Job], folder: Path, stream: TextIO) -> None:
    """Write the table of all jobs to `stream`, and with every figure to `sweep.csv` in `folder`."""
    rows = list(_rows(jobs))
    _print(rows, stream)
    try:
        write_whole(folder / TABLE, _csv(rows))
    except OSError as error:
        logger.warning("cannot write %s: %s", folder / TABLE, error)
    else:
        stream.write(f"{short_path(folder / TABLE)}\n")


def _print(rows: Sequence[SweepRow], stream: TextIO) -> None:
    known = {name for row in rows for name, value in row.figures.items() if isinstance(value, int | float)}
    shown = {name: column for name, column in COLUMNS.items() if name in known}
    policies = ["policy"] if any(row.policy for row in rows) else []
    table = plain_table()
    for title in ("job", *policies, *_short(rows[0].changes), *(title for title, _ in shown.values()), "ended"):
        table.add_column(title, overflow="fold")
    for row in rows:
        table.add_row(
            str(row.job.number),
            *([row.policy] if policies else []),
            *row.changes.values(),
            *(show(row.figures.get(name)) for name, (_, show) in shown.items()),
            "well" if row.job.exit_code == 0 else f"with {row.job.exit_code}",
        )
    console_on(stream).print(table)


def _short(keys: Collection[str]) -> list[str]:
    """The last part of each key where that tells them apart, else the whole."""
    lasts = [key.rpartition(".")[2] for key in keys]
    return [last if lasts.count(last) == 1 else key for key, last in zip(keys, lasts, strict=True)]


def _csv(rows: Sequence[SweepRow]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row.figures))
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(["job", "policy", *rows[0].changes, "exit_code", *names])
    for row in rows:
        figures = (row.figures.get(name) for name in names)
        lines.writerow([row.job.number, row.policy, *row.changes.values(), row.job.exit_code, *figures])
    return text.getvalue()


def _rows(jobs: Sequence[Job]) -> Iterator[SweepRow]:
    for job, changes in zip(jobs, _changes(jobs), strict=True):
        alone = job.folder / SUMMARY
        files = [alone] if alone.is_file() else sorted(job.folder.glob(f"*/{SUMMARY}"))
        for file in files or [alone]:
            yield SweepRow(
                job=job, policy="" if file == alone else file.parent.name, changes=changes, figures=_figures(file)
            )


def _changes(jobs: Sequence[Job]) -> list[dict[str, str]]:
    """The values that differ between jobs, of each job; all values where there is only one job."""
    given = [dict(override.split("=", 1) for override in job.overrides if "=" in override) for job in jobs]
    keys = dict.fromkeys(key for values in given for key in values)
    swept = [key for key in keys if len(jobs) == 1 or len({values.get(key) for values in given}) > 1]
    return [{key.lstrip("+"): values.get(key, MISSING) for key in swept} for values in given]


def _figures(file: Path) -> dict[str, Any]:
    """Figures of a run without their prefix; none where it has left no summary."""
    try:
        figures = json.loads(file.read_text(encoding="utf-8"))["figures"]
    except (OSError, ValueError, KeyError):
        return {}
    return {name.rpartition(".")[2]: value for name, value in figures.items()}
