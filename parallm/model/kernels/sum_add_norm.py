"""`all_sum` of a sublayer's output, the residual add and the RMSNorm after it as one CUDA kernel, for decode steps.

A product of few rows comes in parts. By themselves the sum of parts, the sum over ranks, and the add with its norm are
three kernels, of which each waits for the one before: here there is one, 160 times a step of 80 layers. Each rank's
output is rounded, as what it sends has half the bytes then; what follows is rounded once.

Axes: B rows, T tokens, H hidden, S parts of a sum.
"""

import mlx.core as mx

from parallm.model.kernels import add_norm, all_sum
from parallm.model.kernels.all_sum import WARP, PeerMemory
from parallm.model.kernels.cuda import VECTOR_BYTES, kernel

MAX_THREADS = 1024  # of a block, which has a row


def fits(parts_SBTH: mx.array, stream_BTH: mx.array) -> bool:
    """Whether `sum_add_norm` can compute these, of one token a row, on this device."""
    vectors = _vectors(stream_BTH)
    return (
        add_norm.fits(parts_SBTH, stream_BTH)
        and all_sum.fits(stream_BTH)
        and vectors % WARP == 0
        and vectors <= MAX_THREADS
    )


def sum_add_norm(
    parts_SBTH: mx.array, stream_BTH: mx.array, weight_H: mx.array, eps: float, *, peers: PeerMemory
) -> tuple[mx.array, mx.array]:
    """The sum of all parts of all ranks and the stream, and its RMSNorm, both (B, T, H) in the stream's type: the same
    bits at each rank. All ranks call it in the same order, and each call depends on the sum before."""
    splits, *rows, size = parts_SBTH.shape
    threads = _vectors(stream_BTH)
    defines = (
        ("T", stream_BTH.dtype),
        ("Y", parts_SBTH.dtype),
        ("SPLITS", splits),
        ("SIZE", size),
        ("THREADS", threads),
        *all_sum.defines_of(peers),
    )
    num_rows = rows[0] * rows[1]
    sums_BTH, normed_BTH = kernel("sum_add_norm", defines)(
        [parts_SBTH, stream_BTH, weight_H, peers.addresses],
        [float(eps), num_rows],
        grid=(num_rows * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[stream_BTH.shape] * 2,
        output_dtypes=[stream_BTH.dtype] * 2,
    )
    return sums_BTH, normed_BTH


def _vectors(stream_BTH: mx.array) -> int:
    """Vectors of a row."""
    return stream_BTH.shape[-1] * stream_BTH.dtype.size // VECTOR_BYTES
