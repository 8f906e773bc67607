"""Lengths and slots of a step's rows as arrays, from those of the step before where the rows stay.

What the host has written a GPU fetches page by page when a kernel first reads it: a quarter of a millisecond, as Nsight
Compute has it (one H200, 2026-11-21), as long as several layers of a small model. Rows mostly stay and grow by a
position, which the device can count by itself. Where rows join or leave both come as one array.

Axes: B rows.
"""

from collections.abc import Sequence

import mlx.core as mx

from parallm.model.cuda import LEAST_ON_DEVICE
from parallm.model.kept_arrays import kept_array


class RowNumbers:
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
                self._growth, self._growth_B = growth, kept_array(tuple(_filled(growth)), mx.int32)
            self._lengths_B = self._lengths_B + self._growth_B
        else:
            self._slots, self._growth = list(slots), []
            both = mx.array([*_filled(slots), *_filled(lengths)], mx.int32)
            self._slots_B, self._lengths_B = both[: both.size // 2], both[both.size // 2 :]
        self._lengths = list(lengths)
        if len(slots) >= LEAST_ON_DEVICE:
            return self._slots_B, self._lengths_B
        return self._slots_B[: len(slots)], self._lengths_B[: len(slots)]


def _filled(numbers: Sequence[int]) -> list[int]:
    """Longer than `numbers` where these are few, as every layer reads them."""
    return [*numbers, *[0] * (LEAST_ON_DEVICE - len(numbers))]
