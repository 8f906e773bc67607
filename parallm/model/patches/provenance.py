"""Origins of arrays, for kernels that start from there.

mlx-lm's models call one operation after the other. Where a later operation is ours and has a kernel for both, it asks
here for the origin of its input and starts from that. MLX is lazy: the input itself is never computed. For the device
thread, or a thread that builds a graph while it waits.
"""

import weakref
from collections.abc import Callable
from typing import Any

import mlx.core as mx

_origins: dict[int, tuple[weakref.ref[mx.array], object]] = {}


def set_origin(array: mx.array, origin: object) -> None:
    """Keep `origin` as long as `array` exists."""
    key = id(array)
    _origins[key] = (weakref.ref(array, lambda _: _origins.pop(key, None)), origin)


def origin_of(array: mx.array) -> object | None:
    entry = _origins.get(id(array))
    return entry[1] if entry is not None and entry[0]() is array else None


class FusedAdd(mx.array):
    """`value`, until another array of its shape and type is added to it: then `added_to` of that array.

    mlx-lm's layers end with `x + self.mlp(...)`, and one kernel does both: Python asks the operand of the derived class
    first.
    """

    def __init__(self, value: mx.array, added_to: Callable[[mx.array], mx.array]) -> None:
        super().__init__(value)
        self._added_to = added_to

    def __radd__(self, other: Any) -> mx.array:
        if isinstance(other, mx.array) and other.shape == self.shape and other.dtype == self.dtype:
            return self._added_to(other)
        return super().__radd__(other)

    def __add__(self, other: Any) -> mx.array:
        return self.__radd__(other)
