"""Metrics of several workers: rank 0 writes the files of the run, with the seconds of its exchange."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from parallm.distributed.exchange import Exchange
from parallm.metrics.machine import peak_memory_gb
from parallm.metrics.record import RunRecorder
from parallm.metrics.settings import MetricsSettings
from parallm.metrics.step import StepMetrics
from parallm.metrics.summary import RunSummary
from parallm.reports import EvaluatedCompletion, EvaluationReport
from parallm.types import TrajectoryGroup


class SharedRecorder(RunRecorder):
    """Records the run at rank 0."""

    def __init__(self, folder: Path, settings: MetricsSettings, config: Mapping[str, Any], exchange: Exchange) -> None:
        super().__init__(folder, settings, config)
        self._exchange = exchange

    def step(self, metrics: StepMetrics, groups: Sequence[TrajectoryGroup] = ()) -> None:
        super().step(replace(metrics, source={**metrics.source, **self._exchange.take_seconds()}), groups)


class QuietRecorder(RunRecorder):
    """Records nothing, at the other ranks."""

    def start(self) -> None: ...

    def go_on_after(self, step: int) -> None: ...

    def step(self, metrics: StepMetrics, groups: Sequence[TrajectoryGroup] = ()) -> None: ...

    def evaluation(self, report: EvaluationReport, completions: Sequence[EvaluatedCompletion] = ()) -> None: ...

    def finish(self, prefix: str, *, title: str = "", device: str = "") -> RunSummary:
        return RunSummary(folder=self.folder, steps=[], evaluations=[], peak_memory_gb=peak_memory_gb())
