"""RMSNorm of queries or keys, head by head (https://arxiv.org/abs/2010.04245), as a CUDA kernel for decode steps.

Heads are columns of one product, which MLX would copy before its own kernel reads them.

Axes: B rows, X heads, D head size.
"""

import mlx.core as mx

from parallm.model.kernels.columns import place_of, shaped
from parallm.model.kernels.cuda import VECTOR_BYTES, has_kernels, kernel

DTYPES = (mx.bfloat16, mx.float16)
THREADS = 128  # of a block, 32 of which have a head


def fits(heads_B1XD: mx.array, weight_D: mx.array) -> bool:
    """Whether `head_norm` can compute these, of one token a row, on this device."""
    if not has_kernels() or heads_B1XD.ndim != 4 or heads_B1XD.shape[1] != 1:
        return False
    size, dtype, place = heads_B1XD.shape[3], heads_B1XD.dtype, place_of(heads_B1XD)
    values = VECTOR_BYTES // dtype.size
    is_aligned = not any(number % values for number in (size, place.start, place.pitch))
    return dtype in DTYPES and weight_D.dtype == dtype and is_aligned and size <= 32 * values


def head_norm(heads_B1XD: mx.array, weight_D: mx.array, eps: float) -> mx.array:
    """The RMSNorm of each head, (B, 1, X, D) in the type of the heads."""
    rows, _, heads, size = heads_B1XD.shape
    place = place_of(heads_B1XD)
    (normed_BW,) = kernel("head_norm", (("T", heads_B1XD.dtype), ("SIZE", size)))(
        [place.whole, weight_D],
        [float(eps), rows, heads, place.start, place.pitch],
        grid=(-(-32 * rows * heads // THREADS) * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(rows, heads * size)],
        output_dtypes=[heads_B1XD.dtype],
    )
    return shaped(normed_BW, heads_B1XD.shape)
