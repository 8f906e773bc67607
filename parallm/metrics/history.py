"""The numbers of a run by step, in columns in memory, and what a page draws of them.

`LiveRun` appends a row for each step; `run_files.py` fills one from the file of another run. A `View` is a snapshot
that any thread may read while the history goes on.
"""

import logging
import math
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, TypeAlias

import numpy as np

Column: TypeAlias = np.ndarray

STEP, TIME = "step", "time"
MAX_COLUMNS = 1024
"""Names of metrics that one history holds."""
MAX_CELLS = 32 * 1024 * 1024
"""Steps times columns of one history: 256 MiB."""
MAX_STEP = 2**53
"""Steps above it are no exact numbers in a browser."""
DIGITS = 6
"""Significant digits that are kept, which are more than a chart shows; times keep milliseconds."""
FIRST_CAPACITY = 256

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Buckets:
    """Minimum, maximum and last value of each column in each group of steps; NaN where there is none."""

    bucket: int
    """Steps of a group, a power of two: groups begin at 1, 1 + bucket, ... and do not move as a run goes on."""
    starts: Column
    """First step of each group that holds a step."""
    columns: Mapping[str, tuple[Column, Column, Column]]
    """Minimum, maximum and last number by name."""
    constant: Mapping[str, float]
    """Columns that have one value at every step, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Rows as they were recorded; NaN where a row has no number."""

    steps: Column
    columns: Mapping[str, Column]
    has_more: bool
    """Whether there are further rows in the range."""


@dataclass(frozen=True, slots=True)
class View:
    """A history at one moment. `columns[name][:len(steps)]` are its numbers."""

    epoch: str
    steps: Column
    columns: Mapping[str, Column]

    @property
    def first(self) -> int | None:
        return int(self.steps[0]) if len(self.steps) else None

    @property
    def last(self) -> int | None:
        return int(self.steps[-1]) if len(self.steps) else None

    @property
    def names(self) -> list[str]:
        return list(self.columns)

    def buckets(self, points: int) -> Buckets:
        """Return the whole run in at most `points` groups of steps."""
        size, number = len(self.steps), len(self.steps)
        bucket, starts = 1, np.arange(size)
        while number > points:
            bucket *= 2
            groups = (self.steps - 1) // bucket
            starts = np.flatnonzero(np.diff(groups, prepend=groups[:1] - 1))
            number = len(starts)
        columns: dict[str, tuple[Column, Column, Column]] = {}
        constant: dict[str, float] = {}
        for name, values in self.columns.items():
            own = values[:size]
            if size and own[0] == own[-1] and np.all(own == own[0]):
                constant[name] = float(own[0])
            else:
                columns[name] = (own, own, own) if bucket == 1 else _reduced(own, starts)
        first_steps = (self.steps[starts] - 1) // bucket * bucket + 1 if size else self.steps
        return Buckets(bucket=bucket, starts=first_steps, columns=columns, constant=constant)

    def rows(self, since: int, until: int, names: Collection[str] | None, limit: int) -> Rows:
        """Return up to `limit` rows of the steps above `since` up to `until`, with these columns or all of them.

        Raises KeyError for a name that no row has.
        """
        begin = int(np.searchsorted(self.steps, since, side="right"))
        end = int(np.searchsorted(self.steps, until, side="right"))
        chosen = self.columns if names is None else {name: self.columns[name] for name in names}
        part = slice(begin, min(end, begin + limit))
        columns = {name: values[part] for name, values in chosen.items()}
        return Rows(steps=self.steps[part], columns=columns, has_more=end - begin > limit)


