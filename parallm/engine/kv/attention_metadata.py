"""Attention metadata of a decode step: the slots that it computes, their lengths, masks and rotations.

`SlotManager` sets it before each step; the slot caches of all layers of a batch read it. On a CPU, rows that are much
longer than the others are computed apart. A sequence may feed several tokens in one step, its newest one and drafts:
each is a row of the forward, which writes and sees one position more of the same slot.

Axes: B rows of the forward, S active slots, T tokens of a slot, L positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from parallm.engine.kv.shapes import EMPTY
from parallm.model.kernels.cuda import MIN_ON_DEVICE, interned_array, on_cuda, uploaded
from parallm.model.kernels.decode_attention import RotaryAngles
from parallm.model.kernels.paged_attention import PagePlan, plan_pages
from parallm.model.kernels.rotary import Rotation

COPY_COST = 3
"""Cost of an outlier's position, which is copied first, in positions that are not."""
MIN_SAVED = 1500
"""Positions of all rows that computing outliers apart must save; its fixed cost (nano, measured on a CPU)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthOutliers:
    """Rows that are so long that the others are better computed without them."""

    rows: Sequence[int]
    num_read: int
    """Positions that the other rows read."""


def find_outliers(lengths: Sequence[int]) -> LengthOutliers | None:
    """The longest of rows that read `lengths` positions, if computing them apart saves enough."""
    order = sorted(range(len(lengths)), key=lambda row: lengths[row], reverse=True)
    longest = max(lengths, default=0)
    costs = [len(lengths) * lengths[order[count]] + COPY_COST * count * longest for count in range(len(order))]
    best = min(range(len(order)), key=lambda count: costs[count], default=0)
    if not order or costs[0] - costs[best] < MIN_SAVED:
        return None
    return LengthOutliers(rows=sorted(order[:best]), num_read=lengths[order[best]])


@dataclass(frozen=True, slots=True, kw_only=True)
class QuerySpans:
    """Rows of a forward by slot, where slots feed several tokens each."""

    slots_B: mx.array
    """Slot of each row, as an index of the active slots."""
    rows_ST: mx.array
    """Rows of each slot; the last one is repeated where a slot has fewer than others."""
    indices_B: mx.array
    """Index of each row in the flattened `rows_ST`."""

    @classmethod
    def of(cls, query_lengths: Sequence[int]) -> "QuerySpans":
        """Spans of slots with these numbers of tokens, in order."""
        longest = max(query_lengths)
        starts = [sum(query_lengths[:slot]) for slot in range(len(query_lengths))]
        rows = [
            [start + min(t, length - 1) for t in range(longest)]
            for start, length in zip(starts, query_lengths, strict=True)
        ]
        pairs = [(slot, t) for slot, length in enumerate(query_lengths) for t in range(length)]
        return cls(
            slots_B=mx.array([slot for slot, _ in pairs], mx.int32),
            rows_ST=mx.array(rows, mx.int32),
            indices_B=mx.array([slot * longest + t for slot, t in pairs], mx.int32),
        )

    def gathered(self, array_B1X: mx.array) -> mx.array:
        """Rows by slot, (B, heads, 1, X) -> (S, heads, T, X)."""
        return array_B1X[:, :, 0][self.rows_ST].swapaxes(1, 2)

    def scattered(self, array_SHTX: mx.array) -> mx.array:
        """The inverse of `gathered`."""
        return array_SHTX.swapaxes(1, 2).flatten(0, 1)[self.indices_B][:, :, None]


class AttentionMetadata:
    """The rows of one step, and the slot of each."""

    def __init__(self) -> None:
        self.shape = EMPTY
        self.is_contiguous = not on_cuda()
        """Whether the active slots are the first ones, as MLX's operations want it; a kernel takes any slots."""
        self.needs_contiguous = self.is_contiguous
        """Whether MLX's operations have read a step's keys and values; unless contiguous they had to gather them."""
        self.set_lengths([], *[mx.array([], mx.int32)] * 2)

    def set_lengths(self, lengths: Sequence[int], lengths_S: mx.array, slots_S: mx.array) -> None:
        """Positions that each active slot holds before the next step, also as an array, and the slots."""
        on_cpu = mx.default_device() == mx.Device(mx.cpu)
        self.outliers = find_outliers([length + 1 for length in lengths]) if on_cpu else None
        self.spans: QuerySpans | None = None
        self._all_equal = min(lengths, default=0) == max(lengths, default=0)
        self._set(lengths_S, slots_S, num_read=max(lengths, default=0) + 1)

    def set_spans(self, lengths: Sequence[int], query_lengths: Sequence[int], slots_S: mx.array) -> None:
        """The same for slots that feed several tokens each."""
        self.outliers, self._all_equal, self.spans = None, False, QuerySpans.of(query_lengths)
        ends = [length + t for length, count in zip(lengths, query_lengths, strict=True) for t in range(count)]
        self._set(mx.array(ends, mx.int32), slots_S, num_read=max(ends) + 1)
        self.slots_B = slots_S[self.spans.slots_B]

    def set_traced(self, lengths_B: mx.array, slots_B: mx.array, num_positions: int) -> None:
        """Rows of a step that is being compiled: their lengths are unknown but for the bound `num_positions`."""
        self.outliers, self._all_equal, self.spans = None, False, None
        self._set(lengths_B, slots_B, num_read=num_positions)

    def _set(self, lengths_B: mx.array, slots_S: mx.array, num_read: int) -> None:
        self.lengths_B, self.slots_B, self.num_read = lengths_B, slots_S, num_read
        self.read_slots: slice | mx.array = slice(0, slots_S.shape[0]) if self.is_contiguous else slots_S
        """The slots whose keys and values the step reads."""
        self._rotary: dict[Rotation, RotaryAngles] = {}
        self._plans: dict[tuple[int, int, int, int], PagePlan] = {}
        self._masks: list[tuple[mx.array, int]] = []  # masks that this step's `mask` returned, with their windows
        self._span_masks: dict[int, mx.array] = {}  # the same by slot, by their index in `_masks`

    def rotary(self, rotation: Rotation) -> RotaryAngles:
        """Rotation of the newest tokens' heads: computed once for all layers."""
        if rotation not in self._rotary:
            angles_BP2 = rotation.angles(self.lengths_B)
            self._rotary[rotation] = RotaryAngles(angles=angles_BP2, traditional=rotation.traditional)
        return self._rotary[rotation]

    def page_plan(self, query_heads: int, key_heads: int, head_size: int, window: int) -> PagePlan:
        """The pages that rows see, whose tables stand in place of slots: listed once for all layers."""
        key = query_heads, key_heads, head_size, window
        if key not in self._plans:
            self._plans[key] = plan_pages(
                self.slots_B,
                self.lengths_B,
                query_heads=query_heads,
                key_heads=key_heads,
                head_size=head_size,
                window=window,
            )
        return self._plans[key]

    def mask(self, window_size: int | None, return_array: bool) -> mx.array | None:
        """Positions that each row may see, (B, 1, 1, L); None where all may see all."""
        if not return_array and window_size is None and self._all_equal:
            return None
        positions_L = mx.arange(self.num_read, dtype=mx.int32)[None]
        seen_BL = positions_L <= self.lengths_B[:, None]
        if window_size is not None:
            seen_BL = seen_BL & (positions_L > self.lengths_B[:, None] - window_size)
        self._masks.append((seen_BL[:, None, None], window_size or 0))
        return self._masks[-1][0]

    def span_mask(self, mask: object) -> mx.array | None:
        """A mask of this step as (S, 1, T, L); None for foreign masks, or without spans."""
        if self.spans is None or self.window_of(mask) is None or mask is None:
            return None
        index = next(index for index, (own, _) in enumerate(self._masks) if own is mask)
        if index not in self._span_masks:
            self._span_masks[index] = self.spans.gathered(self._masks[index][0])
        return self._span_masks[index]

    def window_of(self, mask: object) -> int | None:
        """The window that a mask of this step leaves of each row's positions, 0: all of them; None for foreign
        masks."""
        if mask is None:
            return 0
        return next((window for own, window in self._masks if own is mask), None)


