"""Log-probs of a prompt's tokens, computed along with its chunks.

Axes: T positions of a chunk, N of them at once, H hidden, K alternatives.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from parallm.engine.sampling.sampler import alternatives
from parallm.model.logprobs import softmax_of
from parallm.model.shared_model import SharedModel
from parallm.types import PromptLogprob, SamplingParams, TopLogprob

MAX_POSITIONS = 128
"""Positions whose logits exist at the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """Consecutive positions."""

    tokens: Sequence[int]
    logprobs_N: mx.array
    ranks_N: mx.array
    top_tokens_NK: mx.array | None
    top_logprobs_NK: mx.array | None

    def arrays(self) -> list[mx.array]:
        arrays = (self.logprobs_N, self.ranks_N, self.top_tokens_NK, self.top_logprobs_NK)
        return [array for array in arrays if array is not None]

    def read(self) -> list[PromptLogprob]:
        tops: list[tuple[TopLogprob, ...]] = [()] * len(self.tokens)
        if self.top_tokens_NK is not None and self.top_logprobs_NK is not None:
            rows = zip(self.top_tokens_NK.tolist(), self.top_logprobs_NK.tolist(), strict=True)
            tops = [tuple(map(TopLogprob, *row)) for row in rows]
        columns = (self.tokens, self.logprobs_N.tolist(), self.ranks_N.tolist(), tops)
        return [PromptLogprob(token=a, logprob=b, rank=c, top=d) for a, b, c, d in zip(*columns, strict=True)]


@dataclass(slots=True, kw_only=True)
class PromptLogprobScorer:
    """Scores one prompt; the numbers equal those that the learner computes for the same tokens."""

    sampling: SamplingParams
    _scored: list[Scored] = field(default_factory=list)

    def add(self, model: SharedModel, hidden_TH: mx.array, next_tokens: Sequence[int]) -> list[mx.array]:
        """Score the token after each position, as far as the prompt has one; returns the arrays to evaluate."""
        added = [
            self._score(model, hidden_TH[start : start + MAX_POSITIONS], next_tokens[start : start + MAX_POSITIONS])
            for start in range(0, len(next_tokens), MAX_POSITIONS)
        ]
        self._scored += added
        return [array for scored in added for array in scored.arrays()]

    def read(self) -> tuple[PromptLogprob | None, ...]:
        """Log-probs by position; the first token has none."""
        return (None, *(logprob for scored in self._scored for logprob in scored.read()))

    def _score(self, model: SharedModel, hidden_NH: mx.array, tokens: Sequence[int]) -> Scored:
        softmax = softmax_of(model.head(hidden_NH[: len(tokens)]), mx.full((len(tokens),), self.sampling.temperature))
        tokens_N1 = mx.array(tokens, mx.int32)[:, None]
        chosen_N1 = mx.take_along_axis(softmax.scaled_NV, tokens_N1, axis=-1)
        top_tokens_NK, top_logprobs_NK = alternatives(softmax, self.sampling.prompt_logprobs or 0)
        return Scored(
            tokens=tokens,
            logprobs_N=softmax.logprobs(tokens_N1)[:, 0],
            ranks_N=(softmax.scaled_NV > chosen_N1).sum(axis=-1) + 1,
            top_tokens_NK=top_tokens_NK,
            top_logprobs_NK=top_logprobs_NK,
        )
