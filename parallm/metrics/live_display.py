"""The display on a terminal: progress, current numbers and a table of the last steps, drawn in place."""

import itertools
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TextIO

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from parallm.metrics.display import Display, RunHeader, evaluation_line, waiting_text
from parallm.metrics.formatting import FILES, MISSING, accuracy, duration, number, percent, plain_table
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
    rank: int
    """A narrow terminal drops the columns of the highest ranks first."""
    show: Callable[[object], str] = number
    width: int = 8
    supervised: bool = True
    """Whether a supervised run has it."""


# in order of display
COLUMNS = (
    Column("step", "step", 0, width=5),
    Column("loss", "update/loss", 9, width=7),
    Column("reward", "reward/mean", 1, width=6, supervised=False),
    Column("signal", "groups", 2, str, width=7, supervised=False),
    Column("skipped", "problems/skipped", 4, width=7, supervised=False),
    Column("held out", "held out", 3, lambda value: str(value or MISSING)),
    Column("KL", "update/kl_to_behaviour", 5, supervised=False),
    Column("entropy", "update/entropy", 6, width=7),
    Column("gradient", "update/gradient_norm", 11),
    Column("moved", "update/adapter_delta_relative", 13),
    Column("length", "completion/length_mean", 7, width=6, supervised=False),
    Column("cut", "completion/truncated_fraction", 14, percent, width=6, supervised=False),
    Column("rollout tok/s", "rollout/tokens_per_second", 12, width=13, supervised=False),
    Column("serving tok/s", "serving/tokens_per_second", 15, width=13),
    Column("version", "update/version", 10, width=7),
    Column("time", "seconds/total", 8, duration, width=11),
)


class LiveDisplay(Display):
    """Redrawn four times a second by a thread of rich, which reads only whole values that the methods replace.

    Log records and printed text appear above it. `close` gives the terminal back and must be called however the run
    ends.
    """

    def __init__(self, stream: TextIO, *, is_logged: bool = False) -> None:
        super().__init__(None, is_logged=is_logged)
        self._console = Console(file=stream, highlight=False)
        self._live = Live(self, console=self._console, refresh_per_second=4, vertical_overflow="crop")
        self._spinner = Spinner("dots")
        self._steps: tuple[StepMetrics, ...] = ()
        self._evaluations: tuple[EvaluationReport, ...] = ()
        self._status = TrainingStatus(state="starting")

    def start(self, header: RunHeader) -> None:
        super().start(header)
        for name, value in header.rows():
            self._show(Text.assemble((f"{name:<9}", "bold"), value))
        self.take_logs()  # first, since the live display replaces sys.stdout
        self._live.start()

    def step(self, metrics: StepMetrics) -> None:
        self._steps = (*self._steps, metrics)[-NUM_KEPT:]
        super().step(metrics)

    def evaluation(self, report: EvaluationReport) -> None:
        self._evaluations = (*self._evaluations, report)
        super().evaluation(report)
        self._show(Text(evaluation_line(report)))

    def phase(self, status: TrainingStatus) -> None:
        """Show the state. `status.metrics["step/fraction"]`, from 0 to 1, tells how far the current step is."""
        self._status = status
        super().phase(status)

    def progress(self, done: int, total: int) -> None:
        metrics = {**self._status.metrics, "step/fraction": done / total}
        self._status = replace(self._status, metrics=metrics, message=f"{done} of {total}")
        super().progress(done, total)

    def message(self, text: str) -> None:
        super().message(text)
        self._show(Text(text))

    def finish(self, rows: Sequence[tuple[str, str]]) -> None:
        super().finish(rows)
        table = Table(title="summary", title_justify="left", show_header=False)
        table.add_column(style="bold")
        table.add_column(overflow="fold")
        for name, value in rows:
            if name != FILES:
                table.add_row(Text(name), Text(value))
        self._console.print(table)
        for name, value in rows:
            if name == FILES:
                self._show(Text.assemble((f"{name}  ", "bold"), value))

    def close(self) -> None:
        self._live.stop()
        super().close()

    def show_record(self, text: str, level: int) -> None:
        self._show(Text(text, style=STYLES.get(level, "dim")))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        num_rows = max(3, options.size.height - LINES_AROUND)
        yield Group(
            Text(),
            self._bars(options.max_width),
            numbers_now(self._steps, self._evaluations, self._status, options.max_width),
            # two characters stay free: a `^C` that the terminal echoes must not wrap and move the display
            step_table(self._steps[-num_rows:], self._evaluations, options.max_width - 2),
        )

    def _show(self, text: Text) -> None:
        """Print above the display. The terminal wraps it, not we, so that a long path can be copied as one."""
        self._console.print(text, soft_wrap=True)

    def _bars(self, width: int) -> Table:
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
    table = plain_table()
    for column in columns:
        table.add_column(column.title, justify="right", no_wrap=True, width=column.width)
    for metrics in steps:
        groups = f"{metrics.groups_with_signal}/{metrics.groups_sampled}"
        row: FlatRow = {**metrics.to_flat(), "groups": groups, "held out": held_out.get(metrics.step)}
        is_skipped = row.get("update/skipped") is not None
        table.add_row(*(column.show(row.get(column.name)) for column in columns), style="yellow" if is_skipped else "")
    return table


def fitting_columns(width: int, steps: Sequence[StepMetrics] = ()) -> list[Column]:
    """Return the first columns by rank that fit, with two characters between them; at least one.

    Only supervised runs show the loss, since a policy gradient's tells nothing; only a curriculum skips problems.
    """
    is_supervised = any(metrics.is_supervised for metrics in steps)
    without = {"skipped"} if not any(metrics.problems_skipped for metrics in steps) else set()
    without |= {column.title for column in COLUMNS if not column.supervised} if is_supervised else {"loss"}
    chosen = sorted((column for column in COLUMNS if column.title not in without), key=lambda column: column.rank)
    ends = itertools.accumulate(column.width + 2 for column in chosen)
    fitting = [column for column, end in zip(chosen, ends, strict=True) if end <= width] or chosen[:1]
    return [column for column in COLUMNS if column in fitting]


def numbers_now(
    steps: Sequence[StepMetrics], evaluations: Sequence[EvaluationReport], status: TrainingStatus, width: int
) -> Text:
    """Return the newest numbers, of the trainer's status or else of the last step, wrapped at `width`."""
    row = {**(steps[-1].to_flat() if steps else {}), **status.metrics}
    report = evaluations[-1] if evaluations else None
    held_out = MISSING if report is None else _held_out(report)
    shown = {"loss": number(row.get("update/loss")), "held out": held_out}
    if not any(metrics.is_supervised for metrics in steps):
        shown = {
            "reward": number(row.get("reward/mean")),
            "held out": held_out,
            "KL": number(row.get("update/kl_to_behaviour")),
            "entropy": number(row.get("update/entropy")),
            "rollout": _speed(row.get("rollout/tokens_per_second")),
        }
    shown["serving"] = _speed(row.get("serving/tokens_per_second"))
    shown["version"] = number(max(status.version, int(row.get("update/version") or 0)))
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


def make_display(
    choice: Literal["auto", "live", "lines", "off"], stream: TextIO, *, is_logged: bool = False
) -> Display:
    """Return the chosen kind, writing to `stream`; `auto` is live on a terminal that can move its cursor."""
    if choice == "auto":
        is_capable = stream.isatty() and os.environ.get("TERM", "") != "dumb"
        choice = "live" if is_capable else "lines"
    if choice == "live":
        return LiveDisplay(stream, is_logged=is_logged)
    return Display(stream if choice == "lines" else None, is_logged=is_logged)
