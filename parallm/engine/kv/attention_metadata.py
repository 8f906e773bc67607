"""Which slots a step computes, and how many positions each has: shared by the slot caches of all layers of a shard.

On a CPU, rows that are much longer than the others are computed apart, so that the tail of one step does not make the
next step's attention as long as its own.

A row may feed several tokens in one step, its newest one and drafts. Each is a row of the forward then, which writes
and sees one position more of the same slot.

Axes: B rows of the forward, S active slots, T tokens of a slot, L positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from parallm.engine.kv.shapes import EMPTY
from parallm.model.kernels.cuda import MIN_ON_DEVICE, interned_array, on_cuda
from parallm.model.kernels.decode_attention import RotaryAngles
from parallm.model.kernels.rotary import Rotation

COPIED = 3  # what a position of a row apart costs, which is copied first, in positions that are not
MIN_SAVED = 1500  # positions of all rows; what computing rows apart costs in any case (nano, measured on a CPU)


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthOutliers:
    """Rows that are so long that the others are better computed without them."""

    rows: Sequence[int]
    view: int
    """Positions that the others read."""


def find_outliers(lengths: Sequence[int]) -> LengthOutliers | None:
    """The longest of rows that read `lengths` positions, if computing them apart saves enough."""
    order = sorted(range(len(lengths)), key=lambda row: lengths[row], reverse=True)
    longest = max(lengths, default=0)
    costs = [len(lengths) * lengths[order[count]] + COPIED * count * longest for count in range(len(order))]
    best = min(range(len(order)), key=lambda count: costs[count], default=0)
    if not order or costs[0] - costs[best] < MIN_SAVED:
        return None
    return LengthOutliers(rows=sorted(order[:best]), view=lengths[order[best]])


@dataclass(frozen=True, slots=True, kw_only=True)
class QuerySpans:
    """Which rows of a forward belong to which slot, where slots feed several tokens each."""

    slots_B: mx.array
    """Places of their slots among those that are active."""
    rows_ST: mx.array
    """The rows of each slot; the last one again where it has fewer than others."""
    places_B: mx.array
    """Of each row among all of `rows_ST`."""

    @classmethod
    def of(cls, widths: Sequence[int]) -> "QuerySpans":
        """Of slots with so many tokens each, in order."""
        most = max(widths)
        starts = [sum(widths[:slot]) for slot in range(len(widths))]
        rows = [[start + min(t, width - 1) for t in range(most)] for start, width in zip(starts, widths, strict=True)]
        pairs = [(slot, t) for slot, width in enumerate(widths) for t in range(width)]
        return cls(
            slots_B=mx.array([slot for slot, _ in pairs], mx.int32),
            rows_ST=mx.array(rows, mx.int32),
            places_B=mx.array([slot * most + t for slot, t in pairs], mx.int32),
        )

    def gathered(self, array_B1X: mx.array) -> mx.array:
        """What each slot's rows have, (B, heads, 1, X) -> (S, heads, T, X)."""
        return array_B1X[:, :, 0][self.rows_ST].swapaxes(1, 2)

    def scattered(self, array_SHTX: mx.array) -> mx.array:
        """`gathered` undone."""
        return array_SHTX.swapaxes(1, 2).flatten(0, 1)[self.places_B][:, :, None]


