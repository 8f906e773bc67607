"""Rows of a flat sequence of tokens, and the chunks that a recurrence computes them in.

A row may continue another one: a completion begins with the state after its prompt. Chunks never cross a border between
rows. The chunks of all rows are computed together, in the order in which states pass through them: first all first
chunks, then all second ones; rows of prompts before rows that continue them, longer rows before shorter ones. So the
rows that take part in a step are always the first ones of their stage.

Axes: M tokens, R rows, N chunks of all rows, C tokens of a chunk, W width.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from threading import local

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from parallm.model.kernels.gather import take_known_rows, take_rows

Indices = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Row:
    """Consecutive tokens of one sequence: `length` from `start` on."""

    start: int
    length: int
    after: int | None = None
    """Index of the row that it continues, which continues none; None: it begins with an initial state."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Rows whose states pass through their chunks at the same time."""

    rows: Indices
    """Indices of the rows, longest first."""
    counts: tuple[int, ...]
    """Rows in each step; their chunks follow each other."""
    first: int
    """Index of the first chunk."""

    @property
    def ranks(self) -> Indices:
        """The place of each row among those of the stage in the order of their indices."""
        return np.argsort(np.argsort(self.rows)).astype(np.int32)


class PackedRows:
    """The rows of a flat sequence of `num_tokens`; tokens of no row are padding."""

    def __init__(self, rows: Sequence[Row], num_tokens: int) -> None:
        self.rows = tuple(rows)
        self.num_tokens = num_tokens
        self._chunks: dict[int, Chunks] = {}

    def chunks(self, size: int) -> "Chunks":
        """The rows in chunks of `size` tokens."""
        if size not in self._chunks:
            self._chunks[size] = Chunks(self, size)
        return self._chunks[size]

    @cached_property
    def starting(self) -> list[int]:
        """Indices of the rows that begin with an initial state."""
        return [index for index, row in enumerate(self.rows) if row.after is None]

    @cached_property
    def continuing(self) -> list[int]:
        """Indices of the rows that continue others."""
        return [index for index, row in enumerate(self.rows) if row.after is not None]

    @cache  # noqa: B019  as long as the rows live
    def history(self, size: int) -> tuple[Indices, Indices]:
        """Every row with the `size` tokens before it, as indices of tokens (-1: none); each token's place there."""
        parts: list[Indices] = []
        places = np.full(self.num_tokens, -1, np.int32)
        end = 0
        for row in self.rows:
            before = np.full(size, -1, np.int32)
            if row.after is not None:
                parent = self.rows[row.after]
                known = min(size, parent.length)
                before[size - known :] = parent.start + np.arange(parent.length - known, parent.length)
            own = np.arange(row.start, row.start + row.length, dtype=np.int32)
            parts += [before, own]
            places[own] = end + size + np.arange(row.length)
            end += size + row.length
        return np.concatenate(parts), places


class Chunks:
    """The chunks of packed rows."""

    def __init__(self, packed: PackedRows, size: int) -> None:
        self.size = size
        self.starting = _stage(packed, packed.starting, size, first=0)
        self.continuing = _stage(packed, packed.continuing, size, first=sum(self.starting.counts))
        order = {row: place for place, row in enumerate(self.starting.rows.tolist())}
        parents = [order[packed.rows[row].after or 0] for row in self.continuing.rows.tolist()]
        self.parents = np.asarray(parents, np.int32)
        """The place, among the rows of the first stage, of what each row of the second one continues."""
        self.num_chunks = sum(self.starting.counts) + sum(self.continuing.counts)
        self._tokens_NC = np.full((self.num_chunks, size), -1, np.int32)
        for stage in (self.starting, self.continuing):
            chunk = stage.first
            for step, count in enumerate(stage.counts):
                for row in (packed.rows[index] for index in stage.rows[:count]):
                    length = min(size, row.length - step * size)
                    self._tokens_NC[chunk, :length] = row.start + step * size + np.arange(length)
                    chunk += 1
        flat = self._tokens_NC.reshape(-1)
        self._places_M = np.full(packed.num_tokens, -1, np.int32)
        self._places_M[flat[flat >= 0]] = np.flatnonzero(flat >= 0)

    @cached_property
    def tokens(self) -> mx.array:
        """The token at each place, -1 for none (N, C); more chunks follow, of the tokens that are in none."""
        unused = np.flatnonzero(self._places_M < 0).astype(np.int32)
        padded = np.pad(unused, (0, -len(unused) % self.size), constant_values=-1)
        return mx.array(np.concatenate([self._tokens_NC, padded.reshape(-1, self.size)]))

    def gathered(self, flat_MX: mx.array) -> mx.array:
        """Arrays of tokens (M, ..) in chunks (N, C, ..), zeros where there is no token."""
        return rearranged(flat_MX, self._tokens_NC.reshape(-1)).reshape(self.num_chunks, self.size, *flat_MX.shape[1:])

    def scattered(self, chunks_NCX: mx.array) -> mx.array:
        """The inverse of `gathered`."""
        return rearranged(chunks_NCX.flatten(0, 1), self._places_M)


