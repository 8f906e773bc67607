"""The display on a terminal: progress, current numbers and a table of the last steps, drawn in place."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TextIO

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from parallm.metrics.eta import Eta, Schedule
from parallm.metrics.formatting import MISSING, accuracy, duration, number, percent
from parallm.metrics.header import FILES, RunHeader
from parallm.metrics.line_display import evaluation_line, waiting_text
from parallm.metrics.log_capture import LogCapture
from parallm.metrics.step import FlatRow, StepMetrics
from parallm.reports import EvaluationReport, TrainingStatus

NUM_KEPT = 40
LINES_AROUND = 14
"""Lines of the display that are not rows of the table, with some to spare for messages."""
STYLES = {logging.WARNING: "yellow", logging.ERROR: "red", logging.CRITICAL: "bold red"}


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table of steps."""

    title: str
    name: str
    """Flat name of the metric."""
    show: Callable[[object], str] = number
    width: int = 8
    supervised: bool = True
    """Whether a supervised run has it."""


def _seconds(value: object) -> str:
    return duration(value if isinstance(value, float) else None)


# in order of display; a narrow terminal drops the last ones of KEPT_FIRST first
COLUMNS = (
    Column("step", "step", width=5),
    Column("loss", "update/loss", width=7),
    Column("reward", "reward/mean", width=6, supervised=False),
    Column("signal", "groups", str, width=7, supervised=False),
    Column("skipped", "problems/skipped", width=7, supervised=False),
    Column("held out", "held out", lambda value: str(value or MISSING)),
    Column("KL", "update/kl_to_behaviour", supervised=False),
    Column("entropy", "update/entropy", width=7),
    Column("gradient", "update/gradient_norm"),
    Column("moved", "update/adapter_delta_relative"),
    Column("length", "completion/length_mean", width=6, supervised=False),
    Column("cut", "completion/truncated_fraction", percent, width=6, supervised=False),
    Column("rollout tok/s", "rollout/tokens_per_second", width=13, supervised=False),
    Column("serving tok/s", "serving/tokens_per_second", width=13),
    Column("version", "update/version", width=7),
    Column("time", "seconds/total", _seconds, width=11),
)
KEPT_FIRST = (
    "step",
    "reward",
    "signal",
    "held out",
    "skipped",
    "KL",
    "entropy",
    "length",
    "time",
    "loss",
    "version",
    "gradient",
    "rollout tok/s",
    "moved",
    "cut",
    "serving tok/s",
)


