"""The two number blocks of the live display, fitted to the width of the terminal."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table
from rich.text import Text

from parallm.metrics.step import FlatRow, StepMetrics
from parallm.metrics.wording import MISSING, accuracy, duration, number, percent
from parallm.reports import EvaluationReport, TrainingStatus


@dataclass(frozen=True, slots=True)
class Column:
    """One column of the table of steps."""

    title: str
    name: str
    """Its flat name."""
    show: Callable[[object], str] = number
    width: int = 8
    supervised: bool = True
    """Whether it means something where nothing is sampled."""


def _seconds(value: object) -> str:
    return duration(value if isinstance(value, float) else None)


# in order of display; the last ones of KEPT_FIRST go first where the terminal is narrow
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
    """Return the most wanted columns of such a run whose widths, with two characters between them, fit; at least one.

    The loss stands there for supervised runs alone: that of a policy gradient tells nothing. Skipped problems are
    those of a curriculum.
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
    """Return the newest numbers, those of the trainer's status before those of the last step, wrapped at `width`."""
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
