"""The choices that make a loss, and the weight of a token in a step. `policy_loss` has the mathematics."""

from dataclasses import dataclass

import numpy as np

from parallm.learner.settings import (
    Advantage,
    Aggregation,
    Correction,
    KlEstimator,
    KlPlacement,
    KlTarget,
    PolicyTerm,
    RatioLevel,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """Every choice of a loss. Names, units and limits are those of LearnerSettings."""

    advantage: Advantage = "group_mean"
    policy: PolicyTerm = "ppo"
    ratio: RatioLevel = "token"
    aggregation: Aggregation = "token_mean"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip_ratio_max: float | None = None
    cispo_ratio_max: float = 5.0
    probability_fall_max: float = 0.2
    probability_rise_max: float = 0.2
    sapo_temperature_positive: float = 1.0
    sapo_temperature_negative: float = 1.05
    kl_coefficient: float = 0.0
    kl_estimator: KlEstimator = "k3"
    kl_placement: KlPlacement = "loss"
    kl_to: KlTarget = "base"
    kl_unbiased: bool = False
    entropy_coefficient: float = 0.0
    top_entropy_fraction: float = 1.0
    off_policy_kl_max: float | None = None
    correction: Correction = "none"
    correction_ratio_min: float = 0.0
    correction_ratio_max: float = 2.0

    @property
    def needs_base(self) -> bool:
        """Whether the base's log-probs are needed."""
        return self.kl_coefficient > 0 and self.kl_to == "base"

    @property
    def needs_all_groups(self) -> bool:
        """Whether groups with equal rewards have a gradient, by KL to the base or the entropy bonus.

        KL in the reward makes rewards differ; divided by their standard deviation, KL alone would count as much as
        rewards, so such groups are dropped with `group_std`. KL to the sampler does not count, as in prime-rl.
        """
        is_amplified = self.kl_placement == "reward" and self.advantage == "group_std"
        return self.entropy_coefficient > 0 or (self.needs_base and not is_amplified)


def token_weight(objective: Objective, *, length: int, num_tokens: int, num_completions: int, max_tokens: int) -> float:
    """Weight of one token's loss in the step's loss.

    `length`: trained tokens of its completion. `num_tokens`, `num_completions`: those of the step. `max_tokens`: the
    limit of a completion.
    """
    if objective.aggregation == "token_mean":
        return 1.0 / max(num_tokens, 1)
    if objective.aggregation == "seq_mean_token_mean":
        return 1.0 / (max(num_completions, 1) * max(length, 1))
    if objective.aggregation == "seq_mean_token_sum":
        return 1.0 / max(num_completions, 1)
    return 1.0 / (max(num_completions, 1) * max_tokens)


def entropy_threshold(entropies_N: np.ndarray, fraction: float) -> float:
    """The entropy that `fraction` of a step's trained tokens reach or exceed: https://arxiv.org/abs/2506.01939"""
    return float(np.quantile(entropies_N, 1 - fraction))