class LiveDisplay:
    """Redrawn four times a second by a thread of rich, which reads only whole values that the methods replace.

    Log records and printed text appear above it. `close` gives the terminal back and must be called however the run
    ends; it may be called twice.
    """

    def __init__(self, stream: TextIO) -> None:
        self._console = Console(file=stream, highlight=False)
        self._live = Live(self, console=self._console, refresh_per_second=4, vertical_overflow="crop")
        self._logs = LogCapture(self._log)
        self._spinner = Spinner("dots")
        self._schedule: Schedule | None = None
        self._steps: tuple[StepMetrics, ...] = ()
        self._evaluations: tuple[EvaluationReport, ...] = ()
        self._status = TrainingStatus(state="starting")
        self._eta = Eta(None)

    def start(self, header: RunHeader) -> None:
        self._schedule = header.schedule
        self._eta = Eta(header.schedule)
        for name, value in header.rows():
            self._show(Text.assemble((f"{name:<9}", "bold"), value))
        self._logs.start()  # first, since the live display replaces sys.stdout
        self._live.start()

    def step(self, metrics: StepMetrics) -> None:
        self._steps = (*self._steps, metrics)[-NUM_KEPT:]
        self._eta.step(metrics)

    def evaluation(self, report: EvaluationReport) -> None:
        self._evaluations = (*self._evaluations, report)
        self._eta.evaluation(report)
        self.message(evaluation_line(report))

    def phase(self, status: TrainingStatus) -> None:
        """Show the state. `status.metrics["step/fraction"]`, from 0 to 1, tells how far the current step is."""
        self._status = status
        self._eta.phase(status)

    def progress(self, done: int, total: int) -> None:
        metrics = {**self._status.metrics, "step/fraction": done / total}
        self._status = replace(self._status, metrics=metrics, message=f"{done} of {total}")

    def message(self, text: str) -> None:
        self._show(Text(text))

    def finish(self, rows: Sequence[tuple[str, str]]) -> None:
        self.close()
        table = Table(title="summary", title_justify="left", show_header=False)
        table.add_column(style="bold")
        table.add_column(overflow="fold")
        paths = [(name, value) for name, value in rows if name == FILES]
        for name, value in rows:
            if (name, value) not in paths:
                table.add_row(Text(name), Text(value))
        self._console.print(table)
        for name, value in paths:
            self._show(Text.assemble((f"{name}  ", "bold"), value))

    def close(self) -> None:
        self._live.stop()
        self._logs.stop()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        num_rows = max(3, options.size.height - LINES_AROUND)
        yield Group(
            Text(),
            self._progress(options.max_width),
            numbers_now(self._steps, self._evaluations, self._status, options.max_width),
            # two characters stay free: a `^C` that the terminal echoes must not wrap and move the display
            step_table(self._steps[-num_rows:], self._evaluations, options.max_width - 2),
        )

    def _log(self, text: str, level: int) -> None:
        self._show(Text(text, style=STYLES.get(level, "dim")))

    def _show(self, text: Text) -> None:
        """Print above the display. The terminal wraps it, not we, so that a long path can be copied as one."""
        self._console.print(text, soft_wrap=True)

    def _progress(self, width: int) -> Table:
        """Two bars: the whole run, and the current step where the trainer says how far it is."""
        status = self._status
        total = status.total_steps or (self._schedule.total_steps if self._schedule else 0)
        done = max(status.step, self._steps[-1].step if self._steps else 0)
        bar_width = max(4, min(40, width - 50))
        grid = Table.grid(padding=(0, 1))
        grid.add_column(no_wrap=True, width=min(12, width // 3))
        grid.add_column()
        grid.add_column(no_wrap=True, overflow="ellipsis")
        left = ", ".join(filter(None, [f"step {done}/{total}", self._eta.text]))
        grid.add_row(Text("run"), ProgressBar(total=total or None, completed=done, width=bar_width), Text(left))
        fraction = status.metrics.get("step/fraction")
        bar = ProgressBar(total=1, completed=fraction, width=bar_width) if isinstance(fraction, int | float) else ""
        self._spinner.update(text=Text(status.state))
        # the command says why a run failed, as its last line
        message = status.message if status.state != "failed" else ""
        grid.add_row(self._spinner, bar, Text(message or waiting_text(status.metrics)))
        return grid


def step_table(steps: Sequence[StepMetrics], evaluations: Sequence[EvaluationReport], width: int) -> Table:
    """Return one row per step with as many columns as fit into `width` characters."""
    columns = fitting_columns(width, steps)
    held_out = {
        report.step: number(report.loss) if report.is_of_loss else percent(report.accuracy) for report in evaluations
    }
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for column in columns:
        table.add_column(column.title, justify="right", no_wrap=True, width=column.width)
    for metrics in steps:
        groups = f"{metrics.groups_with_signal}/{metrics.groups_sampled}"
        row: FlatRow = {**metrics.to_flat(), "groups": groups, "held out": held_out.get(metrics.step)}
        is_skipped = row.get("update/skipped") is not None
        table.add_row(*(column.show(row.get(column.name)) for column in columns), style="yellow" if is_skipped else "")
    return table


def fitting_columns(width: int, steps: Sequence[StepMetrics] = ()) -> list[Column]:
    """Return the first columns of `KEPT_FIRST` that fit, with two characters between them; at least one.

    Only supervised runs show the loss, since a policy gradient's tells nothing; only a curriculum skips problems.
    """
    is_supervised = any(metrics.is_supervised for metrics in steps)
    without = {"loss"} if not is_supervised else {column.title for column in COLUMNS if not column.supervised}
    if not any(metrics.problems_skipped for metrics in steps):
        without.add("skipped")
    by_title = {column.title: column for column in COLUMNS}
    chosen: set[str] = set()
    used = 0
    for title in KEPT_FIRST:
        if title in without:
            continue
        used += by_title[title].width + 2
        if used > width and chosen:
            break
        chosen.add(title)
    return [column for column in COLUMNS if column.title in chosen]


def numbers_now(
    steps: Sequence[StepMetrics], evaluations: Sequence[EvaluationReport], status: TrainingStatus, width: int
) -> Text:
    """Return the newest numbers, of the trainer's status or else of the last step, wrapped at `width`."""
    row = {**(steps[-1].to_flat() if steps else {}), **status.metrics}
    report = evaluations[-1] if evaluations else None
    held_out = MISSING if report is None else _held_out(report)
    shown = (
        {"loss": number(row.get("update/loss")), "held out": held_out}
        if any(metrics.is_supervised for metrics in steps)
        else {
            "reward": number(row.get("reward/mean")),
            "held out": held_out,
            "KL": number(row.get("update/kl_to_behaviour")),
            "entropy": number(row.get("update/entropy")),
            "rollout": _speed(row.get("rollout/tokens_per_second")),
        }
    )
    shown |= {
        "serving": _speed(row.get("serving/tokens_per_second")),
        "version": number(max(status.version, int(row.get("update/version") or 0))),
    }
    text, used = Text(), 0
    for name, value in shown.items():
        length = len(name) + 1 + len(value)
        if used and used + 3 + length > width:
            text.append("\n")
            used = 0
        text.append("   " if used else "")
        text.append(f"{name} ", style="dim").append(value, style="bold")
        used += length + (3 if used else 0)
    return text.append("\n")


def _held_out(report: EvaluationReport) -> str:
    if report.is_of_loss:
        return f"loss {number(report.loss)}"
    return accuracy(report.accuracy, report.low, report.high)


def _speed(value: object) -> str:
    text = number(value)
    return text if text == MISSING else f"{text} tok/s"
