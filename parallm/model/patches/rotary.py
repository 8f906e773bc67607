"""Remembers what mlx-lm's rotary embeddings rotated, so that our attention kernels rotate where they read.

Two small kernels a layer are a seventh of what a decode step of few rows hands over.

Axes: B rows, X heads, D head size.
"""

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.rope_utils import Llama3RoPE

from parallm.model.kernels.cuda import has_kernels
from parallm.model.kernels.rotary import Rotation
from parallm.model.patches.forward import origin_of, set_origin


@dataclass(frozen=True, slots=True, kw_only=True)
class Unrotated:
    """Origin of a rotated array (B, X, 1, D)."""

    heads: mx.array
    offset_B: mx.array
    rotation: Rotation


class Rotary(nn.Module):
    """One of mlx-lm's rotary embeddings; its results of one position have an origin."""

    def __init__(self, inner: nn.RoPE | Llama3RoPE, rotation: Rotation) -> None:
        super().__init__()
        self.inner = inner
        self._rotation = rotation

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        rotated: mx.array = self.inner(x, offset=offset)
        if isinstance(offset, mx.array) and x.ndim == 4 and x.shape[2] == 1:
            set_origin(rotated, Unrotated(heads=x, offset_B=offset, rotation=self._rotation))
        return rotated


def install_rotary(model: nn.Module) -> None:
    """Put `Rotary` around the rotary embeddings of `model` that the kernels know, with MLX's CUDA build."""
    if not has_kernels():
        return
    rotations: list[Rotation] = []
    for module in model.modules():
        for name, child in list(module.children().items()):
            if type(child) in (nn.RoPE, Llama3RoPE):
                rotation = rotation_of(child)
                shared = next((other for other in rotations if other.is_same(rotation)), None)
                if shared is None:
                    rotations.append(rotation)
                module[name] = Rotary(child, shared or rotation)


def before_rotation(
    queries: mx.array, keys: mx.array, offset_B: mx.array, dtype: mx.Dtype
) -> tuple[mx.array, mx.array, Rotation | None]:
    """A step's queries and keys before both were rotated to `offset_B`, and their rotation; as they are, and None, if
    the kernel cannot rotate them in whole vectors of this type."""
    of_queries, of_keys = origin_of(queries), origin_of(keys)
    if (
        isinstance(of_queries, Unrotated)
        and isinstance(of_keys, Unrotated)
        and of_queries.rotation is of_keys.rotation
        and of_queries.offset_B is offset_B
        and of_keys.offset_B is offset_B
        and of_queries.heads.dtype == of_keys.heads.dtype == dtype
        and of_queries.rotation.fits(dtype)
    ):
        return of_queries.heads, of_keys.heads, of_queries.rotation
    return queries, keys, None


def rotation_of(inner: nn.RoPE | Llama3RoPE) -> Rotation:
    """The rotation that a module of mlx-lm does."""
    if isinstance(inner, nn.RoPE):
        return Rotation(
            dims=inner.dims, traditional=inner.traditional, scale=inner.scale, base=inner.base, wavelengths=None
        )
    mx.eval(inner._freqs)  # a compiled step would repeat what makes them
    return Rotation(dims=inner.dims, traditional=inner.traditional, scale=1.0, base=None, wavelengths=inner._freqs)
