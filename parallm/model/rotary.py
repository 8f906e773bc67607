"""Rotary embeddings (https://arxiv.org/abs/2104.09864) of a decode step, left to the attention kernel.

Two small kernels a layer are a seventh of what a step of few rows hands over. mlx-lm's modules keep their place and
compute as ever; what they rotate for a step is remembered, and `decode_attention` rotates where it reads.

Axes: B rows, X heads, D head size.
"""

import math
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.rope_utils import Llama3RoPE

from parallm.model.cuda import VECTOR_BYTES, on_cuda
from parallm.model.origins import origin_of, remember


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """What `mx.fast.rope` does to heads at given positions."""

    dims: int
    """The first values of a head, which are rotated."""
    traditional: bool
    """Whether neighbours are a pair, and not values that are `dims / 2` apart."""
    scale: float
    """Of positions."""
    base: float | None
    """Frequency i is base ** (-2 i / dims)."""
    wavelengths: mx.array | None
    """In place of `base`: frequency i is 1 over the i-th of them, float32 (dims / 2,)."""

    @property
    def log_base(self) -> float:
        """To the base 2; 0 with wavelengths."""
        return math.log2(self.base) if self.base is not None else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Unrotated:
    """What an array (B, X, 1, D) was rotated from."""

    heads: mx.array
    offset_B: mx.array
    rotation: Rotation


class Rotary(nn.Module):
    """One of mlx-lm's rotary embeddings, whose results of one position are remembered."""

    def __init__(self, inner: nn.RoPE | Llama3RoPE) -> None:
        super().__init__()
        self.inner = inner
        self._rotation = _rotation_of(inner)

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        rotated: mx.array = self.inner(x, offset=offset)
        if isinstance(offset, mx.array) and x.ndim == 4 and x.shape[2] == 1:
            remember(rotated, Unrotated(heads=x, offset_B=offset, rotation=self._rotation))
        return rotated


def install_rotary(model: nn.Module) -> None:
    """With MLX's CUDA build, put `Rotary` around the rotary embeddings of `model` that the kernel knows."""
    if not on_cuda():
        return
    for module in model.modules():
        for name, child in list(module.children().items()):
            if type(child) in (nn.RoPE, Llama3RoPE):
                module[name] = Rotary(child)


def before_rotation(
    queries: mx.array, keys: mx.array, offset_B: mx.array, dtype: mx.Dtype
) -> tuple[mx.array, mx.array, Rotation | None]:
    """What a step's queries and keys were before both were rotated to `offset_B`, and how; as they are if the kernel
    cannot rotate them, in whole vectors of this type."""
    of_queries, of_keys = origin_of(queries), origin_of(keys)
    if (
        isinstance(of_queries, Unrotated)
        and isinstance(of_keys, Unrotated)
        and of_queries.rotation is of_keys.rotation
        and of_queries.offset_B is offset_B
        and of_keys.offset_B is offset_B
        and of_queries.heads.dtype == of_keys.heads.dtype == dtype
        and can_rotate(of_queries.rotation, dtype)
    ):
        return of_queries.heads, of_keys.heads, of_queries.rotation
    return queries, keys, None


def can_rotate(rotation: Rotation, dtype: mx.Dtype) -> bool:
    """Whether the values of a pair lie in one vector, or at the same place of two."""
    size = VECTOR_BYTES // dtype.size
    return rotation.dims % (size if rotation.traditional else 2 * size) == 0


def _rotation_of(inner: nn.RoPE | Llama3RoPE) -> Rotation:
    if isinstance(inner, nn.RoPE):
        return Rotation(
            dims=inner.dims, traditional=inner.traditional, scale=inner.scale, base=inner.base, wavelengths=None
        )
    mx.eval(inner._freqs)  # a compiled step would repeat what makes them
    return Rotation(dims=inner.dims, traditional=inner.traditional, scale=1.0, base=None, wavelengths=inner._freqs)
