"""The loss of completions that nothing is learned from."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from parallm.learner.batch import MicroBatch
from parallm.learner.head import Scores


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """Sums over the completions that were scored so far."""

    num_completions: int = 0
    num_tokens: int = 0
    nats: float = 0.0
    """Negative log-probs of these tokens."""

    @property
    def mean(self) -> float:
        """Nats per token; NaN without a token."""
        return self.nats / self.num_tokens if self.num_tokens else math.nan

    def with_batch(self, batch: MicroBatch, scores: Scores) -> "TokenLoss":
        logprobs_N = np.array(scores.logprobs_N)[batch.weights_N > 0]
        return TokenLoss(
            num_completions=self.num_completions + len(batch.completions_S),
            num_tokens=self.num_tokens + len(logprobs_N),
            nats=self.nats - float(logprobs_N.sum(dtype=np.float64)),
        )


def token_losses(
    batches: Sequence[MicroBatch], score: Callable[[Sequence[MicroBatch]], list[Scores]], width: int
) -> Iterator[TokenLoss]:
    """Score `batches`, `width` at a time. Yields the sums after each round, those of all batches last."""
    sums = TokenLoss()
    for start in range(0, len(batches), width):
        chosen = batches[start : start + width]
        for batch, scores in zip(chosen, score(chosen), strict=True):
            sums = sums.with_batch(batch, scores)
        yield sums
