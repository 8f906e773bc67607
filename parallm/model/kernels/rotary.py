"""Rotary embeddings (https://arxiv.org/abs/2104.09864) as CUDA kernels: angles, and the rotation of a pass's tokens.

MLX's kernel takes tokens that stand each at a position of its own for rows of one token, and computes a cosine and a
sine for every few numbers that it moves. Here angles are computed once for all layers, of a decode step and of a
training pass. Rotation of 4,096 tokens of 32 and 8 heads of 128 in bfloat16 takes an H200 24 us in place of 59, forward
as backward. `patches/rotary.py` finds out what to rotate; a decode step rotates in `decode_attention.py`.

Axes: B rows, M tokens, X heads, D head size, P pairs of values of a head.
"""

import math
from dataclasses import dataclass

import mlx.core as mx

from parallm.model.kernels.cuda import VECTOR_BYTES, interned_array, kernel

ANGLE_THREADS, THREADS = 128, 256  # of a block


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rotation:
    """A rotation that `mx.fast.rope` does to heads. Modules that do the same share one."""

    dims: int
    """The first values of a head, which are rotated."""
    traditional: bool
    """Whether neighbours are a pair, and not values that are `dims / 2` apart."""
    scale: float
    """Factor of positions."""
    base: float | None
    """Frequency i is base ** (-2 i / dims)."""
    wavelengths: mx.array | None
    """In place of `base`: frequency i is 1 over the i-th wavelength, float32 (P,)."""

    def angles(self, offsets_B: mx.array) -> mx.array:
        """Cosine and sine for each pair of values at these positions, float32 (B, P, 2). CUDA only."""
        pairs = self.dims // 2
        log_base = 0.0 if self.base is None else math.log2(self.base)
        numbers = interned_array((self.scale, log_base), mx.float32)
        wavelengths = numbers if self.wavelengths is None else self.wavelengths  # not read where there is a base
        count = offsets_B.shape[0] * pairs
        return kernel("rotary_angles", (("PAIRS", pairs), ("BY_BASE", self.base is not None)))(
            [offsets_B.astype(mx.int32), wavelengths, numbers],
            [offsets_B.shape[0]],
            grid=(-(-count // ANGLE_THREADS) * ANGLE_THREADS, 1, 1),
            threadgroup=(ANGLE_THREADS, 1, 1),
            output_shapes=[(offsets_B.shape[0], pairs, 2)],
            output_dtypes=[mx.float32],
        )[0]

    def fits(self, dtype: mx.Dtype) -> bool:
        """Whether the values of a pair lie in one vector, or at the same index of two."""
        size = VECTOR_BYTES // dtype.size
        return self.dims % (size if self.traditional else 2 * size) == 0

    def is_same(self, other: "Rotation") -> bool:
        mine, others = ((r.dims, r.traditional, r.scale, r.base) for r in (self, other))
        if mine != others or self.wavelengths is None or other.wavelengths is None:
            return mine == others and self.wavelengths is other.wavelengths
        return mx.array_equal(self.wavelengths, other.wavelengths).item() is True


def rotated(heads_MXD: mx.array, angles_MP2: mx.array, rotation: Rotation) -> mx.array:
    """Heads rotated by the angles of their tokens (`Rotation.angles`), differentiable by `heads_MXD`. CUDA only, for a
    rotation that `fits`."""

    @mx.custom_function  # type: ignore[untyped-decorator]
    def rotate(heads: mx.array) -> mx.array:
        return _rotate(heads, angles_MP2, rotation, back=False)

    @rotate.vjp  # type: ignore[untyped-decorator]
    def rotate_back(_: mx.array, cotangent: mx.array, __: mx.array) -> mx.array:
        return _rotate(cotangent, angles_MP2, rotation, back=True)

    result: mx.array = rotate(heads_MXD)
    return result


def _rotate(heads: mx.array, angles: mx.array, rotation: Rotation, *, back: bool) -> mx.array:
    size = VECTOR_BYTES // heads.dtype.size
    units = heads.shape[2] // size - (0 if rotation.traditional else rotation.dims // size // 2)
    threads = heads.shape[0] * heads.shape[1] * units
    defines = (
        ("T", heads.dtype),
        ("D", heads.shape[2]),
        ("DIMS", rotation.dims),
        ("PAIRED", rotation.traditional),
        ("BACK", back),
    )
    return kernel("rotate", defines)(
        [heads, angles],
        heads.shape[:2],
        grid=(-(-threads // THREADS) * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[heads.shape],
        output_dtypes=[heads.dtype],
    )[0]
