"""Log-probs of hidden states and the gradient back to them, a chunk of tokens at a time.

The logits of all tokens of a step never exist together: `score` computes a chunk's, keeps one number per token, and
`pull_back` computes them again. Only where one chunk holds all tokens is its softmax kept between the two.

Nothing is evaluated here, so that a whole pass can be built while the device runs another. Whoever evaluates it does so
stage by stage: a stage is what is left of one chunk, and its logits are gone before the next one's are computed.

Axes: N tokens, H hidden, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from parallm.model.logprobs import Softmax, softmax_of
from parallm.model.shared_model import SharedModel

Stages = list[list[mx.array]]
"""To be evaluated one after the other."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens whose logits exist together, and the hidden states that predict them."""

    hidden_NH: mx.array
    tokens_N: mx.array
    temperature_N: mx.array


@dataclass(frozen=True, slots=True)
class Scores:
    """Per token of all chunks."""

    chunks: Sequence[Chunk]
    logprobs_N: mx.array
    entropies_N: mx.array
    kept: Softmax | None
    """That of the one chunk if there is only one."""
    stages: Stages


class Head:
    """The model's head as the learner uses it. Holds no state between calls."""

    def __init__(self, model: SharedModel, chunk_bytes: int) -> None:
        self._model = model
        self._chunk = max(1, chunk_bytes // (4 * model.vocabulary_size))

    def score(self, hidden_NH: mx.array, tokens_N: mx.array, temperature_N: mx.array) -> Scores:
        """Log-probs of `tokens_N` and entropies, float32, after temperature."""
        parts = [slice(start, start + self._chunk) for start in range(0, len(tokens_N), self._chunk)]
        chunks = [Chunk(hidden_NH[part], tokens_N[part], temperature_N[part]) for part in parts]
        softmaxes = [softmax_of(self._model.head(chunk.hidden_NH), chunk.temperature_N) for chunk in chunks]
        logprobs = [found.logprobs(c.tokens_N[:, None])[:, 0] for found, c in zip(softmaxes, chunks, strict=True)]
        entropies = [found.entropies() for found in softmaxes]
        is_one = len(chunks) == 1
        return Scores(
            chunks,
            mx.concatenate(logprobs),
            mx.concatenate(entropies),
            kept=softmaxes[0] if is_one else None,
            stages=[] if is_one else [list(pair) for pair in zip(logprobs, entropies, strict=True)],
        )

    def pull_back(
        self, scores: Scores, gradient_N: mx.array, entropy_gradient_N: mx.array | None = None
    ) -> tuple[mx.array, Stages]:
        """Gradient with respect to the hidden states (N, H), given those with respect to log-probs and entropies."""
        found: list[mx.array] = []
        start = 0
        for chunk in scores.chunks:
            end = start + len(chunk.tokens_N)
            softmax = scores.kept or softmax_of(self._model.head(chunk.hidden_NH), chunk.temperature_N)
            entropy_gradient = None if entropy_gradient_N is None else entropy_gradient_N[start:end]
            found.append(self._pull_back(chunk, softmax, gradient_N[start:end], entropy_gradient))
            start = end
        return mx.concatenate(found), [] if len(found) == 1 else [[one] for one in found]

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


def entropy_gradient(softmax: Softmax, gradient_N: mx.array) -> mx.array:
    """Gradient of each row's entropy with respect to its scaled logits, -p (log p + entropy), times `gradient_N`."""
    logprobs_NV = softmax.scaled_NV - softmax.logsumexp_N[:, None]
    surprise_NV = logprobs_NV + softmax.entropies()[:, None]
    return -gradient_N[:, None] * softmax.probabilities() * surprise_NV
