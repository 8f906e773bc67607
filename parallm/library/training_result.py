"""The result of a run, read from its folder."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parallm.metrics.json_lines import read_rows
from parallm.metrics.summary import RunSummary

ADAPTER = "adapter"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingResult:
    """The result of training one policy."""

    folder: Path
    """Folder with metrics, samples, checkpoints and adapters; see parallm/metrics/README.md."""
    steps: Sequence[Mapping[str, Any]] = field(repr=False)
    """Rows of metrics, one for each step, such as `row["reward/mean"]`."""
    evaluations: Sequence[Mapping[str, Any]] = field(repr=False)
    """Rows of evaluations, such as `row["heldout/accuracy"]`."""
    version: int
    """The newest version; 0 if no update changed the adapter."""
    best_version: int | None
    """The best version by evaluation; None without evaluations."""
    adapter: Path | None
    """Folder of the final adapter; None if no update changed it."""
    was_stopped: bool
    """Whether training was stopped before its last step."""
    policies: "Mapping[str, TrainingResult]" = field(default_factory=dict)
    """Results by policy if several are trained; the fields above are then those of the first."""


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
