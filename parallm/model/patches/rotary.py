"""Rotary embeddings (https://arxiv.org/abs/2104.09864) of a decode step, left to the attention kernel.

Two small kernels a layer are a seventh of what a step of few rows hands over. mlx-lm's modules keep their place and
compute as ever; what they rotate for a step is remembered, and `decode_attention` rotates where it reads. Angles are
computed once a step for all layers.

Axes: B rows, X heads, D head size, P pairs of values of a head.
"""

import math
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.rope_utils import Llama3RoPE

from parallm.model.kernels.cuda import VECTOR_BYTES, kernel, on_cuda
from parallm.model.patches.provenance import origin_of, set_origin

THREADS = 128  # of a block
_ANGLES = """
  const int index = blockIdx.x * blockDim.x + threadIdx.x, pair = index % PAIRS;
  if (index >= PAIRS * offsets_shape[0]) return;
  // As MLX's own kernel computes them
  float part = static_cast<float>(pair) / static_cast<float>(PAIRS);
  float frequency = BY_BASE ? exp2f(-part * numbers[1]) : static_cast<float>(1.0 / wavelengths[pair]);
  float angle = numbers[0] * static_cast<float>(offsets[index / PAIRS]) * frequency;
  angles[2 * index] = cosf(angle);
  angles[2 * index + 1] = sinf(angle);
"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rotation:
    """What `mx.fast.rope` does to heads at given positions. Modules that do the same share one."""

    dims: int
    """The first values of a head, which are rotated."""
    traditional: bool
    """Whether neighbours are a pair, and not values that are `dims / 2` apart."""
    scale: float
    """Of positions."""
    base: float | None
    """Frequency i is base ** (-2 i / dims)."""
    wavelengths: mx.array | None
    """In place of `base`: frequency i is 1 over the i-th of them, float32 (P,)."""

    def angles(self, offsets_B: mx.array) -> mx.array:
        """Cosine and sine for each pair of values at these positions, float32 (B, P, 2). CUDA only."""
        pairs = self.dims // 2
        log_base = 0.0 if self.base is None else math.log2(self.base)
        numbers = mx.array([self.scale, log_base], mx.float32)
        wavelengths = numbers if self.wavelengths is None else self.wavelengths  # which nobody reads
        count = offsets_B.shape[0] * pairs
        return kernel("rotary_angles", ("offsets", "wavelengths", "numbers"), ("angles",), _ANGLES)(
            inputs=[offsets_B, wavelengths, numbers],
            template=[("PAIRS", pairs), ("BY_BASE", self.base is not None)],
            grid=(-(-count // THREADS) * THREADS, 1, 1),
            threadgroup=(THREADS, 1, 1),
            output_shapes=[(offsets_B.shape[0], pairs, 2)],
            output_dtypes=[mx.float32],
        )[0]

    def fits(self, dtype: mx.Dtype) -> bool:
        """Whether the values of a pair lie in one vector, or at the same place of two."""
        size = VECTOR_BYTES // dtype.size
        return self.dims % (size if self.traditional else 2 * size) == 0

    def does(self, other: "Rotation") -> bool:
        """Whether the other one does the same."""
        numbers = [(one.dims, one.traditional, one.scale, one.base) for one in (self, other)]
        if numbers[0] != numbers[1] or self.wavelengths is None or other.wavelengths is None:
            return numbers[0] == numbers[1] and self.wavelengths is other.wavelengths
        return mx.array_equal(self.wavelengths, other.wavelengths).item() is True


@dataclass(frozen=True, slots=True, kw_only=True)
class Unrotated:
    """What an array (B, X, 1, D) was rotated from."""

    heads: mx.array
    offset_B: mx.array
    rotation: Rotation


class Rotary(nn.Module):
    """One of mlx-lm's rotary embeddings, whose results of one position are remembered."""

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
    """With MLX's CUDA build, put `Rotary` around the rotary embeddings of `model` that the kernel knows."""
    if not on_cuda():
        return
    known: list[Rotation] = []
    for module in model.modules():
        for name, child in list(module.children().items()):
            if type(child) in (nn.RoPE, Llama3RoPE):
                module[name] = Rotary(child, _shared(rotation_of(child), known))


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
        and of_queries.rotation.fits(dtype)
    ):
        return of_queries.heads, of_keys.heads, of_queries.rotation
    return queries, keys, None


def rotation_of(inner: nn.RoPE | Llama3RoPE) -> Rotation:
    if isinstance(inner, nn.RoPE):
        return Rotation(
            dims=inner.dims, traditional=inner.traditional, scale=inner.scale, base=inner.base, wavelengths=None
        )
    mx.eval(inner._freqs)  # a compiled step would repeat what makes them
    return Rotation(dims=inner.dims, traditional=inner.traditional, scale=1.0, base=None, wavelengths=inner._freqs)


def _shared(rotation: Rotation, known: list[Rotation]) -> Rotation:
    """The one among `known` that does the same, or `rotation`, which is among them from now on."""
    found = next((one for one in known if one.does(rotation)), None)
    if found is None:
        known.append(rotation)
    return found or rotation
