"""Keys and values of the rows that decode together: one slot per row, allocated in steps, written in O(1).

All rows read as many positions as the longest one has; on a CPU, rows that are much longer are computed apart, so that
the tail of one step does not make the next step's attention as long as its own.

mlx-lm's models see a `SlotCache` per layer through the interface of mlx-lm's caches (`offset`, `update_and_fetch`,
`make_mask`). Active rows are slots 0 to n-1; when one leaves, the last row moves into its slot.

Axes: S slots, B active rows, A rows that are computed apart, H key-value heads, Q query heads,
L positions, D head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from parallm.model.attention import OwnCache, attention
from parallm.model.shared_model import PlainCache

POSITION_STEP = 256
SLOT_STEP = 8
COPIED = 3  # what a position of a row apart costs, which is copied first, in positions that are not
LEAST_SAVED = 1500  # positions of all rows; what computing rows apart costs in any case (nano, measured on a CPU)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsApart:
    """Rows that are so long that the others are better computed without them."""

    rows: Sequence[int]
    view: int
    """Positions that the others read."""


def rows_apart(lengths: Sequence[int]) -> RowsApart | None:
    """The longest of rows that read `lengths` positions, if computing them apart saves enough."""
    order = sorted(range(len(lengths)), key=lambda row: lengths[row], reverse=True)
    longest = max(lengths, default=0)
    costs = [len(lengths) * lengths[order[count]] + COPIED * count * longest for count in range(len(order))]
    best = min(range(len(order)), key=lambda count: costs[count], default=0)
    if not order or costs[0] - costs[best] < LEAST_SAVED:
        return None
    return RowsApart(rows=sorted(order[:best]), view=lengths[order[best]])


class SlotCache(OwnCache):
    """One layer's keys and values for all slots of a shard."""

    def __init__(self, rows: "ActiveRows") -> None:
        self._rows = rows
        self._keys_SHLD: mx.array | None = None
        self._values_SHLD: mx.array | None = None

    @property
    def offset(self) -> mx.array:
        """Position of each active row's next token, (B,): what rotary embeddings need."""
        return self._rows.lengths_B

    @property
    def state(self) -> list[mx.array]:
        return [] if self._keys_SHLD is None or self._values_SHLD is None else [self._keys_SHLD, self._values_SHLD]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.state)

    def make_mask(self, _: int, return_array: bool = False, window_size: int | None = None) -> mx.array | None:
        """Which positions each active row may see, (B, 1, 1, L), or None where all may see all."""
        return self._rows.mask(window_size, return_array)

    def update_and_fetch(self, keys_BH1D: mx.array, values_BH1D: mx.array) -> tuple[mx.array, mx.array]:
        """Write one position per active row; views of the slots' keys and values up to the longest row."""
        rows = self._rows
        assert self._keys_SHLD is not None, "a row joined before the first step"
        assert self._values_SHLD is not None
        self._keys_SHLD[rows.slots_B, :, rows.lengths_B] = keys_BH1D[:, :, 0]
        self._values_SHLD[rows.slots_B, :, rows.lengths_B] = values_BH1D[:, :, 0]
        return self._keys_SHLD[: rows.num_rows, :, : rows.view], self._values_SHLD[: rows.num_rows, :, : rows.view]

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        *,
        scale: float,
        mask: Any,
        sinks: mx.array | None,
    ) -> mx.array:
        """Queries (B, Q, 1, D) over views (B, H, L, D) -> (B, Q, 1, D)."""
        apart = self._rows.apart
        if apart is None or not isinstance(mask, mx.array):
            return attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)
        part, rows_A = slice(0, apart.view), mx.array(apart.rows)
        found = attention(queries, keys[:, :, part], values[:, :, part], scale=scale, mask=mask[..., part], sinks=sinks)
        found[rows_A] = attention(
            queries[rows_A], keys[rows_A], values[rows_A], scale=scale, mask=mask[rows_A], sinks=sinks
        )
        return found

    def join(self, slot: int, prompt: PlainCache) -> None:
        """Copy a prompt's keys and values (1, H, T, D) into `slot`, which has room for them."""
        keys, values = prompt.keys_and_values()
        self._keys_SHLD = _grown(self._keys_SHLD, self._rows.num_slots, self._rows.num_positions, keys)
        self._values_SHLD = _grown(self._values_SHLD, self._rows.num_slots, self._rows.num_positions, values)
        self._keys_SHLD[slot : slot + 1, :, : prompt.offset] = keys
        self._values_SHLD[slot : slot + 1, :, : prompt.offset] = values

    def grow(self) -> None:
        """Make room for `num_positions` of every slot."""
        if self._keys_SHLD is not None and self._values_SHLD is not None:
            rows = self._rows
            self._keys_SHLD = _grown(self._keys_SHLD, rows.num_slots, rows.num_positions, self._keys_SHLD)
            self._values_SHLD = _grown(self._values_SHLD, rows.num_slots, rows.num_positions, self._values_SHLD)

    def row(self, slot: int, length: int) -> list[mx.array]:
        """Copies of the first `length` positions of a slot's keys and values, (1, H, length, D) each; not evaluated."""
        return [mx.contiguous(array[slot : slot + 1, :, :length]) for array in self.state]

    def put(self, slot: int, row: Sequence[mx.array]) -> None:
        """Write a copied row, which must be evaluated: MLX writes in place only while nothing else waits to read the
        pool, and would else copy all of it."""
        if self._keys_SHLD is not None and self._values_SHLD is not None:
            self._keys_SHLD[slot : slot + 1, :, : row[0].shape[2]] = row[0]
            self._values_SHLD[slot : slot + 1, :, : row[1].shape[2]] = row[1]


