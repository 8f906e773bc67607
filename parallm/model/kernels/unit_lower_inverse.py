"""The inverse of unit lower triangular matrices as one CUDA kernel, which the chunks of the gated delta rule need.

By MLX's operations it is products of blocks on the diagonal, 24 launches for 64 tokens, each of which reads and writes
the whole matrices.

Axes: C tokens of a chunk.
"""

import math

import mlx.core as mx

from parallm.model.kernels.cuda import kernel
from parallm.model.kernels.recurrent import has_kernels

SIZES = (16, 32, 64)
THREADS = 128  # of a block


def fits(products: mx.array) -> bool:
    """Whether `unit_lower_inverse` can compute these on this device."""
    return has_kernels() and products.dtype == mx.float32 and products.shape[-1] in SIZES


def unit_lower_inverse(products: mx.array) -> mx.array:
    """(I + L)^-1 (.., C, C), with L the part below the diagonal of float32 `products` (.., C, C). No gradient."""
    size, matrices = products.shape[-1], math.prod(products.shape[:-2])
    of_block = THREADS // size
    return kernel("unit_lower_inverse", (("SIZE", size), ("MATRICES", of_block)))(
        [products],
        [matrices],
        grid=(-(-matrices // of_block) * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[products.shape],
        output_dtypes=[mx.float32],
    )[0]
