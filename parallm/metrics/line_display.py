"""The display where there is no terminal: one line per step, per evaluation and per message."""

import logging
from collections.abc import Mapping, Sequence
from typing import TextIO

from parallm.metrics.eta import Eta, Schedule, ThrottledProgress
from parallm.metrics.formatting import accuracy, duration, number, percent
from parallm.metrics.header import RunHeader
from parallm.metrics.log_capture import LogCapture
from parallm.metrics.step import StepMetrics
from parallm.reports import EvaluationReport, TrainingStatus, UpdateReport


class LinesDisplay:
    """Writes to `stream`; each line is flushed, so that `tail -f` and CI logs show it at once."""

    def __init__(self, stream: TextIO, schedule: Schedule | None = None) -> None:
        """`schedule` is for a display that never starts: `start` takes it from the header."""
        self._stream = stream
        self._logs = LogCapture(self._log)
        self._schedule = schedule
        self._eta = Eta(schedule)
        self._message = ""
        self._progress = ThrottledProgress()

    def start(self, header: RunHeader) -> None:
        self._schedule = header.schedule
        self._eta = Eta(header.schedule)
        self._write(*aligned(header.rows()))
        self._logs.start()

    def step(self, metrics: StepMetrics) -> None:
        self._eta.step(metrics)
        self._write(step_line(metrics, self._schedule, self._eta.text))

    def evaluation(self, report: EvaluationReport) -> None:
        self._eta.evaluation(report)
        self._write(evaluation_line(report))

    def phase(self, status: TrainingStatus) -> None:
        """Say what a step line cannot say, once, but not why a run failed: the command does, as its last line."""
        self._eta.phase(status)
        is_new, self._message = status.message != self._message, status.message
        if is_new and status.message and status.state != "failed":
            self.message(status.message)

    def progress(self, done: int, total: int) -> None:
        """Say it every 10 seconds, so that short evaluations stay one line."""
        if text := self._progress.text(done, total):
            self._write(f"evaluation: {text}")

    def message(self, text: str) -> None:
        self._write(text)

    def finish(self, rows: Sequence[tuple[str, str]]) -> None:
        self.close()
        self._write("", *aligned(rows))

    def close(self) -> None:
        self._logs.stop()

    def _log(self, text: str, level: int) -> None:
        self._write(f"{logging.getLevelName(level).lower()}: {text}" if level >= logging.WARNING else text)

    def _write(self, *lines: str) -> None:
        text = "".join(line + "\n" for line in lines)
        encoding = self._stream.encoding or "utf-8"
        # a log that is ASCII only must not end the run over the name of a model
        self._stream.write(text.encode(encoding, errors="backslashreplace").decode(encoding))
        self._stream.flush()


def step_line(metrics: StepMetrics, schedule: Schedule | None, eta: str) -> str:
    """Return one step in one line, about 150 characters."""
    update = metrics.update
    parts = [f"step {metrics.step}/{schedule.total_steps}" if schedule else f"step {metrics.step}"]
    parts += _of_training(metrics) if metrics.is_supervised else _of_samples(metrics)
    if update is not None:
        parts += [f"entropy {number(update.entropy)}"] if update.pairs is None else []
        parts += [f"gradient {number(update.gradient_norm)}", *_of_move(update), f"version {update.version}"]
    if update is None or update.skipped is not None:
        parts.append(f"no update: {'no group had a signal' if update is None else update.skipped}")
    if not metrics.is_supervised:
        parts.append(f"rollout {number(metrics.rollout_tokens_per_second)} tok/s")
    parts += [f"serving {number(metrics.serving_tokens_per_second)} tok/s", duration(metrics.total_seconds), eta]
    return "  ".join(filter(None, parts))


def _of_move(update: UpdateReport) -> list[str]:
    if update.skipped is not None:
        return []
    return [f"moved {number(update.adapter_delta_relative)}" if update.has_moved else "moved nothing"]


def _of_samples(metrics: StepMetrics) -> list[str]:
    kl = [] if metrics.update is None else [f"kl {number(metrics.update.kl_to_behaviour)}"]
    return [
        f"reward {number(metrics.reward_mean)}",
        f"signal {metrics.groups_with_signal}/{metrics.groups_sampled}",
        *([f"skipped {metrics.problems_skipped}"] if metrics.problems_skipped else []),
        f"length {metrics.completion_length_mean:.0f}",
        *kl,
        *filter(None, [waiting_text(metrics.source)]),
    ]


def waiting_text(row: Mapping[str, object]) -> str:
    """Return how many completions of clients wait for a step; empty where clients bring none."""
    waiting, rewarded = row.get("live/waiting"), row.get("live/rewarded")
    are_known = isinstance(waiting, int | float) and isinstance(rewarded, int | float)
    return f"{waiting:.0f} wait for a reward, {rewarded:.0f} have one" if are_known else ""


def _of_training(metrics: StepMetrics) -> list[str]:
    update = metrics.update
    loss = [] if update is None else [f"loss {number(update.loss)}"]
    if update is not None and update.pairs is not None:
        loss += [f"accuracy {percent(update.pairs.accuracy)}", f"margin {number(update.pairs.margin)}"]
    return [*loss, f"length {metrics.completion_length_mean:.0f}"]


def evaluation_line(report: EvaluationReport) -> str:
    """Return one evaluation in one line."""
    texts = [loss_text(report)] if report.num_demonstrations else []
    if not report.is_of_loss:
        unit = "problems" if report.margin is None else "pairs"
        texts.append(f"held-out accuracy {accuracy(report.accuracy, report.low, report.high)}")
        texts.append(f"{report.num_problems} {unit}")
    texts.append(f"version {report.version}")
    if not report.is_of_loss:
        texts += _of_problems(report)
    return f"evaluation at step {report.step}: {', '.join(texts)}"


def loss_text(report: EvaluationReport) -> str:
    """Return the loss of an evaluation that has one, and what it is of."""
    return f"held-out loss {number(report.loss)} of {report.num_demonstrations} demonstrations"


def _of_problems(report: EvaluationReport) -> list[str]:
    passed = [f"pass@{k} {accuracy(one.mean, one.low, one.high)}" for k, one in report.pass_at.items()]
    parts = [part_text(name, estimate.mean) for name, estimate in report.reward_parts.items()]
    if report.margin is not None:
        low, high = number(report.margin.low), number(report.margin.high)
        parts += [f"margin {number(report.margin.mean)} ({low} to {high})", f"loss {number(report.loss)}"]
    return [*passed, f"reward {number(report.reward.mean)}", *parts]


def part_text(name: str, mean: float) -> str:
    """Return a reward part's name and mean: a share of environments' own parts, a number of those of rollouts."""
    return f"{name} {number(mean) if name.startswith('rollout/') else percent(mean)}"


def aligned(rows: Sequence[tuple[str, str]]) -> list[str]:
    """Return `name  value` lines with the values under one another."""
    width = max((len(name) for name, _ in rows), default=0)
    return [f"{name:<{width}}  {value}" for name, value in rows]
