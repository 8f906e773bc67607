"""What some objectives must know of the whole step before its first gradient: forward passes without gradients.

The base's log-probs (adapter off, so they need no memory of their own), advantages of rewards less KL, and the entropy
that the most uncertain tokens reach. Nothing runs for an objective that needs none of it.
Axes: S completions of the step, N completion tokens of a micro-batch.
"""

import math
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from parallm.learner.loss.advantage import advantages
from parallm.learner.loss.corrections import entropy_threshold
from parallm.learner.loss.kl import kl_estimate
from parallm.learner.loss.objective import Objective
from parallm.learner.passes.batch import MicroBatch
from parallm.learner.passes.lm_head import Scores
from parallm.model.lora.linear import LoraBinding
from parallm.types import TrajectoryGroup

ScoreFunction = Callable[[LoraBinding | None, Sequence[MicroBatch]], list[Scores]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredStep:
    """Micro-batches that are ready for their gradients, and the device seconds that it took."""

    batches: list[MicroBatch]
    seconds: float = 0.0


def score_step(
    batches: list[MicroBatch],
    groups: Sequence[TrajectoryGroup],
    objective: Objective,
    score: ScoreFunction,
    *,
    policy: LoraBinding,
    width: int,
) -> Generator[None, None, ScoredStep]:
    """Score `batches`, `width` at a time, with what `objective` needs; yields after each round of them."""
    needs_entropies = objective.top_entropy_fraction < 1
    if not objective.needs_base and not needs_entropies:
        return ScoredStep(batches=batches)
    found: list[MicroBatch] = []
    entropies: list[np.ndarray] = []
    seconds = 0.0
    for start in range(0, len(batches), width):
        began = time.perf_counter()
        chosen = batches[start : start + width]
        if needs_entropies:
            scores = score(policy, chosen)
            entropies += [np.array(one.entropies_N)[b.weights_N > 0] for b, one in zip(chosen, scores, strict=True)]
        if objective.needs_base:
            scores = score(None, chosen)
            chosen = [replace(b, base_N=np.array(one.logprobs_N)) for b, one in zip(chosen, scores, strict=True)]
        found += chosen
        seconds += time.perf_counter() - began
        yield
    if objective.needs_base and objective.kl_placement == "reward":
        found = _with_kl_in_reward(found, groups, objective)
    if needs_entropies and any(map(len, entropies)):
        threshold = entropy_threshold(np.concatenate(entropies), objective.top_entropy_fraction)
        found = [replace(batch, entropy_threshold=threshold) for batch in found]
    return ScoredStep(batches=found, seconds=seconds)


def _with_kl_in_reward(
    batches: Sequence[MicroBatch], groups: Sequence[TrajectoryGroup], objective: Objective
) -> list[MicroBatch]:
    """Advantages of rewards less coefficient x KL(sampler, base), summed over the trained tokens of a completion."""
    trajectories = [one for group in groups for one in group.trajectories]
    kl_S = np.zeros(len(trajectories))
    for batch in batches:
        sampled_N, base_N = mx.array(batch.behaviour_N), mx.array(batch.base_N)
        kl_N = np.array(kl_estimate(sampled_N, base_N, objective.kl_estimator))
        np.add.at(kl_S, batch.completions_S[batch.rows_N], np.where(batch.weights_N > 0, kl_N, 0.0))
    penalty = iter(objective.kl_coefficient * kl_S)
    rewards = [[reward - next(penalty) for reward in group.rewards] for group in groups]
    advantages_S = advantages(objective.advantage, rewards, [sum(one.loss_mask) for one in trajectories])
    return [replace(batch, advantages_N=advantages_S[batch.completions_S[batch.rows_N]]) for batch in batches]


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
