"""Measurements of the process once a second: a quarter of an hour is kept by second, a week by minute."""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np

from parallm.metrics.news import News

SECONDS = 1.0
NUM_SECONDS = 15 * 60
NUM_MINUTES = 7 * 24 * 60
SECONDS_PER_MINUTE = 60
MAX_COLUMNS = 64

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulses:
    """Measurements in the order of their times; NaN where one has no number."""

    bucket: int
    """Seconds between two of them."""
    times: np.ndarray
    """Unix seconds."""
    columns: Mapping[str, np.ndarray]


class Pulse:
    """Measures and tells. On the event loop alone."""

    def __init__(self, measure: Callable[[], Mapping[str, Any]], news: News) -> None:
        """`measure` returns numbers, or mappings of numbers, by name."""
        self._measure = measure
        self._news = news
        self._by_second = Ring(NUM_SECONDS)
        self._by_minute = Ring(NUM_MINUTES)
        self._has_failed = False
        self.last: Mapping[str, Any] = {}

    async def run(self, also: Callable[[], None] = lambda: None) -> None:
        """Measure until cancelled, and call `also` each time."""
        while True:
            self.beat(time.time())
            also()
            await asyncio.sleep(SECONDS)

    def beat(self, now: float) -> None:
        """Measure once."""
        try:
            row = {"time": round(now, 3), **self._measure()}
        except Exception as error:  # noqa: BLE001 - what cannot be measured must not end what is watched
            if not self._has_failed:
                logger.warning("the pulse of this process cannot be measured: %s: %s", type(error).__name__, error)
            self._has_failed = True
            return
        self.last = row
        self._news.tell("pulse", row)
        numbers = _flat(row)
        self._by_second.append(now, numbers)
        if now - self._by_minute.last >= SECONDS_PER_MINUTE:
            self._by_minute.append(now, numbers)

    def pulses(self, minutes: int) -> Pulses:
        """Return those of the last `minutes`: by second as far as they go back, else by minute."""
        is_by_second = minutes * SECONDS_PER_MINUTE <= NUM_SECONDS
        ring = self._by_second if is_by_second else self._by_minute
        return ring.since(time.time() - minutes * SECONDS_PER_MINUTE, 1 if is_by_second else SECONDS_PER_MINUTE)


class Ring:
    """The newest `capacity` rows of numbers by name."""

    def __init__(self, capacity: int) -> None:
        self.last = -math.inf
        """Time of the newest row."""
        self._capacity = capacity
        self._times = np.zeros(capacity)
        self._columns: dict[str, np.ndarray] = {}
        self._num_rows = 0

    def append(self, now: float, numbers: Mapping[str, float]) -> None:
        index = self._num_rows % self._capacity
        for name in numbers.keys() - self._columns.keys():
            if len(self._columns) < MAX_COLUMNS:
                self._columns[name] = np.full(self._capacity, math.nan)
        for name, values in self._columns.items():
            values[index] = numbers.get(name, math.nan)
        self._times[index] = self.last = now
        self._num_rows += 1

    def since(self, start: float, bucket: int) -> Pulses:
        first = self._num_rows % self._capacity if self._num_rows > self._capacity else 0
        order = (first + np.arange(min(self._num_rows, self._capacity))) % self._capacity
        order = order[self._times[order] >= start]
        columns = {name: values[order] for name, values in self._columns.items()}
        return Pulses(bucket=bucket, times=self._times[order], columns=columns)


def _flat(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a row by name, those of its mappings as `mapping/name`."""
    numbers: dict[str, float] = {}
    for name, value in row.items():
        if name in ("time", "by_version"):  # versions come and go
            continue
        if isinstance(value, Mapping):
            numbers |= {f"{name}/{key}": float(item) for key, item in value.items() if isinstance(item, Real)}
        elif isinstance(value, Real):
            numbers[name] = float(value)
    return numbers
