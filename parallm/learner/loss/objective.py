"""The choices that make a loss, by published names and by key, and the weight of a token in a step.

`policy_loss` has the mathematics. The names:

  dapo          grpo with the mean over all tokens, upper clip wider than the lower  https://arxiv.org/abs/2503.14476
  grpo          advantages per standard deviation, mean over tokens, then sequences  https://arxiv.org/abs/2402.03300
  bnpo          grpo with the mean over all tokens: TRL's loss of that name          https://arxiv.org/abs/2506.02864
  dr_grpo       neither standard deviation nor length divides                        https://arxiv.org/abs/2503.20783
  gspo          one ratio per completion, the geometric mean, with a narrow clip     https://arxiv.org/abs/2507.18071
  cispo         the ratio is a bounded weight, so no token loses its gradient        https://arxiv.org/abs/2506.13585
  rloo          one ratio per completion, the product; KL, if any, in the reward     https://arxiv.org/abs/2402.14740
  reinforce_pp  advantages whitened over the step; KL, if any, is k2                 https://arxiv.org/abs/2501.03262
  dppo          drops tokens by the change of their probability; KL to the sampler   https://arxiv.org/abs/2602.04879
  sapo          a soft gate in place of the clip                                     https://arxiv.org/abs/2511.20347
  sft           the mean negative log-likelihood of completions that are given, not sampled

BNPO's paper also normalises rewards by a beta distribution; TRL and ParaLLM do not. KL coefficients of published runs
are 0 here, because KL costs a forward pass of the base: set learner.kl_coefficient. DPPO's KL costs none; its limits
and its KL (1e-3 x log ratio squared) are those of prime-rl.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, get_args

import numpy as np

from parallm.errors import ConfigError
from parallm.learner.loss.advantage import OF_STEP
from parallm.learner.settings import (
    Advantage,
    Aggregation,
    Correction,
    KlEstimator,
    KlPlacement,
    KlTarget,
    LearnerSettings,
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
    def needs_scores(self) -> bool:
        """Whether batches are scored before any gradient."""
        return self.needs_base or self.top_entropy_fraction < 1

    @property
    def needs_all_groups(self) -> bool:
        """Whether groups with equal rewards count: in the advantages of all groups or as advantages, by KL to the base
        or the bonus.

        KL in the reward makes rewards differ; divided by their standard deviation, KL alone would count as much as
        rewards, so such groups are dropped with `group_std`. KL to the sampler does not count, as in prime-rl.
        """
        is_amplified = self.kl_placement == "reward" and self.advantage == "group_std"
        has_gradient = self.entropy_coefficient > 0 or (self.needs_base and not is_amplified)
        return has_gradient or self.advantage in (*OF_STEP, "reward")


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


PRESETS: Mapping[str, Objective] = {
    "dapo": Objective(advantage="group_std", clip_high=0.28),
    "grpo": Objective(advantage="group_std", aggregation="seq_mean_token_mean"),
    "bnpo": Objective(advantage="group_std"),
    "dr_grpo": Objective(aggregation="constant"),
    "gspo": Objective(
        advantage="group_std", ratio="sequence", aggregation="seq_mean_token_mean", clip_low=3e-4, clip_high=4e-4
    ),
    "cispo": Objective(advantage="group_std", policy="cispo"),
    "rloo": Objective(
        advantage="rloo",
        ratio="sequence_sum",
        aggregation="seq_mean_token_mean",
        kl_estimator="k1",
        kl_placement="reward",
    ),
    "reinforce_pp": Objective(advantage="reinforce_pp_baseline", kl_estimator="k2"),
    "dppo": Objective(policy="dppo_tv", kl_coefficient=2e-3, kl_estimator="k2", kl_to="behaviour"),
    "sapo": Objective(advantage="group_std", policy="sapo", aggregation="seq_mean_token_mean"),
    "sft": Objective(advantage="reward", policy="likelihood"),
}


def resolve_objective(settings: LearnerSettings) -> Objective:
    """The preset with the user's changes. Raises ConfigError, with a line each, for choices that contradict each other
    or that the loss does not use."""
    chosen: dict[str, Any] = {field.name: getattr(settings, field.name) for field in fields(Objective)}
    given = {name: value for name, value in chosen.items() if value is not None}
    objective = replace(PRESETS[settings.preset], **given)
    if settings.trains != "policy":
        errors = [
            f"learner.{key}={value} is about the loss of a policy, and learner={settings.trains} has its own; leave it "
            "out"
            for key, value in given.items()
        ]
    else:
        errors = [*unused_keys(given, objective), *_contradictions(objective)]
    if errors:
        raise ConfigError("\n".join(errors))
    return objective


def _contradictions(objective: Objective) -> list[str]:
    errors: list[str] = []
    dual, high = objective.dual_clip_ratio_max, 1 + objective.clip_high
    if dual is not None and dual <= high:
        errors.append(f"learner.dual_clip_ratio_max={dual:g} must be above 1 + learner.clip_high = {high:g}")
    ratio_min, ratio_max = objective.correction_ratio_min, objective.correction_ratio_max
    if ratio_min > ratio_max:
        errors.append(
            f"learner.correction_ratio_min={ratio_min:g} must not be above learner.correction_ratio_max={ratio_max:g}"
        )
    if objective.policy == "vespo" and objective.correction != "none":
        errors.append(
            f"learner.policy=vespo weighs sequences by their ratio to the sampler itself: "
            f"learner.correction={objective.correction} would do so twice, leave it at none"
        )
    if objective.advantage == "max_rl" and objective.kl_placement == "reward" and objective.kl_coefficient > 0:
        errors.append(
            "learner.advantage=max_rl needs rewards of 0 or more, and KL in the reward can take them below; "
            "choose learner.kl_placement=loss"
        )
    if objective.kl_placement == "reward" and objective.kl_to == "behaviour" and objective.kl_coefficient > 0:
        errors.append(
            "learner.kl_placement=reward with learner.kl_to=behaviour takes nothing off any reward: a policy has no "
            "distance to itself; choose kl_to=base or kl_placement=loss"
        )
    if objective.policy == "likelihood" and objective.kl_coefficient > 0:
        for key, wrong, right in (("kl_to", "behaviour", "base"), ("kl_placement", "reward", "loss")):
            if getattr(objective, key) == wrong:
                errors.append(
                    f"learner.{key}={wrong} needs completions that a policy has sampled, and those of "
                    f"learner.policy=likelihood are given; choose learner.{key}={right}"
                )
    return errors


ALL: tuple[PolicyTerm, ...] = get_args(PolicyTerm)
SAMPLED_TERMS = tuple(term for term in ALL if term != "likelihood")
"""Policy terms for sampled completions; given completions have no log-probs of sampling."""

TERMS_USING: Mapping[str, tuple[PolicyTerm, ...]] = {
    "advantage": SAMPLED_TERMS,
    "ratio": tuple(term for term in SAMPLED_TERMS if term != "vespo"),
    "clip_low": ("ppo",),
    "clip_high": ("ppo",),
    "dual_clip_ratio_max": ("ppo",),
    "cispo_ratio_max": ("cispo",),
    "probability_fall_max": ("dppo_tv", "ipo"),
    "probability_rise_max": ("dppo_tv", "ipo"),
    "sapo_temperature_positive": ("sapo",),
    "sapo_temperature_negative": ("sapo",),
    "kl_unbiased": SAMPLED_TERMS,
    "off_policy_kl_max": SAMPLED_TERMS,
    "correction": SAMPLED_TERMS,
    "correction_ratio_min": SAMPLED_TERMS,
    "correction_ratio_max": SAMPLED_TERMS,
}
"""The policy terms that use a key; all terms use the other keys."""
SWITCHES: Mapping[str, str] = {
    "kl_estimator": "kl_coefficient",
    "kl_placement": "kl_coefficient",
    "kl_to": "kl_coefficient",
    "kl_unbiased": "kl_coefficient",
    "correction_ratio_min": "correction",
    "correction_ratio_max": "correction",
}
"""Keys that need another key to be on."""
BOUNDS = (
    "clip_low",
    "clip_high",
    "dual_clip_ratio_max",
    "cispo_ratio_max",
    "probability_fall_max",
    "probability_rise_max",
    "sapo_temperature_positive",
    "sapo_temperature_negative",
)
"""Limits on how far a ratio or a probability may move. With a correction, ratios compare with the learner's own policy
at the start of the step, and a step has one update, so every ratio is 1."""


def unused_keys(given: Mapping[str, Any], objective: Objective) -> Iterator[str]:
    """One line for each of the `given` keys, already part of `objective`, that the loss does not use."""
    for key, value in given.items():
        named, switch = f"learner.{key}={value}", SWITCHES.get(key)
        policies = TERMS_USING.get(key, ALL)
        if objective.policy not in policies:
            if len(policies) > 2:
                yield f"{named} is not for learner.policy={objective.policy}; leave it out"
            else:
                users = " or ".join(policies)
                yield f"{named} is for learner.policy={users}, and it is {objective.policy} here; leave it out"
        elif switch is not None and switch not in given and not _is_on(switch, objective):
            yield f"{named} has no effect with learner.{switch}={getattr(objective, switch)}; set that, or leave it out"
        elif key == "kl_unbiased" and objective.kl_placement == "reward" and _is_on("kl_coefficient", objective):
            yield f"{named} is about KL in the loss, and learner.kl_placement=reward here; leave it out"
        elif objective.correction != "none" and (key in BOUNDS or (key, objective.policy) == ("ratio", "cispo")):
            yield (
                f"{named} has no effect with learner.correction={objective.correction}, under which every ratio is 1; "
                "leave one of them out"
            )


def _is_on(switch: str, objective: Objective) -> bool:
    return getattr(objective, switch) not in (0, "none")
