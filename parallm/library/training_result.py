"""What a run has left, read from its folder."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parallm.metrics.json_lines import read_rows
from parallm.metrics.summary import RunSummary

ADAPTER = "adapter"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingResult:
    """One policy after training."""

    folder: Path
    """Metrics, samples, checkpoints and adapters, as parallm/metrics/README.md lists them."""
    steps: Sequence[Mapping[str, Any]] = field(repr=False)
    """A row of metrics for each step, such as `row["reward/mean"]`."""
    evaluations: Sequence[Mapping[str, Any]] = field(repr=False)
    """A row for each evaluation, such as `row["heldout/accuracy"]`."""
    version: int
    """The newest version; 0 where no update has moved the adapter."""
    best_version: int | None
    """The best version by evaluation; None without evaluations."""
    adapter: Path | None
    """The adapter that the run leaves for use elsewhere; None where there is none."""
    was_stopped: bool
    """Whether it was stopped before its last step."""
    policies: "Mapping[str, TrainingResult]" = field(default_factory=dict)
    """By name, where several are trained; the fields above are then those of the first."""


def read_result(folder: Path, *, version: int, was_stopped: bool) -> TrainingResult:
    summary = RunSummary(
        folder=folder,
        steps=read_rows(folder / "metrics.jsonl"),
        evaluations=read_rows(folder / "evaluations.jsonl"),
        peak_memory_gb=None,
    )
    adapter = folder / ADAPTER
    return TrainingResult(
        folder=folder,
        steps=summary.steps,
        evaluations=summary.evaluations,
        version=version,
        best_version=None if summary.best is None else int(summary.best["heldout/version"]),
        adapter=adapter if adapter.is_dir() else None,
        was_stopped=was_stopped,
    )
