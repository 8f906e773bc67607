"""The keys that each loss uses. A key that is given and changes nothing in the chosen loss is refused by its name."""

from collections.abc import Iterator, Mapping
from typing import Any, get_args

from parallm.learner.objective import Objective
from parallm.learner.settings import PolicyTerm

ALL: tuple[PolicyTerm, ...] = get_args(PolicyTerm)
OF_SAMPLES = tuple(term for term in ALL if term != "likelihood")
"""Policy terms for completions that a policy has sampled; the others' log-probs of sampling are unknown."""

POLICIES: Mapping[str, tuple[PolicyTerm, ...]] = {
    "advantage": OF_SAMPLES,
    "ratio": tuple(term for term in OF_SAMPLES if term != "vespo"),
    "clip_low": ("ppo",),
    "clip_high": ("ppo",),
    "dual_clip_ratio_max": ("ppo",),
    "cispo_ratio_max": ("cispo",),
    "probability_fall_max": ("dppo_tv", "ipo"),
    "probability_rise_max": ("dppo_tv", "ipo"),
    "sapo_temperature_positive": ("sapo",),
    "sapo_temperature_negative": ("sapo",),
    "kl_unbiased": OF_SAMPLES,
    "off_policy_kl_max": OF_SAMPLES,
    "correction": OF_SAMPLES,
    "correction_ratio_min": OF_SAMPLES,
    "correction_ratio_max": OF_SAMPLES,
}
"""The policy terms that use a key; keys that are not here are for all of them."""
SWITCHES: Mapping[str, str] = {
    "kl_estimator": "kl_coefficient",
    "kl_placement": "kl_coefficient",
    "kl_to": "kl_coefficient",
    "kl_unbiased": "kl_coefficient",
    "correction_ratio_min": "correction",
    "correction_ratio_max": "correction",
}
"""Keys that count only where another one turns on what they are about."""
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
"""Keys about how far a ratio or a probability may move. A correction takes ratios to the learner's own policy at the
start of the step, and a step has one update: there is nothing left to bound. Of cispo's ratio only its value counts."""


def unused_keys(given: Mapping[str, Any], objective: Objective) -> Iterator[str]:
    """One line for each of the `given` keys, which are in `objective` already, that the loss does not use."""
    for key, value in given.items():
        named, switch = f"learner.{key}={value}", SWITCHES.get(key)
        policies = POLICIES.get(key, ALL)
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
