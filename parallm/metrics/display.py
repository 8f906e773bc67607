"""The display of a run: one line per step, per evaluation and per message, on a stream, in the log, or nowhere."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TextIO

from parallm.metrics.eta import Eta, Schedule, ThrottledProgress
from parallm.metrics.formatting import FILES, accuracy, duration, number, percent
from parallm.metrics.log_capture import PROGRESS, captured_logs
from parallm.metrics.step import NO_SIGNAL, StepMetrics
from parallm.reports import EvaluationReport, TrainingStatus

logger = logging.getLogger(PROGRESS)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHeader:
    """What does not change in a process and stands above its progress."""

    name: str
    model: str
    device: str
    blas: str
    """Library that multiplies matrices; empty on a GPU."""
    url: str | None
    """Address of the server; None without one."""
    page: str | None = None
    """Address at which a browser shows the run; None where no server has one."""
    folder: str | None = None
    """Folder that the run writes to; None without one."""
    adapter: str | None = None
    """The folder of the adapter that it begins with."""
    policies: tuple[str, ...] = ()
    """Names of what is trained, where it is more than `policy`."""
    schedule: Schedule | None = None
    """None where nothing is trained."""

    def rows(self) -> list[tuple[str, str]]:
        """Return names and values of what is set; `files` comes last."""
        named = {
            "run": self.name,
            "model": self.model,
            "adapter": self.adapter,
            "device": self.device,
            "BLAS": self.blas,
            "server": self.url or "off",
            "page": self.page,
            "policies": ", ".join(self.policies),
            FILES: self.folder,
        }
        return [(name, value) for name, value in named.items() if value]


class Display:
    """Writes to `stream`, if there is one, and to the log of the run if `is_logged`.

    Called from one thread, in the order start, (step, evaluation, phase, progress, message)*, finish or close. Each
    line is flushed, so that `tail -f` and CI logs show it at once. While it runs, log records go through the stream.
    """

    def __init__(
        self, stream: TextIO | None, *, is_logged: bool = False, name: str = "", schedule: Schedule | None = None
    ) -> None:
        """`name` and `schedule` are for one of several policies, whose display never starts and names it on each line.

        Else `start` takes the schedule from the header.
        """
        self._stream = stream
        self._is_logged = is_logged
        self._beginning = f"{name}: " if name else ""
        self._schedule = schedule
        self._eta = Eta(schedule)
        self._taken = ExitStack()  # the console's log handlers
        self._message = ""
        self._progress = ThrottledProgress()

    def start(self, header: RunHeader) -> None:
        """Show the header and take over the console's log handlers."""
        self._schedule = header.schedule
        self._eta = Eta(header.schedule)
        self._write(*aligned(header.rows()))
        if self._stream is not None:
            self.take_logs()

    def step(self, metrics: StepMetrics) -> None:
        self._eta.step(metrics)
        self._write(step_line(metrics, self._schedule, self._eta.text))

    def evaluation(self, report: EvaluationReport) -> None:
        self._eta.evaluation(report)
        self._write(evaluation_line(report))

    def phase(self, status: TrainingStatus) -> None:
        """Say what a step line cannot say, once, but not why a run failed: the command does, as its last line.

        Cheap enough to call often, like `progress`.
        """
        self._eta.phase(status)
        is_new, self._message = status.message != self._message, status.message
        if is_new and status.message and status.state != "failed":
            self._write(status.message)

    def progress(self, done: int, total: int) -> None:
        """Say how far an evaluation is, every 10 seconds, so that short ones stay one line."""
        if text := self._progress.text(done, total):
            self._write(f"evaluation: {text}")

    def message(self, text: str) -> None:
        """Show a text that stays."""
        self._write(text)

    def finish(self, rows: Sequence[tuple[str, str]]) -> None:
        """Close, then print the summary table of a run that has ended well or was stopped."""
        lines = self._log(*aligned(rows))  # while the console's handlers are away
        self.close()
        self._print("", *lines)

    def close(self) -> None:
        """Give the terminal and the log handlers back. Does nothing the second time; belongs into a `finally`."""
        self._taken.close()

    def take_logs(self) -> None:
        self._taken.enter_context(captured_logs(self.show_record))

    def show_record(self, text: str, level: int) -> None:
        """Show a record of the log, which has it already."""
        self._print(f"{logging.getLevelName(level).lower()}: {text}" if level >= logging.WARNING else text)

    def _write(self, *texts: str) -> None:
        self._print(*self._log(*texts))

    def _log(self, *texts: str) -> list[str]:
        """Log the texts and return their lines."""
        lines = [f"{self._beginning}{line}" for text in texts for line in text.splitlines()]
        for line in lines if self._is_logged else ():
            logger.info("%s", line)
        return lines

    def _print(self, *lines: str) -> None:
        if self._stream is None:
            return
        text = "".join(line + "\n" for line in lines)
        encoding = self._stream.encoding or "utf-8"
        # a log that is ASCII only must not end the run over the name of a model
        self._stream.write(text.encode(encoding, errors="backslashreplace").decode(encoding))
        self._stream.flush()


