"""Arrays that kernels read where they are: parts and other shapes of what a product or a kernel wrote.

MLX makes a view by an operation of its own, and a step of a small model waits for the host that walks them: a layer of
mlx-lm's code has up to fourteen. A kernel needs an address and where rows begin.

Axes: B rows, T tokens, X heads, W columns, D head size, M tokens of all rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx


class Columns(mx.array):
    """All of `whole` in another shape, or for one token of each row some columns of it, from `start` on; also when they
    have been cut into heads, (B, X, 1, D), or joined again.

    A decode step's queries, keys and values are parts of one product. MLX does not tell strides before it computes, so
    a kernel reads `whole`, and the columns themselves are never made. A change in place would not reach `whole`, so
    operators make a new array.
    """

    def __init__(self, value: mx.array, whole: mx.array, start: int) -> None:
        super().__init__(value)
        self.whole, self.start = whole, start

    def reshape(self, *shape: Any, **options: Any) -> mx.array:
        reshaped = super().reshape(*shape, **options)
        return self._same(reshaped) if reshaped.shape[:1] == self.shape[:1] else reshaped

    def transpose(self, *axes: Any, **options: Any) -> mx.array:
        transposed = super().transpose(*axes, **options)
        return self._same(transposed) if axes == (0, 2, 1, 3) and 1 in self.shape[1:3] else transposed

    def __iadd__(self, other: Any) -> mx.array:
        return self + other

    def __isub__(self, other: Any) -> mx.array:
        return self - other

    def __imul__(self, other: Any) -> mx.array:
        return self * other

    def __itruediv__(self, other: Any) -> mx.array:
        return self / other

    def __setitem__(self, *_: Any) -> None:
        raise TypeError("what a product or a kernel wrote is not changed in place; copy it first")

    def _same(self, value: mx.array) -> "Columns":
        return Columns(value, self.whole, self.start)


@dataclass(frozen=True, slots=True)
class Place:
    """Place of rows of values, such as heads (B, X, 1, D), in `whole`: values before the first row, and from row to
    row."""

    whole: mx.array
    start: int
    pitch: int


def columns_of(whole_B1W: mx.array, widths: Sequence[int]) -> list[Columns]:
    """Parts of these widths beside each other."""
    starts, memory = [sum(widths[:index]) for index in range(len(widths))], memory_of(whole_B1W)
    parts = mx.split(whole_B1W, starts[1:], axis=-1)
    return [Columns(part, memory, start) for part, start in zip(parts, starts, strict=True)]


def shaped(whole: mx.array, shape: Sequence[int]) -> Columns:
    """All of `whole` in another shape."""
    return Columns(whole.reshape(shape), whole, 0)


def memory_of(array: mx.array) -> mx.array:
    """The same numbers in the same order: `array`, or what it is all of."""
    return array.whole if isinstance(array, Columns) and array.size == array.whole.size else array


def flat_rows(x_BTW: mx.array) -> mx.array:
    """The same as (M, W)."""
    memory = memory_of(x_BTW)
    return memory if memory.ndim == 2 and memory.shape[1] == x_BTW.shape[-1] else x_BTW.flatten(0, -2)


def place_of(rows_BX: mx.array) -> Place:
    if isinstance(rows_BX, Columns):
        return Place(rows_BX.whole, rows_BX.start, rows_BX.whole.size // rows_BX.shape[0])
    return Place(rows_BX, 0, rows_BX.size // rows_BX.shape[0])
