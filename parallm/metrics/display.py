"""The display of a run: one interface, three kinds (live table, one line per step, nothing)."""

import io
import logging
import os
from collections.abc import Sequence
from typing import Literal, Protocol, TextIO

from parallm.metrics.eta import Schedule
from parallm.metrics.header import RunHeader
from parallm.metrics.line_display import LinesDisplay, aligned
from parallm.metrics.live_display import LiveDisplay
from parallm.metrics.log_capture import PROGRESS
from parallm.metrics.step import StepMetrics
from parallm.reports import EvaluationReport, TrainingStatus

logger = logging.getLogger(PROGRESS)


class Display(Protocol):
    """Called from one thread, in the order start, (step, evaluation, phase, progress, message)*, finish or close."""

    def start(self, header: RunHeader) -> None:
        """Show the header and take over the console's log handlers."""

    def step(self, metrics: StepMetrics) -> None: ...

    def evaluation(self, report: EvaluationReport) -> None: ...

    def phase(self, status: TrainingStatus) -> None:
        """Say what the trainer does now; cheap enough to call often. Why a run failed is for the command to say."""

    def progress(self, done: int, total: int) -> None:
        """Say how far an evaluation is; cheap enough to call often."""

    def message(self, text: str) -> None:
        """Show a text that stays."""

    def finish(self, rows: Sequence[tuple[str, str]]) -> None:
        """Close, then print the summary table of a run that has ended well or was stopped."""

    def close(self) -> None:
        """Give the terminal and the log handlers back. Does nothing the second time; belongs into a `finally`."""


class NoDisplay:
    """Shows nothing; warnings go where logging sends them."""

    def start(self, header: RunHeader) -> None:
        pass

    def step(self, metrics: StepMetrics) -> None:
        pass

    def evaluation(self, report: EvaluationReport) -> None:
        pass

    def phase(self, status: TrainingStatus) -> None:
        pass

    def progress(self, done: int, total: int) -> None:
        pass

    def message(self, text: str) -> None:
        pass

    def finish(self, rows: Sequence[tuple[str, str]]) -> None:
        pass

    def close(self) -> None:
        pass


class LoggedDisplay:
    """Shows what another display shows, and writes it to the log of the run, line by line."""

    def __init__(self, shown: Display, schedule: Schedule | None = None, name: str = "") -> None:
        """`schedule` and `name` are for the display of one of several policies, which never starts."""
        self._shown = shown
        self._log = LinesDisplay(LogLines(), schedule)
        self._name = name

    def start(self, header: RunHeader) -> None:
        self._log = LinesDisplay(LogLines(), header.schedule)
        self._log.message("\n".join(aligned(header.rows())))
        self._shown.start(header)

    def step(self, metrics: StepMetrics) -> None:
        self._log.step(metrics)
        self._shown.step(metrics)

    def evaluation(self, report: EvaluationReport) -> None:
        self._log.evaluation(report)
        self._shown.evaluation(report)

    def phase(self, status: TrainingStatus) -> None:
        self._log.phase(status)
        self._shown.phase(status)

    def progress(self, done: int, total: int) -> None:
        self._log.progress(done, total)
        self._shown.progress(done, total)

    def message(self, text: str) -> None:
        self._log.message(text)
        self._shown.message(text)

    def finish(self, rows: Sequence[tuple[str, str]]) -> None:
        self._log.finish([*([("policy", self._name)] if self._name else []), *rows])
        self._shown.finish(rows)

    def close(self) -> None:
        self._shown.close()


class LogLines(io.StringIO):
    """A stream each line of which is a record of the log."""

    def write(self, text: str) -> int:
        for line in text.splitlines():
            if line:
                logger.info("%s", line)
        return len(text)


def make_display(choice: Literal["auto", "live", "lines", "off"], stream: TextIO) -> Display:
    """Return the chosen kind, writing to `stream`; `auto` is live on a terminal that can move its cursor."""
    if choice == "auto":
        is_capable = stream.isatty() and os.environ.get("TERM", "") != "dumb"
        choice = "live" if is_capable else "lines"
    if choice == "off":
        return NoDisplay()
    return LiveDisplay(stream) if choice == "live" else LinesDisplay(stream)