class AttentionMetadata:
    """The rows of one step, and the slot of each."""

    def __init__(self) -> None:
        self.layout = EMPTY
        self.by_place = not on_cuda()
        """Whether the slots that are read are the first ones, as MLX's operations want it; a kernel takes any slots."""
        self.needs_places = self.by_place
        """Whether MLX's operations have read a step's keys and values; they had to gather them if not `by_place`."""
        self.set_lengths([], *[mx.array([], mx.int32)] * 2)

    def set_lengths(self, lengths: Sequence[int], lengths_S: mx.array, slots_S: mx.array) -> None:
        """Positions that each active row holds before the coming step, also as an array, and where."""
        on_cpu = mx.default_device() == mx.Device(mx.cpu)
        self.apart = find_outliers([length + 1 for length in lengths]) if on_cpu else None
        self.spread: QuerySpans | None = None
        self._all_equal = min(lengths, default=0) == max(lengths, default=0)
        self._set(lengths_S, slots_S, view=max(lengths, default=0) + 1)

    def set_spread(self, lengths: Sequence[int], widths: Sequence[int], slots_S: mx.array) -> None:
        """As `set_lengths`, for slots that feed so many tokens each."""
        self.apart, self._all_equal, self.spread = None, False, QuerySpans.of(widths)
        ends = [length + t for length, width in zip(lengths, widths, strict=True) for t in range(width)]
        self._set(mx.array(ends, mx.int32), slots_S, view=max(ends) + 1)
        self.slots_B = slots_S[self.spread.slots_B]

    def set_traced(self, lengths_B: mx.array, slots_B: mx.array, num_positions: int) -> None:
        """Rows of a step that is being compiled: their lengths are not known yet, only that there is room for them."""
        self.apart, self._all_equal, self.spread = None, False, None
        self._set(lengths_B, slots_B, view=num_positions)

    def _set(self, lengths_B: mx.array, slots_S: mx.array, view: int) -> None:
        self.lengths_B, self.slots_B, self.view = lengths_B, slots_S, view
        self.read: slice | mx.array = slice(0, slots_S.shape[0]) if self.by_place else slots_S
        """The slots whose keys and values the step reads."""
        self._rotary: dict[Rotation, RotaryAngles] = {}
        self._masks: list[tuple[mx.array, int]] = []  # that this step's `mask` gave, with their windows
        self._spread_masks: dict[int, mx.array] = {}  # the same for the slots of spread rows, by place

    def rotary(self, rotation: Rotation) -> RotaryAngles:
        """How heads of the newest tokens are rotated: computed once for all layers."""
        if rotation not in self._rotary:
            angles_BP2 = rotation.angles(self.lengths_B)
            self._rotary[rotation] = RotaryAngles(angles=angles_BP2, traditional=rotation.traditional)
        return self._rotary[rotation]

    def mask(self, window_size: int | None, return_array: bool) -> mx.array | None:
        """Which positions each row may see, (B, 1, 1, L), or None where all may see all."""
        if not return_array and window_size is None and self._all_equal:
            return None
        positions_L = mx.arange(self.view, dtype=mx.int32)[None]
        seen_BL = positions_L <= self.lengths_B[:, None]
        if window_size is not None:
            seen_BL = seen_BL & (positions_L > self.lengths_B[:, None] - window_size)
        self._masks.append((seen_BL[:, None, None], window_size or 0))
        return self._masks[-1][0]

    def spread_mask(self, mask: object) -> mx.array | None:
        """A mask of this step as (S, 1, T, L); None for other masks, or where the rows are not spread."""
        if self.spread is None or self.window_of(mask) is None or mask is None:
            return None
        place = next(place for place, (known, _) in enumerate(self._masks) if known is mask)
        if place not in self._spread_masks:
            self._spread_masks[place] = self.spread.gathered(self._masks[place][0])
        return self._spread_masks[place]

    def window_of(self, mask: object) -> int | None:
        """The window that a mask of this step leaves of each row's positions, 0: all of them. None for other masks."""
        if mask is None:
            return 0
        return next((window for known, window in self._masks if known is mask), None)


class StepIndices:
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
            both = mx.array([*_filled(slots), *_filled(lengths)], mx.int32)
            self._slots_B, self._lengths_B = both[: both.size // 2], both[both.size // 2 :]
        self._lengths = list(lengths)
        if len(slots) >= MIN_ON_DEVICE:
            return self._slots_B, self._lengths_B
        return self._slots_B[: len(slots)], self._lengths_B[: len(slots)]


def _filled(numbers: Sequence[int]) -> list[int]:
    """Longer than `numbers` where these are few, as every layer reads them."""
    return [*numbers, *[0] * (MIN_ON_DEVICE - len(numbers))]