class StepIndices:
    """Lengths and slots of a step's rows as arrays, counted on the device where the rows stay. When rows join or leave,
    both come as one array."""

    def __init__(self) -> None:
        self._slots: list[int] = []
        self._lengths: list[int] = []
        self._growth: list[int] = []
        self._slots_B = self._lengths_B = self._growth_B = mx.array([], mx.int32)

    def arrays(self, slots: Sequence[int], lengths: Sequence[int]) -> tuple[mx.array, mx.array]:
        """Both, int32 (B,)."""
        if list(slots) == self._slots:
            growth = [now - before for now, before in zip(lengths, self._lengths, strict=True)]
            if growth != self._growth:
                self._growth, self._growth_B = growth, interned_array(tuple(_filled(growth)), mx.int32)
            self._lengths_B = self._lengths_B + self._growth_B
        else:
            self._slots, self._growth = list(slots), []
            both = uploaded(np.array([*_filled(slots), *_filled(lengths)], np.int32))
            self._slots_B, self._lengths_B = both[: both.size // 2], both[both.size // 2 :]
        self._lengths = list(lengths)
        if len(slots) >= MIN_ON_DEVICE:
            return self._slots_B, self._lengths_B
        return self._slots_B[: len(slots)], self._lengths_B[: len(slots)]


def _filled(numbers: Sequence[int]) -> list[int]:
    """Numbers, and zeros up to the size from which MLX keeps an array on the device, since every layer reads them."""
    return [*numbers, *[0] * (MIN_ON_DEVICE - len(numbers))]
