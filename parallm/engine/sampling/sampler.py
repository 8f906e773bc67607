"""Logits of all rows -> one token and its log-probability per row, in one pass; log-probs of a prompt's tokens.

A row's random numbers depend on its seed and position only, so the same seed gives the same tokens in any batch.

Axes: B rows, T positions of a chunk, N rows or positions, H hidden, V vocabulary, K alternatives.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from parallm.engine.sampling.filters import Filters, filtered, filters_of
from parallm.model.kernels.cuda import has_kernels, interned_array, uploaded
from parallm.model.kernels.host_memory import HostResult
from parallm.model.kernels.token_draw import draw_tokens, score_tokens
from parallm.model.logprobs import Softmax, softmax_of
from parallm.model.shared_model import SharedModel
from parallm.seeds import mix_all
from parallm.types import PromptLogprob, SamplingParams, TopLogprob

DRAW_BLOCK = 128
STEPS_AHEAD = 16
"""Steps for which random numbers are made together."""
MAX_POSITIONS = 128
"""Positions of a prompt whose logits exist at the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTokens:
    """Lazy arrays of one step."""

    tokens_B: mx.array
    output_2B: mx.array | HostResult
    """The tokens, and the bits of their log-probabilities, int32."""
    top: Sequence[mx.array]
    """See `alternatives`."""

    def arrays(self) -> list[mx.array]:
        """The arrays to evaluate before `read`."""
        return [self.tokens_B if isinstance(self.output_2B, HostResult) else self.output_2B, *self.top]

    def read(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """Tokens and log-probabilities, (B,) each, once `arrays` are evaluated."""
        result = self.output_2B
        tokens_B, bits_B = result.read() if isinstance(result, HostResult) else np.array(result)
        return tokens_B, bits_B.view(np.float32)


class Noise:
    """Random numbers of rows, for several steps at once, which costs hardly more than one."""

    def __init__(self, seeds_B: Sequence[int]) -> None:
        self._seeds_B = np.array(seeds_B, np.uint64)
        self._first_B: list[int] = []  # positions in the first of these steps
        self._uniforms_NB2: mx.array | None = None

    def uniforms(self, positions_B: Sequence[int]) -> mx.array:
        """Two of [0, 1) per row, (B, 2)."""
        steps = positions_B[0] - self._first_B[0] if self._first_B else STEPS_AHEAD
        if not 0 <= steps < STEPS_AHEAD or [first + steps for first in self._first_B] != list(positions_B):
            self._first_B, steps = list(positions_B), 0
            positions_NB = np.array(positions_B, np.uint64) + np.arange(STEPS_AHEAD, dtype=np.uint64)[:, None]
            self._uniforms_NB2 = _uniforms(self._seeds_B, positions_NB)
        assert self._uniforms_NB2 is not None
        return self._uniforms_NB2[steps, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSampling:
    """Sampling parameters of a set of rows, as arrays that serve every step."""

    temperatures_B: mx.array
    greedy_B: mx.array | None
    """Rows that take the most likely token; None without such rows."""
    all_greedy: bool
    noise: Noise
    filters: Sequence[Filters]
    max_alternatives: int
    has_logits_processors: bool


def row_sampling(params_B: Sequence[SamplingParams], seeds_B: Sequence[int]) -> RowSampling:
    """`seeds_B` are 64-bit."""
    is_greedy = [params.temperature == 0 for params in params_B]
    has_filters = any(params.top_k > 0 or params.top_p < 1 or params.min_p > 0 for params in params_B)
    return RowSampling(
        temperatures_B=interned_array(tuple(params.temperature for params in params_B), mx.float32),
        greedy_B=interned_array(tuple(is_greedy), mx.bool_) if any(is_greedy) else None,
        all_greedy=all(is_greedy),
        noise=Noise(seeds_B),
        filters=filters_of(params_B) if has_filters else (),
        max_alternatives=max(params.top_logprobs for params in params_B),
        has_logits_processors=any(params.has_logits_processors for params in params_B),
    )


def sample(
    logits_BV: mx.array, rows: RowSampling, positions_B: Sequence[int], processed_BV: mx.array | None = None
) -> SampledTokens:
    """Sample one token per row.

    `positions_B` counts the tokens that the row has sampled before; logits processors made `processed_BV`, from which
    it samples in place of the policy's logits. Log-probabilities are float32, after temperature and before logits
    processors, top-k, top-p and min-p: those of the policy itself.
    """
    if has_kernels():
        return _sample_by_kernel(logits_BV, rows, positions_B, processed_BV)
    softmax = softmax_of(logits_BV, rows.temperatures_B)
    chosen = softmax if processed_BV is None else softmax_of(processed_BV, rows.temperatures_B)
    if rows.all_greedy:
        tokens_B = _most_likely(chosen)
    else:
        weights_BV = filtered(chosen, rows.filters) if rows.filters else chosen.exponentials_NV
        tokens_B = _draw(weights_BV, rows.noise.uniforms(positions_B))
        if rows.greedy_B is not None:
            tokens_B = mx.where(rows.greedy_B, _most_likely(chosen), tokens_B)
    logprobs_B = softmax.logprobs(tokens_B[:, None])[:, 0]
    output_2B = mx.stack([tokens_B, logprobs_B.view(mx.int32)])
    return SampledTokens(tokens_B=tokens_B, output_2B=output_2B, top=alternatives(softmax, rows.max_alternatives))


def _sample_by_kernel(
    logits_BV: mx.array, rows: RowSampling, positions_B: Sequence[int], processed_BV: mx.array | None
) -> SampledTokens:
    """`sample`; a filtered token is one of logit minus infinity."""
    chosen_BV = logits_BV if processed_BV is None else processed_BV
    if rows.filters:
        weights_BV = filtered(softmax_of(chosen_BV, rows.temperatures_B), rows.filters)
        chosen_BV = mx.where(weights_BV > 0, chosen_BV, -mx.inf)
    uniforms_B2 = None if rows.all_greedy else rows.noise.uniforms(positions_B)
    tokens_B, output_2B = draw_tokens(chosen_BV, rows.temperatures_B, uniforms_B2)
    if chosen_BV is not logits_BV:
        tokens_B, output_2B = score_tokens(logits_BV, rows.temperatures_B, tokens_B)
    count = rows.max_alternatives
    top = alternatives(softmax_of(logits_BV, rows.temperatures_B), count) if count else ()
    return SampledTokens(tokens_B=tokens_B, output_2B=output_2B, top=top)


def _most_likely(softmax: Softmax) -> mx.array:
    return mx.argmax(softmax.scaled_NV, axis=-1).astype(mx.int32)


def _draw(weights_BV: mx.array, uniforms_B2: mx.array) -> mx.array:
    """One index per row with probability proportional to `weights_BV`, (B,) int32: first a block of tokens, then a
    token of it, each by inverting the cumulative sum, as two short sums round less than one over the vocabulary."""
    rows, vocabulary = weights_BV.shape
    missing = -vocabulary % DRAW_BLOCK
    padded_BV = mx.pad(weights_BV, [(0, 0), (0, missing)]) if missing else weights_BV
    blocks_BKW = padded_BV.reshape(rows, -1, DRAW_BLOCK)
    block_B = _inverted(blocks_BKW.sum(axis=-1), uniforms_B2[:, 0])
    chosen_BW = mx.take_along_axis(blocks_BKW, block_B[:, None, None], axis=1)[:, 0]
    return block_B * DRAW_BLOCK + _inverted(chosen_BW, uniforms_B2[:, 1])


def _inverted(weights_BK: mx.array, uniforms_B: mx.array) -> mx.array:
    """Per row the first index whose cumulative weight exceeds that share of the total; never one of weight zero."""
    # A parallel sum need not grow evenly: an index of weight zero does not count, whatever was rounded there
    reached_BK = mx.where(weights_BK > 0, mx.cumsum(weights_BK, axis=-1), 0)
    targets_B1 = uniforms_B[:, None] * reached_BK.max(axis=-1, keepdims=True)
    return mx.argmax(reached_BK > targets_B1, axis=-1).astype(mx.int32)


def _uniforms(seeds_B: npt.NDArray[np.uint64], positions_NB: npt.NDArray[np.uint64]) -> mx.array:
    """Two multiples of 2**-24 in [0, 1) per position, (N, B, 2): exact in float32, so that a product with a total stays
    below the total."""
    bits_NB = mix_all(seeds_B, positions_NB)
    pairs_NB2 = np.stack([bits_NB >> np.uint64(40), bits_NB & np.uint64(0xFFFFFF)], axis=-1)
    return uploaded(pairs_NB2.astype(np.float32) * np.float32(2.0**-24))


def alternatives(softmax: Softmax, count: int) -> Sequence[mx.array]:
    """The `count` likeliest tokens and their log-probs, the likeliest first, (N, K) each; none for a count of 0."""
    if count == 0:
        return ()
    count = min(count, softmax.scaled_NV.shape[-1])
    top_BK = mx.argpartition(-softmax.scaled_NV, kth=count - 1, axis=-1)[:, :count]
    logprobs_BK = softmax.logprobs(top_BK)
    order_BK = mx.argsort(-logprobs_BK, axis=-1)
    return mx.take_along_axis(top_BK, order_BK, axis=-1), mx.take_along_axis(logprobs_BK, order_BK, axis=-1)


def read_alternatives(top: Sequence[mx.array], num_rows: int) -> Sequence[tuple[TopLogprob, ...]]:
    """The `alternatives` of each row, waiting for the device."""
    if not top:
        return [()] * num_rows
    return [tuple(map(TopLogprob, *row)) for row in zip(*(array.tolist() for array in top), strict=True)]


@dataclass(slots=True, kw_only=True)
class PromptLogprobScorer:
    """Scores a prompt along with its chunks; the numbers equal those that the learner computes for the same tokens."""

    sampling: SamplingParams
    _scored: list[tuple[Sequence[int], list[mx.array]]] = field(default_factory=list)

    def add(self, model: SharedModel, hidden_TH: mx.array, next_tokens: Sequence[int]) -> list[mx.array]:
        """Score the token after each position, as far as the prompt has one; returns the arrays to evaluate."""
        computed: list[mx.array] = []
        for start in range(0, len(next_tokens), MAX_POSITIONS):
            tokens = next_tokens[start : start + MAX_POSITIONS]
            arrays = self._score(model, hidden_TH[start : start + len(tokens)], tokens)
            self._scored.append((tokens, arrays))
            computed += arrays
        return computed

    def read(self) -> tuple[PromptLogprob | None, ...]:
        """Log-probs by position; the first token has none."""
        logprobs: list[PromptLogprob | None] = [None]
        for tokens, (logprobs_N, ranks_N, *top) in self._scored:
            columns = (tokens, logprobs_N.tolist(), ranks_N.tolist(), read_alternatives(top, len(tokens)))
            logprobs += [PromptLogprob(token=a, logprob=b, rank=c, top=d) for a, b, c, d in zip(*columns, strict=True)]
        return tuple(logprobs)

    def _score(self, model: SharedModel, hidden_NH: mx.array, tokens: Sequence[int]) -> list[mx.array]:
        softmax = softmax_of(model.head(hidden_NH), mx.full((len(tokens),), self.sampling.temperature))
        tokens_N1 = mx.array(tokens, mx.int32)[:, None]
        ranks_N = (softmax.scaled_NV > mx.take_along_axis(softmax.scaled_NV, tokens_N1, axis=-1)).sum(axis=-1) + 1
        top = alternatives(softmax, self.sampling.prompt_logprobs or 0)
        return [softmax.logprobs(tokens_N1)[:, 0], ranks_N, *top]