class History:
    """Rows of one run in the order of their steps. One thread changes it; views may be read by any.

    A change of rows that a reader may have begins a new `epoch`, which tells it to read all anew.
    """

    def __init__(self) -> None:
        self.epoch = _new_epoch()
        self.last_row: Mapping[str, float] = {}
        """Numbers of the newest row by name, its step among them."""
        self._steps: Column = np.empty(FIRST_CAPACITY, np.int64)
        self._columns: dict[str, Column] = {}
        self._num_rows = 0
        self._has_refused = False

    def __len__(self) -> int:
        return self._num_rows

    def append(self, row: Mapping[str, Any]) -> Mapping[str, float]:
        """Add the numbers of a row with a `step`; rows of that step and later ones are dropped before.

        Returns the numbers as they are kept. Raises ValueError for a row without a usable step, and for one beyond
        `MAX_CELLS`.
        """
        step = row.get(STEP)
        if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step <= MAX_STEP:
            raise ValueError(f"step: {str(step)[:40]} should be a whole number from 0 to {MAX_STEP}")
        if self._num_rows and step <= self._steps[self._num_rows - 1]:
            self.drop_from(step)
        numbers = {name: kept for name, value in row.items() if (kept := _kept(name, value)) is not None}
        self._grow(numbers)
        self._steps[self._num_rows] = step
        for name, number in numbers.items():
            if name in self._columns:
                self._columns[name][self._num_rows] = number
        self._num_rows += 1
        self.last_row = {STEP: step, **numbers}
        return self.last_row

    def drop_from(self, step: int) -> None:
        """Remove rows of `step` and later. Begins a new epoch if there are any."""
        kept = int(np.searchsorted(self._steps[: self._num_rows], step, side="left"))
        if kept == self._num_rows:
            return
        self.epoch, self._num_rows, self.last_row = _new_epoch(), kept, {}
        self._steps = self._steps.copy()  # views of before keep what they have
        for name, values in self._columns.items():
            self._columns[name] = values.copy()
            self._columns[name][kept:] = math.nan

    def view(self) -> View:
        return View(self.epoch, self._steps[: self._num_rows], dict(self._columns))

    def _grow(self, numbers: Mapping[str, float]) -> None:
        """Make room for one more row with these names."""
        capacity = len(self._steps)
        if self._num_rows == capacity:
            if 2 * capacity * max(1, len(self._columns)) > MAX_CELLS:
                raise ValueError(f"{self._num_rows} rows of {len(self._columns)} metrics are all that fit here")
            capacity *= 2
            self._steps = np.resize(self._steps, capacity)
            self._columns = {name: _extended(values, capacity) for name, values in self._columns.items()}
        for name in numbers:
            if name in self._columns:
                continue
            if len(self._columns) == MAX_COLUMNS or capacity * (len(self._columns) + 1) > MAX_CELLS:
                self._refuse(name)
                return
            self._columns[name] = np.full(capacity, math.nan)

    def _refuse(self, name: str) -> None:
        if not self._has_refused:
            logger.warning(
                "the metric %.100r and later new ones are not drawn: a run has at most %d of them, and %d numbers",
                name,
                MAX_COLUMNS,
                MAX_CELLS,
            )
        self._has_refused = True


def _reduced(values: Column, starts: Column) -> tuple[Column, Column, Column]:
    """Return minimum, maximum and last number of each group; `starts` are the indices where groups begin."""
    places = np.where(np.isnan(values), -1, np.arange(len(values)))
    last = np.maximum.reduceat(places, starts)
    in_group = last >= starts
    return (
        np.fmin.reduceat(values, starts),
        np.fmax.reduceat(values, starts),
        np.where(in_group, values[np.maximum(last, 0)], math.nan),
    )


def _extended(values: Column, capacity: int) -> Column:
    longer = np.full(capacity, math.nan)
    longer[: len(values)] = values
    return longer


def _kept(name: str, value: object) -> float | None:
    """Return a finite number as it is kept; None for everything else."""
    if name == STEP or not isinstance(value, Real):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    if not math.isfinite(number):
        return None
    return round(number, 3) if name == TIME else float(f"{number:.{DIGITS}g}")


def _new_epoch() -> str:
    return uuid.uuid4().hex[:8]


def filled(rows: Sequence[Mapping[str, Any]]) -> History:
    """Return a history of rows in the order of a file. Raises ValueError."""
    history = History()
    for row in rows:
        history.append(row)
    history.epoch = _new_epoch()
    return history
