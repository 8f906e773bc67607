"""What an array was made of, for kernels that make it themselves on the way.

mlx-lm's models call one operation after the other. Where a later one is ours and has a kernel for both, it asks here
for what the array in its hands was made of, and starts from there. MLX is lazy: the array itself is never computed.
For the device thread, or one that builds for it while it waits.
"""

import weakref
from collections.abc import Callable
from typing import Any

import mlx.core as mx

_origins: dict[int, tuple[weakref.ref[mx.array], object]] = {}


def set_origin(array: mx.array, origin: object) -> None:
    """Keep `origin` for as long as `array` is in somebody's hands."""
    key = id(array)
    _origins[key] = (weakref.ref(array, lambda _: _origins.pop(key, None)), origin)


def origin_of(array: mx.array) -> object | None:
    found = _origins.get(id(array))
    return found[1] if found is not None and found[0]() is array else None


class FusedAdd(mx.array):
    """What `value` is, until another array of its shape and type is added to it."""

    def __init__(self, value: mx.array, added_to: Callable[[mx.array], mx.array]) -> None:
        super().__init__(value)
        self._added_to = added_to

    def __radd__(self, other: Any) -> mx.array:
        if isinstance(other, mx.array) and other.shape == self.shape and other.dtype == self.dtype:
            return self._added_to(other)
        return super().__radd__(other)

    def __add__(self, other: Any) -> mx.array:
        return self.__radd__(other)
