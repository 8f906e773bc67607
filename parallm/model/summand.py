"""An array that is about to be added to another one, where one kernel does both.

mlx-lm's layers end with `x + self.mlp(...)`. The sum is left to whoever made the second: Python asks the operand of the
derived class first. MLX is lazy: if the array itself is not read, it is never computed.
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx


class Summand(mx.array):
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
