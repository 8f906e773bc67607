"""Top-k, top-p and min-p, without sorting the vocabulary.

Tokens are ordered by logit, the largest first, and equal logits by id. A row keeps a token if fewer than `top_k` tokens
and less than `top_p` of the probability come before it, and if its probability is at least `min_p` times the largest.
Each filter looks at the whole distribution; the sampler draws from the kept tokens in proportion to their
probabilities.

The first two keep a prefix of that order, which is known by the logit where it ends and the number of kept tokens with
this logit. With MLX's CUDA build a kernel finds both (`model/kernels/token_filter.py`). Elsewhere a small top-k sorts
that many candidates, and a small vocabulary is sorted; else the 32 bits of the logit are determined one by one, by
counting the tokens above it. Probabilities are added as integers: their sums do not depend on the order, so all ways
give the same tokens.

Axes: R rows that filter, V vocabulary.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from parallm.model.kernels.cuda import has_kernels
from parallm.model.kernels.token_filter import COUNT_BITS, PROBABILITY_ONE, ends_by_kernel, weights_by_kernel
from parallm.model.logprobs import Softmax
from parallm.types import SamplingParams

NO_TOP_K = 2**31 - 1
NO_TOP_P = 2**43  # above the sum of all probabilities
MAX_CANDIDATES = 1024
"""Largest top-k for which candidates are selected before they are sorted."""
MAX_SORTED = 16_384
"""Largest vocabulary that is sorted."""
KEY_BITS = 32
SIGN = 1 << 31
MINUS_INFINITY = 0xFF800000  # its bits, and its rank in the order; NaN comes after it


@dataclass(frozen=True, slots=True, kw_only=True)
class Filters:
    """Limits of rows that are filtered in the same way, (R,) each; an unset limit excludes nothing."""

    rows: Sequence[int] | None
    """Rows of the step; None: all of them."""
    max_top_k: int | None
    """The largest top-k if that is small; 0 with neither top-k nor top-p; else None."""
    top_k_R: mx.array
    """uint64."""
    top_p_R: mx.array
    """uint64, in units of 1 / `PROBABILITY_ONE`."""
    min_p_R: mx.array


def filters_of(params_B: Sequence[SamplingParams]) -> list[Filters]:
    """The filters of a step's rows; a greedy row has none."""
    ways: dict[int, list[int]] = defaultdict(list)
    for row, params in enumerate(params_B):
        cuts = params.top_k > 0 or params.top_p < 1
        if params.temperature > 0 and (cuts or params.min_p > 0):
            is_small = 0 < params.top_k <= MAX_CANDIDATES
            ways[0 if has_kernels() else cuts + is_small].append(row)
    return [limits_of(rows, params_B) for rows in ways.values()]


def limits_of(rows: Sequence[int], params_B: Sequence[SamplingParams]) -> Filters:
    """The limits of these rows, which are filtered together."""
    params_R = [params_B[row] for row in rows]
    tops_R = [params.top_k or NO_TOP_K for params in params_R]
    shares_R = [max(1, int(params.top_p * PROBABILITY_ONE)) if params.top_p < 1 else NO_TOP_P for params in params_R]
    has_cuts = min(tops_R) < NO_TOP_K or min(shares_R) < NO_TOP_P
    max_top_k = max(tops_R) if max(tops_R) <= MAX_CANDIDATES else None
    return Filters(
        rows=rows if len(rows) < len(params_B) else None,
        max_top_k=max_top_k if has_cuts else 0,
        top_k_R=mx.array(np.array(tops_R, np.uint64)),
        top_p_R=mx.array(np.array(shares_R, np.uint64)),
        min_p_R=mx.array([params.min_p for params in params_R], mx.float32),
    )


def filtered(softmax: Softmax, filters: Sequence[Filters]) -> mx.array:
    """Weights (B, V) to draw from: zero for tokens that top-k, top-p or min-p exclude."""
    weights_BV = softmax.exponentials_NV
    for group in filters:
        if group.rows is None:
            return _weights(softmax, group)
        rows_R = mx.array(group.rows)
        weights_BV = weights_BV[...]  # a new name for the written array
        weights_BV[rows_R] = _weights(softmax.of_rows(rows_R), group)
    return weights_BV


