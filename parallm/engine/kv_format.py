"""How keys and values lie in the slots: as the model computes them, or with 8 bits a number.

With 8 bits each position's numbers are rounded in groups that share a step and a least number, when they are written;
what a decode step reads is unpacked again. So the rows sample from another policy than the learner's: one that reads
rounded keys and values of all positions.

Axes: any, D head size last, G groups of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from parallm.engine.kv_cost import one_token
from parallm.errors import ConfigError
from parallm.model.cuda import on_cuda
from parallm.model.shared_model import SharedModel

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
    if bits is not None and not model.batches_exactly:
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