def step_line(metrics: StepMetrics, schedule: Schedule | None, eta: str) -> str:
    """Return one step in one line, about 150 characters."""
    update, is_sampled = metrics.update, not metrics.is_supervised
    parts = [f"step {metrics.step}/{schedule.total_steps}" if schedule else f"step {metrics.step}"]
    if is_sampled:
        parts += [
            f"reward {number(metrics.reward_mean)}",
            f"signal {metrics.groups_with_signal}/{metrics.groups_sampled}",
            f"skipped {metrics.problems_skipped}" if metrics.problems_skipped else "",
        ]
    elif update is not None:
        parts.append(f"loss {number(update.loss)}")
        if update.pairs is not None:
            parts += [f"accuracy {percent(update.pairs.accuracy)}", f"margin {number(update.pairs.margin)}"]
    parts.append(f"length {metrics.completion_length_mean:.0f}")
    if is_sampled:
        parts += ["" if update is None else f"kl {number(update.kl_to_behaviour)}", waiting_text(metrics.source)]
    if update is not None:
        moved = f"moved {number(update.adapter_delta_relative)}" if update.has_moved else "moved nothing"
        parts += [
            f"entropy {number(update.entropy)}" if update.pairs is None else "",
            f"gradient {number(update.gradient_norm)}",
            moved if update.skipped is None else "",
            f"version {update.version}",
        ]
    if update is None or update.skipped is not None:
        parts.append(f"no update: {NO_SIGNAL if update is None else update.skipped}")
    if is_sampled:
        parts.append(f"rollout {number(metrics.rollout_tokens_per_second)} tok/s")
    parts += [f"serving {number(metrics.serving_tokens_per_second)} tok/s", duration(metrics.total_seconds), eta]
    return "  ".join(filter(None, parts))


def waiting_text(row: Mapping[str, object]) -> str:
    """Return how many completions of clients wait for a step; empty where clients bring none."""
    waiting, rewarded = row.get("live/waiting"), row.get("live/rewarded")
    are_known = isinstance(waiting, int | float) and isinstance(rewarded, int | float)
    return f"{waiting:.0f} wait for a reward, {rewarded:.0f} have one" if are_known else ""


def evaluation_line(report: EvaluationReport) -> str:
    """Return one evaluation in one line."""
    loss, margin = number(report.loss), report.margin
    texts = [f"held-out loss {loss} of {report.num_demonstrations} demonstrations"] if report.num_demonstrations else []
    if not report.is_of_loss:
        texts.append(f"held-out accuracy {accuracy(report.accuracy, report.low, report.high)}")
        texts.append(f"{report.num_problems} {'problems' if margin is None else 'pairs'}")
    texts.append(f"version {report.version}")
    if not report.is_of_loss:
        texts += [f"pass@{k} {accuracy(one.mean, one.low, one.high)}" for k, one in report.pass_at.items()]
        texts.append(f"reward {number(report.reward.mean)}")
        for name, part in report.reward_parts.items():  # environments' own are shares, those of rollouts numbers
            texts.append(f"{name} {number(part.mean) if name.startswith('rollout/') else percent(part.mean)}")
    if margin is not None:
        interval = f"{number(margin.low)} to {number(margin.high)}"
        texts += [f"margin {number(margin.mean)} ({interval})", f"loss {loss}"]
    return f"evaluation at step {report.step}: {', '.join(texts)}"


def aligned(rows: Sequence[tuple[str, str]]) -> list[str]:
    """Return `name  value` lines with the values under one another."""
    width = max((len(name) for name, _ in rows), default=0)
    return [f"{name:<{width}}  {value}" for name, value in rows]