def _weights(softmax: Softmax, filters: Filters) -> mx.array:
    """(R, V), for the rows of `filters`."""
    if filters.max_top_k == 0:
        return mx.where(softmax.exponentials_NV >= filters.min_p_R[:, None], softmax.exponentials_NV, 0)
    if has_kernels():
        ends = ends_by_kernel(softmax, filters.top_k_R, filters.top_p_R)
        return weights_by_kernel(softmax, *ends, filters.min_p_R)
    lowest_R, num_equal_R = _ends(softmax, filters)
    is_lowest_RV = softmax.scaled_NV == lowest_R[:, None]
    within_RV = mx.cumsum(is_lowest_RV, axis=-1) <= num_equal_R[:, None]
    kept_RV = (softmax.scaled_NV > lowest_R[:, None]) | (is_lowest_RV & within_RV)
    kept_RV = kept_RV & (softmax.exponentials_NV >= filters.min_p_R[:, None])
    return mx.where(kept_RV, softmax.exponentials_NV, 0)


def _ends(softmax: Softmax, filters: Filters) -> tuple[mx.array, mx.array]:
    """The lowest logit that top-k and top-p keep, (R,), and how many tokens of this logit they keep, (R,)."""
    values_RV, packed_RV = softmax.scaled_NV, packed(softmax)
    count = filters.max_top_k
    if count is not None and count < values_RV.shape[1]:
        top_RK = mx.argpartition(-values_RV, kth=count - 1, axis=-1)[:, :count]
        values_RV, packed_RV = (mx.take_along_axis(array, top_RK, axis=-1) for array in (values_RV, packed_RV))
    ends = ends_by_sorting if values_RV.shape[1] <= MAX_SORTED else ends_by_counting
    return ends(values_RV, packed_RV, filters)


def ends_by_sorting(values_RV: mx.array, packed_RV: mx.array, filters: Filters) -> tuple[mx.array, mx.array]:
    """See `_ends`; V may be candidates only."""
    order_RV = mx.argsort(-values_RV, axis=-1)
    sorted_RV = mx.take_along_axis(values_RV, order_RV, axis=-1)
    before_RV = mx.cumsum(mx.take_along_axis(packed_RV, order_RV, axis=-1), axis=-1, inclusive=False)
    number_R1 = _keeps_next(before_RV, filters).sum(axis=-1, keepdims=True)
    lowest_R1 = mx.take_along_axis(sorted_RV, number_R1 - 1, axis=-1)
    return lowest_R1[:, 0], (number_R1 - (sorted_RV > lowest_R1).sum(axis=-1, keepdims=True))[:, 0]


def ends_by_counting(values_RV: mx.array, packed_RV: mx.array, filters: Filters) -> tuple[mx.array, mx.array]:
    """See `_ends`."""

    def above(order_R1: mx.array) -> mx.array:
        return ((values_RV > _value(order_R1)) * packed_RV).sum(axis=-1, keepdims=True)

    found_R1 = mx.zeros((len(values_RV), 1), mx.uint32)
    for bit in reversed(range(KEY_BITS)):
        candidate_R1 = found_R1 | mx.array(1 << bit, mx.uint32)
        found_R1 = mx.where(_keeps_next(above(candidate_R1), filters), candidate_R1, found_R1)
    lowest_R1, above_R1 = _value(found_R1), above(found_R1)
    equal_R1 = ((values_RV == lowest_R1) * packed_RV).sum(axis=-1, keepdims=True)
    each_R1 = _mass(equal_R1) // mx.maximum(_count(equal_R1), 1)  # tokens of one logit have one probability
    by_mass_R1 = (filters.top_p_R[:, None] - _mass(above_R1) + each_R1 - 1) // mx.maximum(each_R1, 1)
    by_mass_R1 = mx.where(each_R1 > 0, by_mass_R1, NO_TOP_P)
    return lowest_R1[:, 0], mx.minimum(filters.top_k_R[:, None] - _count(above_R1), by_mass_R1)[:, 0]


def packed(softmax: Softmax) -> mx.array:
    """Each token's probability as an integer above a count of one, (R, V) uint64: one sum gives both."""
    masses_RV = (softmax.probabilities() * PROBABILITY_ONE).astype(mx.uint64)
    return (masses_RV << COUNT_BITS) | 1


def _keeps_next(before_RK: mx.array, filters: Filters) -> mx.array:
    """Whether a token is kept, from the packed sums before it."""
    return (_count(before_RK) < filters.top_k_R[:, None]) & (_mass(before_RK) < filters.top_p_R[:, None])


def _count(packed_RK: mx.array) -> mx.array:
    return packed_RK & ((1 << COUNT_BITS) - 1)


def _mass(packed_RK: mx.array) -> mx.array:
    return packed_RK >> COUNT_BITS


def _value(order_R1: mx.array) -> mx.array:
    """The float32 of a rank in the order of all float32, the largest first."""
    bits_R1 = mx.minimum(order_R1, MINUS_INFINITY)
    return mx.where(bits_R1 >= SIGN, bits_R1, ~bits_R1 & (SIGN - 1)).view(mx.float32)
