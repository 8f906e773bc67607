"""`all_sum` of a sublayer's output, the residual add and the RMSNorm after it as one CUDA kernel, for decode steps.

A product of few rows comes in parts. By themselves the sum of parts, the sum over ranks, and the add with its norm are
three kernels, of which each waits for the one before: here there is one, 160 times a step of 80 layers. Each rank's
output is rounded, as what it sends has half the bytes then; the sum and the stream stay float32.

Axes: B rows, T tokens, H hidden, S parts of a sum.
"""

import mlx.core as mx

from parallm.model.kernels import add_norm, all_sum
from parallm.model.kernels.all_sum import WARP, PeerMemory
from parallm.model.kernels.columns import shaped
from parallm.model.kernels.cuda import VECTOR_BYTES, kernel

MAX_THREADS = 1024  # of a block, which has a row


def fits(parts_SBTH: mx.array, output_BTH: mx.array) -> bool:
    """Whether `sum_add_norm` can compute these, the parts of an output of one token a row, on this device."""
    vectors = output_BTH.shape[-1] * output_BTH.dtype.size // VECTOR_BYTES  # of a row
    return (
        add_norm.fits(parts_SBTH, output_BTH)
        and all_sum.fits(output_BTH)
        and vectors % WARP == 0
        and vectors <= MAX_THREADS
    )


def sum_add_norm(
    parts_SBTH: mx.array, stream_BTH: mx.array, weight_H: mx.array, eps: float, *, peers: PeerMemory
) -> tuple[mx.array, mx.array]:
    """The sum of all parts of all ranks and the stream, (B, T, H) in float32, and its RMSNorm, (B, T, H) in the
    weight's type: the same bits at each rank. All ranks call it in the same order, and each call depends on the sum
    before."""
    splits, *rows, size = parts_SBTH.shape
    threads = size * weight_H.dtype.size // VECTOR_BYTES
    defines = (
        ("T", weight_H.dtype),
        ("Y", parts_SBTH.dtype),
        ("X", stream_BTH.dtype),
        ("SPLITS", splits),
        ("SIZE", size),
        ("THREADS", threads),
        *all_sum.defines_of(peers),
    )
    num_rows = rows[0] * rows[1]
    sums_BTH, normed_BH = kernel("sum_add_norm", defines)(
        [parts_SBTH, stream_BTH, weight_H, peers.addresses],
        [float(eps), num_rows],
        grid=(num_rows * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[stream_BTH.shape, (num_rows, size)],
        output_dtypes=[mx.float32, weight_H.dtype],
    )
    return sums_BTH, shaped(normed_BH, stream_BTH.shape)
