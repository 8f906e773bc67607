"""Memory of a model's keys, values and states, measured on the model itself."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from parallm.model.shared_model import SharedModel

BLOCK = 16
"""Positions that are accounted, and kept in the prefix cache, together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCost:
    """Bytes of one sequence in a cache of its own."""

    layers: tuple[tuple[int, int | None], ...]
    """(bytes of a position, positions kept at most or None: all), summed over the layers that keep the same number."""
    per_sequence: int
    """Bytes that do not grow: recurrent states."""

    @property
    def per_token(self) -> int:
        return sum(size for size, _ in self.layers)

    def of(self, num_positions: int) -> int:
        """Bytes of a sequence with this many positions, in whole blocks."""
        whole = blocks(num_positions) * BLOCK
        return self.per_sequence + sum(size * min(whole, kept or whole) for size, kept in self.layers)


def blocks(num_positions: int) -> int:
    return -(-num_positions // BLOCK)


def measure_cost(model: SharedModel) -> KvCost:
    """Measure the shapes that one token leaves in the model's own caches; evaluates nothing.

    So layers that share their keys and values count once.
    """
    caches = model.make_cache()
    model.hidden(mx.zeros((1, 1), mx.int32), caches, None)
    layers: Counter[int | None] = Counter()
    per_sequence = 0
    for cache in _flattened(caches):
        keys = _arrays(getattr(cache, "keys", None))
        if keys:
            # mlx-lm allocates ahead, which is no cost of a position
            total = sum(array.nbytes for array in keys + _arrays(cache.values))
            layers[getattr(cache, "max_size", None)] += total // keys[0].shape[2]
        else:
            per_sequence += sum(array.nbytes for array in _arrays(cache.state))
    return KvCost(layers=tuple((size, kept) for kept, size in layers.items()), per_sequence=per_sequence)


def _flattened(caches: Iterable[Any]) -> Iterable[Any]:
    """The caches of all layers, and each of those in mlx-lm's lists of caches."""
    for cache in caches:
        if hasattr(cache, "caches"):
            yield from _flattened(cache.caches)
        else:
            yield cache


def _arrays(part: object) -> list[mx.array]:
    if isinstance(part, mx.array):
        return [part]
    return [array for item in part for array in _arrays(item)] if isinstance(part, list | tuple) else []