class ActiveRows:
    """How many positions each active row has: shared by the slot caches of all layers of a shard."""

    def __init__(self) -> None:
        self.num_slots = 0
        self.num_positions = 0
        self.set_lengths([])

    @property
    def num_rows(self) -> int:
        return len(self._lengths)

    def set_lengths(self, lengths: Sequence[int]) -> None:
        """Positions that each active row holds before the coming step."""
        self._lengths = list(lengths)
        self.lengths_B = mx.array(self._lengths, mx.int32)
        self.slots_B = mx.arange(len(self._lengths), dtype=mx.int32)
        self.view = max(self._lengths, default=0) + 1
        on_cpu = mx.default_device() == mx.Device(mx.cpu)
        self.apart = rows_apart([length + 1 for length in self._lengths]) if on_cpu else None

    def reserve(self, num_slots: int, num_positions: int) -> bool:
        """Raise the room to at least this many slots and positions, in steps. True if it changed."""
        before = self.num_slots, self.num_positions
        self.num_slots = max(self.num_slots, _rounded(num_slots, SLOT_STEP))
        self.num_positions = max(self.num_positions, _rounded(num_positions, POSITION_STEP))
        return before != (self.num_slots, self.num_positions)

    def mask(self, window_size: int | None, return_array: bool) -> mx.array | None:
        if not return_array and window_size is None and min(self._lengths) + 1 == self.view:
            return None
        positions_L = mx.arange(self.view, dtype=mx.int32)[None]
        seen_BL = positions_L <= self.lengths_B[:, None]
        if window_size is not None:
            seen_BL = seen_BL & (positions_L > self.lengths_B[:, None] - window_size)
        return seen_BL[:, None, None]


def _grown(pool: mx.array | None, num_slots: int, num_positions: int, like: mx.array) -> mx.array:
    if pool is not None and pool.shape[0] >= num_slots and pool.shape[2] >= num_positions:
        return pool
    _, heads, _, size = like.shape
    larger = mx.zeros((num_slots, heads, num_positions, size), like.dtype)
    if pool is not None:
        larger[: pool.shape[0], :, : pool.shape[2]] = pool
    return larger


def _rounded(number: int, step: int) -> int:
    return -(-number // step) * step
