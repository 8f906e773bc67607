"""What a model's keys, values and states take in memory, measured on the model itself."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from parallm.model.shared_model import SharedModel

BLOCK = 16
"""Positions that are accounted, and cached for other prompts, together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCost:
    """Bytes of one row in a cache of its own."""

    layers: tuple[tuple[int, int | None], ...]
    """(bytes of a position, most positions that are kept or None: all), of all layers that keep as many together."""
    per_row: int
    """Whatever does not grow: recurrent states."""

    @property
    def per_token(self) -> int:
        return sum(size for size, _ in self.layers)

    def of(self, num_positions: int) -> int:
        """Of a row with this many positions, in whole blocks."""
        whole = blocks(num_positions) * BLOCK
        return self.per_row + sum(size * min(whole, most or whole) for size, most in self.layers)


def blocks(num_positions: int) -> int:
    return -(-num_positions // BLOCK)


def measure_cost(model: SharedModel) -> KvCost:
    """From the shapes that one token leaves in the model's own caches; evaluates nothing.

    So layers that share their keys and values count once, and quantized ones with their scales.
    """
    cache = one_token(model)
    layers: Counter[int | None] = Counter()
    per_row = 0
    for one in _each(cache):
        keys = _arrays(getattr(one, "keys", None))
        if keys:
            # what mlx-lm allocates ahead is no cost of a position
            total = sum(array.nbytes for array in keys + _arrays(one.values))
            layers[getattr(one, "max_size", None)] += total // keys[0].shape[2]
        else:
            per_row += sum(array.nbytes for array in _arrays(one.state))
    return KvCost(layers=tuple((size, most) for most, size in layers.items()), per_row=per_row)


def one_token(model: SharedModel) -> list[Any]:
    """The model's own caches after one token; not evaluated."""
    cache = model.make_cache()
    model.hidden(mx.zeros((1, 1), mx.int32), cache, None)
    return cache


def _each(caches: Iterable[Any]) -> Iterable[Any]:
    """The caches of all layers, those in mlx-lm's lists of caches one by one."""
    for one in caches:
        if hasattr(one, "caches"):
            yield from _each(one.caches)
        else:
            yield one


def _arrays(part: object) -> list[mx.array]:
    if isinstance(part, mx.array):
        return [part]
    return [array for one in part for array in _arrays(one)] if isinstance(part, list | tuple) else []
