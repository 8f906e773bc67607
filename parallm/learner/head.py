"""Log-probs of hidden states and the gradient back to them, a chunk of tokens at a time.

The logits of all tokens of a step never exist together: `score` computes a chunk's, keeps one number per token, and
`pull_back` computes them again. Only where one chunk holds all tokens is its softmax kept between the two.

Axes: N tokens, H hidden, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from parallm.model.logprobs import Softmax, softmax_of
from parallm.model.shared_model import SharedModel


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens whose logits exist together, and the hidden states that predict them."""

    hidden_NH: mx.array
    tokens_N: mx.array
    temperature_N: mx.array


@dataclass(frozen=True, slots=True)
class Scores:
    """Per token of all chunks; `kept` is the softmax of the one chunk if there is only one."""

    chunks: Sequence[Chunk]
    logprobs_N: mx.array
    entropies_N: mx.array
    kept: Softmax | None


class Head:
    """The model's head as the learner uses it. Holds no state between calls."""

    def __init__(self, model: SharedModel, chunk_bytes: int) -> None:
        self._model = model
        self._chunk = max(1, chunk_bytes // (4 * model.vocabulary_size))

    def score(self, hidden_NH: mx.array, tokens_N: mx.array, temperature_N: mx.array) -> Scores:
        """Log-probs of `tokens_N` and entropies, float32, after temperature."""
        parts = [slice(start, start + self._chunk) for start in range(0, len(tokens_N), self._chunk)]
        chunks = [Chunk(hidden_NH[part], tokens_N[part], temperature_N[part]) for part in parts]
        kept: Softmax | None = None
        found: list[tuple[mx.array, mx.array]] = []
        for chunk in chunks:
            kept = self._softmax(_after(chunk, found))
            found.append((kept.logprobs(chunk.tokens_N[:, None])[:, 0], kept.entropies()))
        logprobs, entropies = zip(*found, strict=True)
        return Scores(chunks, mx.concatenate(logprobs), mx.concatenate(entropies), kept if len(chunks) == 1 else None)

    def pull_back(self, scores: Scores, gradient_N: mx.array, entropy_gradient_N: mx.array | None = None) -> mx.array:
        """Gradient with respect to the hidden states (N, H), given those with respect to log-probs and entropies."""
        found: list[tuple[mx.array]] = []
        start = 0
        for chunk in scores.chunks:
            end = start + len(chunk.tokens_N)
            softmax = scores.kept or self._softmax(_after(chunk, found or [(gradient_N,)]))
            entropy_gradient = None if entropy_gradient_N is None else entropy_gradient_N[start:end]
            found.append((self._pull_back(chunk, softmax, gradient_N[start:end], entropy_gradient),))
            start = end
        return mx.concatenate([one for (one,) in found])

    def _softmax(self, chunk: Chunk) -> Softmax:
        return softmax_of(self._model.head(chunk.hidden_NH), chunk.temperature_N)

    def _pull_back(
        self, chunk: Chunk, softmax: Softmax, gradient_N: mx.array, entropy_gradient_N: mx.array | None
    ) -> mx.array:
        """A log-softmax's gradient is (chosen - probabilities) / temperature; see `entropy_gradient` for the other."""
        scale_N = gradient_N / chunk.temperature_N
        gradient_NV = softmax.exponentials_NV * (-scale_N / softmax.sums_N)[:, None]
        gradient_NV = gradient_NV.at[mx.arange(len(scale_N)), chunk.tokens_N].add(scale_N)
        if entropy_gradient_N is not None:
            gradient_NV += entropy_gradient(softmax, entropy_gradient_N / chunk.temperature_N)
        _, (gradient_NH,) = mx.vjp(
            lambda hidden: self._model.head(hidden).astype(mx.float32), [chunk.hidden_NH], [gradient_NV]
        )
        return gradient_NH


def _after(chunk: Chunk, found: Sequence[tuple[mx.array, ...]]) -> Chunk:
    """`chunk`, whose logits are computed once the last of `found` is there: then only one chunk's exist."""
    if not found:
        return chunk
    (hidden_NH,) = mx.depends([chunk.hidden_NH], list(found[-1]))
    return replace(chunk, hidden_NH=hidden_NH)


def entropy_gradient(softmax: Softmax, gradient_N: mx.array) -> mx.array:
    """Gradient of each row's entropy with respect to its scaled logits, -p (log p + entropy), times `gradient_N`."""
    logprobs_NV = softmax.scaled_NV - softmax.logsumexp_N[:, None]
    surprise_NV = logprobs_NV + softmax.entropies()[:, None]
    return -gradient_N[:, None] * softmax.probabilities() * surprise_NV