class _InUse(local):
    rows: PackedRows | None = None
    padded: PackedRows | None = None


_in_use = _InUse()


@contextmanager
def using(rows: PackedRows) -> Iterator[None]:
    """Inside the block, in this thread, functions that mix tokens are given the tokens of these rows as one row."""
    _in_use.rows = rows
    try:
        yield
    finally:
        _in_use.rows = None


def rows_in_use() -> PackedRows | None:
    """The rows of `using`; None outside of it."""
    return _in_use.rows


@contextmanager
def using_lengths(lengths: Sequence[int], width: int) -> Iterator[None]:
    """Inside the block, in this thread, tokens (B, width) are rows of these lengths with padding behind them."""
    starts = (row * width for row in range(len(lengths)))
    rows = [Row(start=start, length=length) for start, length in zip(starts, lengths, strict=False)]
    _in_use.padded = PackedRows(rows, len(lengths) * width)
    try:
        yield
    finally:
        _in_use.padded = None


def padded_rows(num_rows: int, width: int) -> PackedRows | None:
    """The rows of `using_lengths` if they have these sizes; None outside of it."""
    rows = _in_use.padded
    return rows if rows is not None and (len(rows.rows), rows.num_tokens) == (num_rows, num_rows * width) else None


@lru_cache(maxsize=64)
def whole_rows(num_rows: int, length: int) -> PackedRows:
    """Rows of one length, one after the other."""
    return PackedRows([Row(start=row * length, length=length) for row in range(num_rows)], num_rows * length)


def rearranged(source: mx.array, indices: Indices) -> mx.array:
    """source[indices], zeros for -1, of any array with rows in the first axis. Not for gradients."""
    flat = source.reshape(source.shape[0], -1)
    present = indices >= 0
    if present.all():
        if len(indices) == len(flat) and (indices == np.arange(len(indices))).all():
            return source
        taken = take_rows(flat, mx.array(indices))
    else:
        extended = mx.concatenate([flat, mx.zeros((1, flat.shape[1]), flat.dtype)])
        taken = take_rows(extended, mx.array(np.where(present, indices, len(flat)).astype(np.int32)))
    return taken.reshape(len(indices), *source.shape[1:])


def taken(source_MW: mx.array, indices: Indices) -> mx.array:
    """source_MW[indices], zeros for -1; differentiable."""
    if (indices >= 0).all():
        return take_known_rows(source_MW, indices)
    extended = mx.concatenate([source_MW, mx.zeros((1, source_MW.shape[1]), source_MW.dtype)])
    return take_known_rows(extended, np.where(indices >= 0, indices, len(source_MW)).astype(np.int32))


def _stage(packed: PackedRows, rows: list[int], size: int, first: int) -> Stage:
    numbers = {row: -(-packed.rows[row].length // size) for row in rows}
    ordered = sorted(rows, key=lambda row: -numbers[row])
    steps = max(numbers.values(), default=0)
    counts = tuple(sum(number > step for number in numbers.values()) for step in range(steps))
    return Stage(rows=np.asarray(ordered, np.int32), counts=counts, first=first)
