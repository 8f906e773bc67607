"""Finds where top-k and top-p end: one block for each row reads it three to six times.

Each pass narrows what the last kept token can be to one of 2,048 bins: by its distance from the largest logit, by three
parts of the logit's bits, and where tokens of one logit are cut apart, by two parts of its id. A bin has the number and
the probability of its tokens, and a running sum over bins gives both before each bin. `engine/sampling/filters.py` says
what is kept.

Axes: R rows, V vocabulary.
"""

import mlx.core as mx

from parallm.model.kernels.cuda import kernel
from parallm.model.logprobs import Softmax

COUNT_BITS = 20  # for numbers of tokens: in one integer with probabilities, so that one sum gives both
PROBABILITY_ONE = 2**42
THREADS = 1024  # of a block that looks for an end; each has two bins
WEIGHT_THREADS = 256  # of a block that writes weights


def ends_by_kernel(softmax: Softmax, top_k_R: mx.array, top_p_R: mx.array) -> tuple[mx.array, mx.array]:
    """The lowest logit that is kept, (R,), and the last id that is kept of it, (R,) int32."""
    rows, vocabulary = softmax.scaled_NV.shape
    inputs = [softmax.scaled_NV, softmax.exponentials_NV, softmax.scaled_NV.max(axis=-1), softmax.sums_N]
    lowest_R, last_R = kernel("filter_ends", (("V", vocabulary),))(
        [*inputs, top_k_R, top_p_R],
        grid=(rows * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=[(rows,)] * 2,
        output_dtypes=[mx.float32, mx.int32],
    )
    return lowest_R, last_R


def weights_by_kernel(softmax: Softmax, lowest_R: mx.array, last_R: mx.array, min_p_R: mx.array) -> mx.array:
    """Weights to draw from, (R, V): zero after the ends that `ends_by_kernel` found, and below min-p."""
    rows, vocabulary = softmax.scaled_NV.shape
    (weights_RV,) = kernel("filter_weights", (("V", vocabulary),))(
        [softmax.scaled_NV, softmax.exponentials_NV, lowest_R, last_R, min_p_R],
        grid=(-(-vocabulary // WEIGHT_THREADS) * WEIGHT_THREADS, rows, 1),
        threadgroup=(WEIGHT_THREADS, 1, 1),
        output_shapes=[(rows, vocabulary)],
        output_dtypes=[mx.float32],
    )
    return weights_RV
