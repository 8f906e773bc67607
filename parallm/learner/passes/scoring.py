"""Forward passes without gradients: for objectives that need numbers of the whole step, and for held-out loss.

`Learner` calls it. An objective may need the base's log-probs (the adapter is off, so no memory of its own), advantages
of rewards less KL, and the entropy threshold of top_entropy_fraction.
Axes: S completions of the step, N completion tokens of a micro-batch.
"""

import math
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from parallm.learner.loss.advantage import advantages
from parallm.learner.loss.objective import Objective, entropy_threshold
from parallm.learner.loss.policy_loss import kl_estimate
from parallm.learner.passes.batch import MicroBatch
from parallm.learner.passes.lm_head import Scores
from parallm.model.lora.linear import LoraBinding
from parallm.types import TrajectoryGroup

ScoreFunction = Callable[[LoraBinding | None, Sequence[MicroBatch]], list[Scores]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredStep:
    """Micro-batches ready for their gradients, and the device seconds that scoring took."""

    batches: Sequence[MicroBatch]
    seconds: float = 0.0


def score_step(
    batches: Sequence[MicroBatch],
    groups: Sequence[TrajectoryGroup],
    objective: Objective,
    score: ScoreFunction,
    *,
    policy: LoraBinding,
    width: int,
) -> Generator[None, None, ScoredStep]:
    """Score `batches`, `width` at a time, as `objective` needs; yields after each round."""
    if not objective.needs_scores:
        return ScoredStep(batches=batches)
    needs_entropies = objective.top_entropy_fraction < 1
    scored: list[MicroBatch] = []
    entropies: list[np.ndarray] = []
    seconds = 0.0
    for start in range(0, len(batches), width):
        began = time.perf_counter()
        chosen = batches[start : start + width]
        if needs_entropies:
            scores = score(policy, chosen)
            entropies += [np.array(s.entropies_N)[b.weights_N > 0] for b, s in zip(chosen, scores, strict=True)]
        if objective.needs_base:
            scores = score(None, chosen)
            chosen = [replace(b, base_N=np.array(s.logprobs_N)) for b, s in zip(chosen, scores, strict=True)]
        scored += chosen
        seconds += time.perf_counter() - began
        yield
    if objective.needs_base and objective.kl_placement == "reward":
        scored = _with_kl_in_reward(scored, groups, objective)
    if needs_entropies and any(map(len, entropies)):
        threshold = entropy_threshold(np.concatenate(entropies), objective.top_entropy_fraction)
        scored = [replace(batch, entropy_threshold=threshold) for batch in scored]
    return ScoredStep(batches=scored, seconds=seconds)


def _with_kl_in_reward(
    batches: Sequence[MicroBatch], groups: Sequence[TrajectoryGroup], objective: Objective
) -> list[MicroBatch]:
    """Advantages of rewards less coefficient x KL(sampler, base), summed over a completion's trained tokens."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    kl_S = np.zeros(len(trajectories))
    for batch in batches:
        sampled_N, base_N = mx.array(batch.behaviour_N), mx.array(batch.base_N)
        kl_N = np.array(kl_estimate(sampled_N, base_N, objective.kl_estimator))
        np.add.at(kl_S, batch.completions_S[batch.rows_N], np.where(batch.weights_N > 0, kl_N, 0.0))
    penalty = iter(objective.kl_coefficient * kl_S)
    rewards = [[reward - next(penalty) for reward in group.rewards] for group in groups]
    num_tokens_S = [trajectory.loss_mask.count(True) for trajectory in trajectories]
    advantages_S = advantages(objective.advantage, rewards, num_tokens_S)
    return [replace(batch, advantages_N=advantages_S[batch.completions_S[batch.rows_N]]) for batch in batches]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """Sums over the scored completions."""

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
    """Score `batches`, `width` at a time. Yields the sums after each round."""
    sums = TokenLoss()
    for start in range(0, len(batches), width):
        chosen = batches[start : start + width]
        for batch, scores in zip(chosen, score(chosen), strict=True):
            sums = sums.with_batch(batch, scores)
        yield sums
