"""The display on a terminal: progress, the numbers of now and a table of the last steps, drawn in place."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TextIO

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from parallm.metrics.lines import evaluation_line, waiting_text
from parallm.metrics.live_table import numbers_now, step_table
from parallm.metrics.log_capture import LogCapture
from parallm.metrics.run_header import FILES, RunHeader
from parallm.metrics.step import StepMetrics
from parallm.metrics.time_left import Schedule, TimeLeft
from parallm.reports import EvaluationReport, TrainingStatus

NUM_KEPT = 40
LINES_AROUND = 14
"""Lines of the display that are not rows of the table, with some to spare for messages."""
STYLES = {logging.WARNING: "yellow", logging.ERROR: "red", logging.CRITICAL: "bold red"}


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
        self._time_left = TimeLeft(None)

    def start(self, header: RunHeader) -> None:
        self._schedule = header.schedule
        self._time_left = TimeLeft(header.schedule)
        for name, value in header.rows():
            self._show(Text.assemble((f"{name:<9}", "bold"), value))
        self._logs.start()  # first, since the live display replaces sys.stdout
        self._live.start()

    def step(self, metrics: StepMetrics) -> None:
        self._steps = (*self._steps, metrics)[-NUM_KEPT:]
        self._time_left.step(metrics)

    def evaluation(self, report: EvaluationReport) -> None:
        self._evaluations = (*self._evaluations, report)
        self._time_left.evaluation(report)
        self.message(evaluation_line(report))

    def phase(self, status: TrainingStatus) -> None:
        """Show the state. `status.metrics["step/fraction"]`, from 0 to 1, tells how far the current step is."""
        self._status = status
        self._time_left.phase(status)

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
        """Print what stays. The terminal wraps it, not we, so that a long path can be copied as one."""
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
        left = ", ".join(filter(None, [f"step {done}/{total}", self._time_left.text]))
        grid.add_row(Text("run"), ProgressBar(total=total or None, completed=done, width=bar_width), Text(left))
        fraction = status.metrics.get("step/fraction")
        bar = ProgressBar(total=1, completed=fraction, width=bar_width) if isinstance(fraction, int | float) else ""
        self._spinner.update(text=Text(status.state))
        # the command says why a run failed, as its last line
        message = status.message if status.state != "failed" else ""
        grid.add_row(self._spinner, bar, Text(message or waiting_text(status.metrics)))
        return grid
