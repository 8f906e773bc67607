"""Lengths and slots of a step's rows as arrays, from those of the step before where the rows stay.

What the host has written a GPU fetches page by page when a kernel first reads it: a quarter of a millisecond, as Nsight
Compute has it (one H200, 2026-11-21), as long as several layers of a small model. Rows mostly stay and grow by a
position, which the device can count by itself.

Axes: B rows.
"""

from collections.abc import Sequence

import mlx.core as mx

from parallm.model.cuda import LEAST_ON_DEVICE


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
                self._growth, self._growth_B = growth, _array(growth)
            self._lengths_B = self._lengths_B + self._growth_B
        else:
            self._slots, self._growth = list(slots), []
            self._slots_B, self._lengths_B = _array(self._slots), _array(lengths)
        self._lengths = list(lengths)
        if len(slots) >= LEAST_ON_DEVICE:
            return self._slots_B, self._lengths_B
        return self._slots_B[: len(slots)], self._lengths_B[: len(slots)]


def _array(numbers: Sequence[int]) -> mx.array:
    """int32; longer than `numbers` where these are few, as every layer reads them."""
    return mx.array([*numbers, *[0] * (LEAST_ON_DEVICE - len(numbers))], mx.int32)
