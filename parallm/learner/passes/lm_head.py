"""Log-probs of hidden states and the gradient back to them, a chunk of tokens at a time.

The logits of all tokens of a step never exist together. A log-prob depends on one token's hidden state alone, so
`score` can work out its slope there while the chunk's logits exist, before anybody knows what the loss makes of it,
and `backward` multiplies. Where entropies are part of the loss, too, `backward` computes the logits again. Where one
chunk holds all tokens, its softmax is kept between the two.

Nothing is evaluated while a pass is built, so that the device can run another in the meantime. What is built is
evaluated in stages: a stage is what is left of one chunk. `run_stages` has two of them under way at most, so that the
device never waits and the logits of no more than two chunks exist.

Axes: N tokens, H hidden, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from parallm.model.kernels.token_scores import TokenScores, token_scores
from parallm.model.shared_model import SharedModel

Stages = list[list[mx.array]]
"""To be evaluated one after the other, by `run_stages`."""

TILE = 64  # matrix products are fastest with a multiple of it


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
    kept: TokenScores | None
    """Those of the one chunk if there is only one."""
    slopes_NH: mx.array | None
    """Gradient of each log-prob with respect to its hidden state, if it was wanted and nothing is kept."""
    stages: Stages


def run_stages(stages: Stages) -> None:
    """Give the device one stage after the other. The last one is not waited for."""
    before: list[mx.array] = []
    for stage in stages:
        mx.async_eval(stage)
        mx.eval(before)
        before = stage


class ChunkedHead:
    """The model's head as the learner uses it. Holds no state between calls."""

    def __init__(self, model: SharedModel, chunk_bytes: int) -> None:
        self._model = model
        tokens = max(1, chunk_bytes // (model.dtype.size * model.vocabulary_size))
        self._chunk = tokens if tokens < TILE else tokens // TILE * TILE

    def score(
        self, hidden_NH: mx.array, tokens_N: mx.array, temperature_N: mx.array, *, wants_slopes: bool = False
    ) -> Scores:
        """Log-probs of `tokens_N` and entropies, float32, after temperature."""
        parts = [slice(start, start + self._chunk) for start in range(0, len(tokens_N), self._chunk)]
        chunks = [Chunk(hidden_NH[part], tokens_N[part], temperature_N[part]) for part in parts]
        found = [self._scores(chunk) for chunk in chunks]
        stages = [[one.logprobs_N, one.entropies_N] for one in found]
        logprobs, entropies = zip(*stages, strict=True)
        is_one = len(chunks) == 1
        slopes: list[mx.array] = []
        if wants_slopes and not is_one:
            slopes = [
                self._through_head(chunk.hidden_NH, one.gradient(mx.ones_like(one.logprobs_N), None))
                for chunk, one in zip(chunks, found, strict=True)
            ]
            stages = [[*stage, slope] for stage, slope in zip(stages, slopes, strict=True)]
        return Scores(
            chunks,
            mx.concatenate(logprobs),
            mx.concatenate(entropies),
            kept=found[0] if is_one else None,
            slopes_NH=mx.concatenate(slopes) if slopes else None,
            stages=[] if is_one else stages,
        )

    def backward(
        self, scores: Scores, gradient_N: mx.array, entropy_gradient_N: mx.array | None = None
    ) -> tuple[mx.array, Stages]:
        """Gradient with respect to the hidden states (N, H), given those with respect to log-probs and entropies."""
        if scores.slopes_NH is not None and entropy_gradient_N is None:
            return (gradient_N[:, None] * scores.slopes_NH).astype(scores.slopes_NH.dtype), []
        found: list[mx.array] = []
        start = 0
        for chunk in scores.chunks:
            part = slice(start, start + len(chunk.tokens_N))
            of_entropies = None if entropy_gradient_N is None else entropy_gradient_N[part]
            gradient_NV = (scores.kept or self._scores(chunk)).gradient(gradient_N[part], of_entropies)
            found.append(self._through_head(chunk.hidden_NH, gradient_NV))
            start = part.stop
        return mx.concatenate(found), [] if len(found) == 1 else [[one] for one in found]

    def _scores(self, chunk: Chunk) -> TokenScores:
        return token_scores(self._model.head(chunk.hidden_NH), chunk.temperature_N, chunk.tokens_N)

    def _through_head(self, hidden_NH: mx.array, gradient_NV: mx.array) -> mx.array:
        _, (gradient_NH,) = mx.vjp(
            lambda hidden: self._model.head(hidden).astype(gradient_NV.dtype), [hidden_NH], [gradient_NV]
        )
        return gradient_NH
