"""How long a run still takes."""

from collections import deque

from parallm.metrics.step import StepMetrics
from parallm.reports import TrainingStatus

NUM_RECENT = 10


class TimeLeft:
    """The trainer's own estimate where it gives one, else remaining steps times the mean of the recent ones."""

    def __init__(self, total_steps: int = 0) -> None:
        self._total_steps = total_steps
        self._recent: deque[float] = deque(maxlen=NUM_RECENT)
        self.seconds: float | None = None

    def step(self, metrics: StepMetrics) -> None:
        self._recent.append(metrics.total_seconds)
        remaining = max(0, self._total_steps - metrics.step)
        self.seconds = remaining * sum(self._recent) / len(self._recent) if self._total_steps else None

    def phase(self, status: TrainingStatus) -> None:
        if status.seconds_left is not None:
            self.seconds = status.seconds_left
