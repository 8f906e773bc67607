"""The table of keys against the loss itself: a key is refused where it does not change the gradient."""

from collections.abc import Mapping
from dataclasses import fields, replace
from itertools import product
from typing import Any, get_args

import mlx.core as mx
import numpy as np
import pytest

from parallm.errors import ConfigError
from parallm.learner.loss.objective import (
    BOUNDS,
    PRESETS,
    SWITCHES,
    TERMS_USING,
    Objective,
    resolve_objective,
    unused_keys,
)
from parallm.learner.loss.policy_loss import LossInputs, objective_loss
from parallm.learner.settings import Correction, KlPlacement, LearnerSettings, PolicyTerm

OTHER_VALUES: Mapping[str, Any] = {
    "ratio": "sequence",
    "clip_low": 0.01,
    "clip_high": 0.01,
    "dual_clip_ratio_max": 1.3,
    "cispo_ratio_max": 1.1,
    "probability_fall_max": 0.01,
    "probability_rise_max": 0.01,
    "sapo_temperature_positive": 3.0,
    "sapo_temperature_negative": 3.0,
    "kl_estimator": "k1",
    "kl_placement": "reward",
    "kl_to": "behaviour",
    "kl_unbiased": True,
    "off_policy_kl_max": 0.01,
    "correction_ratio_min": 0.9,
    "correction_ratio_max": 1.1,
}
"""Keys of the loss function that are not for every loss, each with a value that no preset has."""
OUTSIDE = ("advantage", "aggregation")
"""Keys that make what the function gets."""
LENGTHS = range(1, 13)


def gradient(objective: Objective) -> np.ndarray:
    """Of completions that are given, or that an older policy has sampled, as `PolicyGradient` calls the loss."""
    chance, count = np.random.default_rng(5), sum(LENGTHS)
    is_given = objective.policy == "likelihood"
    behaviour_N = np.zeros(count) if is_given else -chance.exponential(1.0, count)
    advantages_S = np.ones(len(LENGTHS)) if is_given else chance.normal(size=len(LENGTHS))
    new_N, base_N = (mx.array(behaviour_N + 0.5 * chance.normal(size=count), mx.float32) for _ in range(2))
    inputs = LossInputs(
        behaviour_N=mx.array(behaviour_N, mx.float32),
        advantages_N=mx.array(np.repeat(advantages_S, LENGTHS), mx.float32),
        weights_N=mx.full((count,), 0.05),
        rows_N=mx.array(np.repeat(np.arange(len(LENGTHS)), LENGTHS), mx.int32),
        num_rows=len(LENGTHS),
        old_N=new_N if objective.correction != "none" else None,
        reference_N=base_N if objective.needs_base else None,
    )
    return np.array(mx.grad(objective_loss)(new_N, -new_N, inputs, objective))


CORRECTIONS: tuple[Correction, ...] = ("none", "token_truncate")
PLACEMENTS: tuple[KlPlacement, ...] = ("loss", "reward")
BASES = {
    f"{policy}, {correction}, KL {kl} {placement}": Objective(
        policy=policy, correction=correction, kl_coefficient=kl, kl_placement=placement, kl_estimator="k3"
    )
    for policy, correction, kl, placement in product(get_args(PolicyTerm), CORRECTIONS, (0.0, 0.1), PLACEMENTS)
    if not (correction != "none" and policy in ("vespo", "likelihood"))
    and not (placement == "reward" and (kl == 0 or policy == "likelihood"))
}


ELSEWHERE = ("kl_estimator", "kl_placement", "kl_to")
"""Where KL is part of the reward, these change the advantages."""
SENSELESS = ("kl_placement", "kl_to", "kl_unbiased")
"""These take given completions for sampled ones, of probability 1: refused though they change the gradient."""


@pytest.mark.parametrize("name", BASES)
def test_the_keys_that_are_refused_are_those_that_change_nothing(name: str) -> None:
    base = BASES[name]
    skipped = (ELSEWHERE if base.kl_placement == "reward" else ()) + (SENSELESS if base.policy == "likelihood" else ())
    before = gradient(base)
    for key, value in OTHER_VALUES.items():
        changed = replace(base, **{key: value})
        if key not in skipped:
            has_changed = not np.allclose(gradient(changed), before, rtol=1e-5, atol=1e-8)
            assert ([*unused_keys({key: value}, changed)] == []) == has_changed, key


def test_every_key_of_a_loss_is_for_all_of_them_or_in_the_table() -> None:
    always = {"policy", "kl_coefficient", "entropy_coefficient", "top_entropy_fraction", "correction"}
    keys = {field.name for field in fields(Objective)}
    assert keys == OTHER_VALUES.keys() | always | set(OUTSIDE)
    assert TERMS_USING.keys() | SWITCHES.keys() | set(BOUNDS) <= keys
    assert OTHER_VALUES.keys() == (TERMS_USING.keys() - {"advantage", "correction"}) | SWITCHES.keys()


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        (
            {"preset": "sapo", "clip_high": 0.3},
            "learner.clip_high=0.3 is for learner.policy=ppo, and it is sapo here; leave it out",
        ),
        (
            {"preset": "gspo", "probability_rise_max": 0.3},
            "learner.probability_rise_max=0.3 is for learner.policy=dppo_tv or ipo, and it is ppo here; leave it out",
        ),
        (
            {"preset": "sft", "correction": "token_truncate"},
            "learner.correction=token_truncate is not for learner.policy=likelihood; leave it out",
        ),
        (
            {"preset": "sft", "advantage": "group_std"},
            "learner.advantage=group_std is not for learner.policy=likelihood; leave it out",
        ),
        (
            {"preset": "sft", "kl_coefficient": 0.1, "kl_to": "behaviour"},
            "learner.kl_to=behaviour needs completions that a policy has sampled, and those of "
            "learner.policy=likelihood are given; choose learner.kl_to=base",
        ),
        (
            {"preset": "sft", "kl_coefficient": 0.1, "kl_placement": "reward"},
            "learner.kl_placement=reward needs completions that a policy has sampled, and those of "
            "learner.policy=likelihood are given; choose learner.kl_placement=loss",
        ),
        (
            {"kl_estimator": "k1"},
            "learner.kl_estimator=k1 has no effect with learner.kl_coefficient=0.0; set that, or leave it out",
        ),
        (
            {"correction_ratio_max": 3.0},
            "learner.correction_ratio_max=3.0 has no effect with learner.correction=none; set that, or leave it out",
        ),
        (
            {"preset": "rloo", "kl_coefficient": 0.1, "kl_unbiased": True},
            "learner.kl_unbiased=True is about KL in the loss, and learner.kl_placement=reward here; leave it out",
        ),
        (
            {"clip_low": 0.1, "correction": "token_mask"},
            "learner.clip_low=0.1 has no effect with learner.correction=token_mask, under which every ratio is 1; "
            "leave one of them out",
        ),
        (
            {"trains": "reward_model", "clip_low": 0.1},
            "learner.clip_low=0.1 is about the loss of a policy, and learner=reward_model has its own; leave it out",
        ),
    ],
)
def test_what_is_refused_is_named_with_a_way_out(values: Mapping[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError) as refused:
        resolve_objective(LearnerSettings(**values))
    assert str(refused.value) == complaint


@pytest.mark.parametrize("preset", PRESETS)
def test_a_sweep_may_turn_off_what_its_other_keys_are_about(preset: str) -> None:
    given = {"kl_coefficient": 0.0, "kl_estimator": "k3"}
    assert resolve_objective(LearnerSettings(preset=preset, **given)).kl_estimator == "k3"  # type: ignore[arg-type]
