"""When the device worked on what: the last minutes, as a time line."""

import threading
from collections import deque
from dataclasses import dataclass

from parallm.device.governor import Work

MAX_UNITS = 50_000
"""Units that wait to be read; older ones are forgotten."""
MAX_SPANS = 20_000
MAX_SHOWN = 4_000
"""Spans of one answer; where there are more, neighbours of one kind are joined over wider gaps."""
JOINED_SECONDS = 0.0005
"""Gap between two units of one kind that is too short to be seen."""


@dataclass(frozen=True, slots=True)
class Span:
    """Units of one kind of work, one after the other, on the clock `time.perf_counter`."""

    work: Work
    start: float
    end: float


class Spans:
    """The device thread appends units, any thread reads."""

    def __init__(self) -> None:
        self.units: deque[tuple[Work, float, float]] = deque(maxlen=MAX_UNITS)
        """Kind, start and end of units that are not among the spans yet."""
        self._spans: deque[Span] = deque(maxlen=MAX_SPANS)
        self._guard = threading.Lock()

    def since(self, start: float) -> list[Span]:
        """Return up to `MAX_SHOWN` spans that end after `start`, the oldest first."""
        with self._guard:
            while self.units:
                self._add(*self.units.popleft())
            spans = list(self._spans)
        spans, gap = [span for span in spans if span.end > start], JOINED_SECONDS
        while len(spans) > MAX_SHOWN and gap < 1:
            gap *= 2
            spans = _joined(spans, gap)
        return spans[-MAX_SHOWN:]

    def _add(self, work: Work, start: float, end: float) -> None:
        if self._spans and _continues(self._spans[-1], work, start, JOINED_SECONDS):
            self._spans[-1] = Span(work, self._spans[-1].start, end)
        else:
            self._spans.append(Span(work, start, end))


def _joined(spans: list[Span], gap: float) -> list[Span]:
    joined: list[Span] = []
    for span in spans:
        if joined and _continues(joined[-1], span.work, span.start, gap):
            joined[-1] = Span(span.work, joined[-1].start, span.end)
        else:
            joined.append(span)
    return joined


def _continues(span: Span, work: Work, start: float, gap: float) -> bool:
    return span.work == work and start - span.end <= gap
