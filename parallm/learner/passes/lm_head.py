"""The LM head of the learner: log-probs of hidden states and gradients back to them, a chunk of tokens at a time.

The logits of all tokens of a step never exist together. A log-prob depends on one token's hidden state, so `score`
computes its slope while the chunk's logits exist, before the loss is known, and `backward` multiplies the slope by the
loss's gradient. If entropies are part of the loss, `backward` computes the logits again. If one chunk holds all tokens,
its softmax is kept between the two.

Nothing is evaluated while a pass is built, so the device can run another one meanwhile. Chunks are evaluated in stages.
`run_stages` has at most two in flight, so the device never waits and at most two chunks of logits exist.

Axes: N tokens, H hidden, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from parallm.learner.passes.packing import canonical_size
from parallm.model.kernels.cuda import has_kernels
from parallm.model.kernels.token_scores import TokenScores, token_scores
from parallm.model.shared_model import SharedModel

Stages = list[list[mx.array]]
"""Arrays that `run_stages` evaluates one list after the other."""

TILE = 64  # matrix products are fastest for multiples of it


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens whose logits exist together, with the hidden states that predict them."""

    hidden_NH: mx.array
    tokens_N: mx.array
    temperature_N: mx.array


@dataclass(frozen=True, slots=True)
class Scores:
    """Log-probs and entropies of all chunks."""

    chunks: Sequence[Chunk]
    logprobs_N: mx.array
    entropies_N: mx.array
    single_scores: TokenScores | None
    """The scores of a single chunk; None if there are several."""
    slopes_NH: mx.array | None
    """Gradient of each log-prob with respect to its hidden state, for several chunks on request."""
    stages: Stages


def run_stages(stages: Stages) -> None:
    """Evaluate the stages in order, without waiting for the last one."""
    before: list[mx.array] = []
    for stage in stages:
        mx.async_eval(stage)
        mx.eval(before)
        before = stage


class ChunkedHead:
    """The model's LM head in chunks. Holds no state between calls."""

    def __init__(self, model: SharedModel, chunk_bytes: int) -> None:
        self._model = model
        tokens = max(1, chunk_bytes // (model.dtype.size * model.vocabulary_size))
        self._chunk = tokens if tokens < TILE else tokens // TILE * TILE

    def padded_size(self, num_tokens: int) -> int:
        """`num_tokens` or, with our CUDA kernels, the next of few sizes: whole chunks, so that passes are alike."""
        if not has_kernels() or num_tokens == 0:
            return num_tokens
        size = self._size(num_tokens)
        return -(-num_tokens // size) * size

    def _size(self, num_tokens: int) -> int:
        """Tokens of each chunk of so many. With our kernels all chunks have one size: the last one would otherwise be
        mostly padding."""
        if not has_kernels() or num_tokens == 0:
            return self._chunk
        count = -(-num_tokens // self._chunk)
        return min(self._chunk, canonical_size(-(-num_tokens // count)))

    def score(
        self, hidden_NH: mx.array, tokens_N: mx.array, temperature_N: mx.array, *, wants_slopes: bool = False
    ) -> Scores:
        """Log-probs of `tokens_N` and entropies, float32, after temperature. Hidden states after the last token are
        padding (`padded_size`)."""
        num_tokens, num_padding = len(tokens_N), len(hidden_NH) - len(tokens_N)
        if num_padding:
            tokens_N, temperature_N = (
                mx.concatenate([array, mx.zeros((num_padding,), array.dtype)]) for array in (tokens_N, temperature_N)
            )
        size = self._size(len(tokens_N))
        parts = [slice(start, start + size) for start in range(0, len(tokens_N), size)]
        chunks = [Chunk(hidden_NH[part], tokens_N[part], temperature_N[part]) for part in parts]
        chunk_scores = [self._scores(chunk) for chunk in chunks]
        stages = [[scores.logprobs_N, scores.entropies_N] for scores in chunk_scores]
        logprobs, entropies = zip(*stages, strict=True)
        is_single = len(chunks) == 1
        slopes: list[mx.array] = []
        if wants_slopes and not is_single:
            slopes = [
                self._through_head(chunk.hidden_NH, scores.gradient(mx.ones_like(scores.logprobs_N), None))
                for chunk, scores in zip(chunks, chunk_scores, strict=True)
            ]
            stages = [[*stage, slope] for stage, slope in zip(stages, slopes, strict=True)]
        return Scores(
            chunks,
            mx.concatenate(logprobs)[:num_tokens],
            mx.concatenate(entropies)[:num_tokens],
            single_scores=chunk_scores[0] if is_single else None,
            slopes_NH=mx.concatenate(slopes) if slopes else None,
            stages=[] if is_single else stages,
        )

    def backward(
        self, scores: Scores, gradient_N: mx.array, entropy_gradient_N: mx.array | None = None
    ) -> tuple[mx.array, Stages]:
        """Gradient with respect to the hidden states (N, H), given those with respect to log-probs and entropies; zeros
        for padding."""
        num_padding = sum(len(chunk.tokens_N) for chunk in scores.chunks) - len(gradient_N)
        if num_padding:
            gradient_N = mx.pad(gradient_N, (0, num_padding))
            entropy_gradient_N = None if entropy_gradient_N is None else mx.pad(entropy_gradient_N, (0, num_padding))
        if scores.slopes_NH is not None and entropy_gradient_N is None:
            return (gradient_N[:, None] * scores.slopes_NH).astype(scores.slopes_NH.dtype), []
        gradients: list[mx.array] = []
        start = 0
        for chunk in scores.chunks:
            part = slice(start, start + len(chunk.tokens_N))
            entropy_part_N = None if entropy_gradient_N is None else entropy_gradient_N[part]
            gradient_NV = (scores.single_scores or self._scores(chunk)).gradient(gradient_N[part], entropy_part_N)
            gradients.append(self._through_head(chunk.hidden_NH, gradient_NV))
            start = part.stop
        return mx.concatenate(gradients), [] if len(gradients) == 1 else [[gradient] for gradient in gradients]

    def _scores(self, chunk: Chunk) -> TokenScores:
        return token_scores(self._model.head(chunk.hidden_NH), chunk.temperature_N, chunk.tokens_N)

    def _through_head(self, hidden_NH: mx.array, gradient_NV: mx.array) -> mx.array:
        _, (gradient_NH,) = mx.vjp(
            lambda hidden: self._model.head(hidden).astype(gradient_NV.dtype), [hidden_NH], [gradient_NV]
        )
        return gradient_NH
