"""Samples one token of each row of logits, and gives its log-probability: one kernel in place of some twenty.

A block takes a row. It finds the largest logit, sums the weights exp(logit - largest) of spans of 256 tokens, and draws
first a span, then a token of it, by inverting the cumulative sum. Cumulative sums are integers, in units of 2**-40 of
the largest weight, so that they never shrink. `logprobs.softmax_of` has the definition of the log-probability.

Axes: B rows, V vocabulary.
"""

from collections.abc import Sequence

import mlx.core as mx

from parallm.model.kernels.cuda import VECTOR_BYTES, kernel
from parallm.model.kernels.host_memory import HostResult

VALUES_OF_LANE, SPAN = 8, 256
MAX_WARPS = 32


def draw_tokens(
    logits_BV: mx.array, temperatures_B: mx.array, uniforms_B2: mx.array | None
) -> tuple[mx.array, HostResult]:
    """A token of each row (B,), and tokens and the bits of their log-probabilities, (2, B), both int32.

    `uniforms_B2` are multiples of 2**-24 in [0, 1). A row of temperature 0 takes its first most likely token, as every
    row does without them. A row with NaN has the log-probability NaN. Raises MemoryError.
    """
    has_draws = uniforms_B2 is not None
    return _launch(logits_BV, [temperatures_B, *([] if uniforms_B2 is None else [uniforms_B2])], has_draws=has_draws)


def score_tokens(logits_BV: mx.array, temperatures_B: mx.array, tokens_B: mx.array) -> tuple[mx.array, HostResult]:
    """`draw_tokens` for known tokens, (B,) int32. Raises MemoryError."""
    return _launch(logits_BV, [temperatures_B, tokens_B], is_given=True)


def _launch(
    logits_BV: mx.array, arrays: Sequence[mx.array], *, has_draws: bool = False, is_given: bool = False
) -> tuple[mx.array, HostResult]:
    rows, vocabulary = logits_BV.shape
    threads = 32 * min(MAX_WARPS, -(-vocabulary // SPAN))
    defines = (
        ("T", logits_BV.dtype),
        ("V", vocabulary),
        ("VECTOR", 1 if vocabulary % VALUES_OF_LANE else min(VALUES_OF_LANE, VECTOR_BYTES // logits_BV.dtype.size)),
        ("THREADS", threads),
        ("DRAWS", has_draws),
        ("GIVEN", is_given),
    )
    output_2B = HostResult((2, rows))
    (tokens_B,) = kernel("token_draw", defines)(
        [logits_BV, *arrays],
        [rows, *output_2B.halves()],
        grid=(rows * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[(rows,)],
        output_dtypes=[mx.int32],
    )
    return tokens_B, output_2B
