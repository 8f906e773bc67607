"""What a model's keys, values and states take in memory, measured on the model itself."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from parallm.errors import ConfigError
from parallm.model.kernels.cuda import on_cuda
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


GROUP = 64
"""Numbers that share a step and a least number, where it divides the head size; else all of a head."""
MOST = 255
PARTS = 3


@dataclass(frozen=True, slots=True)
class KvFormat:
    bits: int | None = None
    """8, or None: as the model computes them."""

    def pack(self, keys: mx.array, values: mx.array) -> list[mx.array]:
        """What is kept of them, in arrays whose other axes are theirs."""
        return [keys, values] if self.bits is None else [*_packed(keys), *_packed(values)]

    def unpack(self, parts: Sequence[mx.array]) -> tuple[mx.array, mx.array]:
        """Keys and values, of the type that they had."""
        if self.bits is None:
            keys, values = parts
            return keys, values
        return _unpacked(*parts[:PARTS]), _unpacked(*parts[PARTS:])


def format_for(model: SharedModel, bits: int | None) -> KvFormat:
    """Raises ConfigError where keys and values of this model cannot be kept so on this device."""
    if bits is not None and on_cuda():
        raise ConfigError(
            f"engine.kv_bits is {bits}, and with MLX's CUDA build decode attention reads keys and values as the model "
            "computes them; set it to null"
        )
    if bits is not None and not model.is_batch_invariant:
        raise ConfigError(
            f"engine.kv_bits is {bits}, and {model.name} runs row by row over mlx-lm's own caches; set it to null"
        )
    return KvFormat(bits)


def bytes_of_position(model: SharedModel, kv_format: KvFormat) -> int:
    """Of all layers, in a slot. Evaluates nothing."""
    pairs = [[array[:, :, :1] for array in layer.keys_and_values()] for layer in one_token(model)]
    return sum(part.nbytes for pair in pairs for part in kv_format.pack(*pair))


def _packed(array: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """Numbers from 0 to MOST (..., D), and of each group the step and the least number (..., G)."""
    size = array.shape[-1]
    groups = mx.unflatten(array, -1, (-1, GROUP if size % GROUP == 0 else size))
    least = groups.min(axis=-1, keepdims=True)
    step = (groups.max(axis=-1, keepdims=True) - least) / MOST
    counts = mx.round((groups - least) / mx.where(step == 0, 1, step))
    return counts.astype(mx.uint8).reshape(array.shape), step[..., 0], least[..., 0]


def _unpacked(counts: mx.array, step: mx.array, least: mx.array) -> mx.array:
    groups = mx.unflatten(counts, -1, (step.shape[-1], -1)).astype(step.dtype)
    return (groups * step[..., None] + least[..., None]).reshape(counts.shape)
