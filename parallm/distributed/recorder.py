"""Metrics of several processes: rank 0 writes the files of the run, with the figures of others."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from parallm.metrics.machine import peak_memory_gb
from parallm.metrics.record import RunRecorder
from parallm.metrics.settings import MetricsSettings
from parallm.metrics.step import StepMetrics
from parallm.metrics.summary import RunSummary
from parallm.reports import EvaluatedCompletion, EvaluationReport
from parallm.types import TrajectoryGroup


class SharedRecorder(RunRecorder):
    """Records the run at rank 0, with figures of other processes in each step's row."""

    def __init__(
        self,
        folder: Path,
        settings: MetricsSettings,
        config: Mapping[str, Any],
        take_figures: Callable[[], Mapping[str, float]],
        *,
        has_failed: Callable[[], bool] = lambda: False,
    ) -> None:
        """`take_figures` returns the figures since its last call, under flat names.

        `has_failed`: whether other processes are lost, so that the run goes on in new ones once this one has ended.
        """
        super().__init__(folder, settings, config)
        self._has_failed = has_failed
        self._take_figures = take_figures

    def step(self, metrics: StepMetrics, groups: Sequence[TrajectoryGroup] = ()) -> None:
        super().step(replace(metrics, source={**metrics.source, **self._take_figures()}), groups)

    def _draw(self, summary: RunSummary, title: str) -> None:
        if not self._has_failed():  # the import of matplotlib alone takes a second
            super()._draw(summary, title)


class QuietRecorder(RunRecorder):
    """Records nothing, at the other ranks."""

    def start(self) -> None: ...

    def go_on_after(self, step: int) -> None: ...

    def step(self, metrics: StepMetrics, groups: Sequence[TrajectoryGroup] = ()) -> None: ...

    def evaluation(self, report: EvaluationReport, completions: Sequence[EvaluatedCompletion] = ()) -> None: ...

    def finish(self, prefix: str, *, title: str = "", device: str = "") -> RunSummary:
        return RunSummary(folder=self.folder, steps=[], evaluations=[], peak_memory_gb=peak_memory_gb())
