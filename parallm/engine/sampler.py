"""Logits of all rows -> one token and its log-probability per row, in one pass.

A row's noise depends on its seed and position only, so the same seed gives the same tokens in any batch.

Axes: B rows, V vocabulary, K alternatives.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from parallm.model.logprobs import scaled_logits, token_logprobs
from parallm.seeds import mix
from parallm.types import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """Lazy arrays of one step; `top_*` are None where no row asked for alternatives."""

    tokens_B: mx.array
    logprobs_B: mx.array
    top_tokens_BK: mx.array | None
    top_logprobs_BK: mx.array | None

    def arrays(self) -> list[mx.array]:
        every = (self.tokens_B, self.logprobs_B, self.top_tokens_BK, self.top_logprobs_BK)
        return [array for array in every if array is not None]


def sample(
    logits_BV: mx.array, params_B: Sequence[SamplingParams], seeds_B: Sequence[int], positions_B: Sequence[int]
) -> Sampled:
    """Sample one token per row.

    `seeds_B` are 64-bit; `positions_B` counts the tokens that the row has sampled before. Log-probabilities are
    float32, after temperature and before top-k, top-p and min-p: those of the policy itself.
    """
    temperature_B = mx.array([params.temperature for params in params_B], mx.float32)
    scaled_BV = scaled_logits(logits_BV, temperature_B)
    allowed_BV = _filtered(scaled_BV, params_B)
    if all(params.temperature == 0 for params in params_B):
        tokens_B = mx.argmax(allowed_BV, axis=-1)
    else:
        noise_BV = _gumbel_noise(seeds_B, positions_B, logits_BV.shape[-1])
        greedy_B = temperature_B == 0
        tokens_B = mx.argmax(mx.where(greedy_B[:, None], allowed_BV, allowed_BV + noise_BV), axis=-1)
    logprobs_B = token_logprobs(scaled_BV, tokens_B)
    top_tokens_BK, top_logprobs_BK = _alternatives(scaled_BV, params_B)
    return Sampled(
        tokens_B=tokens_B, logprobs_B=logprobs_B, top_tokens_BK=top_tokens_BK, top_logprobs_BK=top_logprobs_BK
    )


def _gumbel_noise(seeds_B: Sequence[int], positions_B: Sequence[int], size: int) -> mx.array:
    """Standard Gumbel noise (B, V): adding it and taking the largest samples from the softmax."""
    keys = [mix(seed, position) for seed, position in zip(seeds_B, positions_B, strict=True)]
    keys_B2 = mx.array(np.array([[key >> 32, key & 0xFFFFFFFF] for key in keys], np.uint32))
    noise: mx.array = mx.vmap(lambda key: mx.random.gumbel((size,), key=key))(keys_B2)
    return noise


def _filtered(scaled_BV: mx.array, params_B: Sequence[SamplingParams]) -> mx.array:
    """Set the logits of tokens that top-k, top-p or min-p exclude to minus infinity."""
    if all(params.top_k == 0 and params.top_p >= 1 and params.min_p <= 0 for params in params_B):
        return scaled_BV
    vocabulary = scaled_BV.shape[-1]
    top_k_B = mx.array([params.top_k or vocabulary for params in params_B])
    top_p_B = mx.array([params.top_p if params.top_p < 1 else 2.0 for params in params_B], mx.float32)
    min_p_B = mx.array([params.min_p for params in params_B], mx.float32)
    order_BV = mx.argsort(-scaled_BV, axis=-1)
    sorted_BV = mx.softmax(mx.take_along_axis(scaled_BV, order_BV, axis=-1), axis=-1)
    before_BV = mx.cumsum(sorted_BV, axis=-1, inclusive=False)
    keep_BV = mx.arange(vocabulary)[None] < top_k_B[:, None]
    keep_BV = keep_BV & (before_BV < top_p_B[:, None])
    keep_BV = keep_BV & (sorted_BV >= min_p_B[:, None] * sorted_BV[:, :1])
    kept_BV = mx.put_along_axis(mx.zeros(keep_BV.shape, mx.bool_), order_BV, keep_BV, axis=-1)
    return mx.where(kept_BV, scaled_BV, -mx.inf)


def _alternatives(scaled_BV: mx.array, params_B: Sequence[SamplingParams]) -> tuple[mx.array | None, mx.array | None]:
    most = max(params.top_logprobs for params in params_B)
    if most == 0:
        return None, None
    most = min(most, scaled_BV.shape[-1])
    found_BK = mx.argpartition(-scaled_BV, kth=most - 1, axis=-1)[:, :most]
    logprobs_BK = mx.take_along_axis(scaled_BV, found_BK, axis=-1) - mx.logsumexp(scaled_BV, axis=-1, keepdims=True)
    order_BK = mx.argsort(-logprobs_BK, axis=-1)
    return mx.take_along_axis(found_BK, order_BK, axis=-1), mx.take_along_axis(logprobs_BK, order_BK, axis=-1)
