"""Presets and what a user changes of them."""

from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest
import yaml

from parallm.errors import ConfigError
from parallm.learner.loss.objective import PRESETS, Objective, resolve_objective
from parallm.learner.settings import LearnerSettings, Preset

CONF = Path(__file__).parents[3] / "conf" / "learner"


def test_every_preset_is_a_choice_with_a_file_of_its_name() -> None:
    names = set(get_args(Preset))
    assert set(PRESETS) == names
    assert {path.stem: yaml.safe_load(path.read_text()) for path in CONF.glob("*.yaml")} == {
        **{name: {"preset": name} for name in names},
        **{name: {"trains": name} for name in ("reward_model", "embedding", "classifier")},
    }


def test_every_choice_of_an_objective_can_be_changed_and_is_otherwise_the_presets() -> None:
    for field in fields(Objective):
        assert getattr(LearnerSettings(), field.name) is None
    for name in get_args(Preset):
        assert resolve_objective(LearnerSettings(preset=name)) == PRESETS[name]


def test_a_change_leaves_the_rest_of_the_preset() -> None:
    found = resolve_objective(LearnerSettings(preset="gspo", kl_coefficient=0.001, clip_high=0.0))
    assert (found.kl_coefficient, found.clip_high, found.clip_low, found.ratio) == (0.001, 0.0, 3e-4, "sequence")


def test_dapo_is_as_published() -> None:
    published = Objective(advantage="group_std", aggregation="token_mean", clip_low=0.2, clip_high=0.28)
    assert PRESETS["dapo"] == published


def test_only_dppo_has_kl_and_it_needs_no_base() -> None:
    assert [name for name, one in PRESETS.items() if one.kl_coefficient > 0] == ["dppo"]
    assert not any(one.needs_base for one in PRESETS.values())
    assert resolve_objective(LearnerSettings(preset="rloo", kl_coefficient=0.05)).needs_base


@pytest.mark.parametrize(
    ("choices", "complaint"),
    [
        ({"dual_clip_ratio_max": 1.1}, r"dual_clip_ratio_max=1\.1 must be above 1 \+ learner\.clip_high = 1\.28"),
        (
            {"correction_ratio_min": 3.0, "correction": "token_mask"},
            r"correction_ratio_min=3 must not be above learner\.correction_ratio_max=2",
        ),
        ({"policy": "vespo", "correction": "token_mask"}, "correction=token_mask would do so twice"),
        (
            {"kl_placement": "reward", "kl_to": "behaviour", "kl_coefficient": 0.1},
            "choose kl_to=base or kl_placement=loss",
        ),
        (
            {"advantage": "max_rl", "kl_placement": "reward", "kl_coefficient": 0.1},
            r"choose learner\.kl_placement=loss",
        ),
    ],
    ids=["dual clip", "correction", "vespo", "kl", "max_rl"],
)
def test_choices_that_contradict_each_other_are_refused(choices: dict[str, object], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        resolve_objective(LearnerSettings(**choices))  # type: ignore[arg-type]


def test_all_contradictions_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as raised:
        resolve_objective(LearnerSettings(dual_clip_ratio_max=1.1, kl_estimator="k1"))
    assert len(str(raised.value).splitlines()) == 2


@pytest.mark.parametrize(
    ("choices", "needs_all"),
    [
        ({}, False),
        ({"kl_coefficient": 0.01}, True),
        ({"kl_coefficient": 0.01, "kl_to": "behaviour"}, False),
        ({"preset": "dppo"}, False),
        ({"entropy_coefficient": 0.01}, True),
        ({"preset": "rloo", "kl_coefficient": 0.05}, True),
        ({"preset": "grpo", "kl_coefficient": 0.05, "kl_placement": "reward"}, False),  # its std would blow KL up
        ({"preset": "dr_grpo", "kl_coefficient": 0.05, "kl_placement": "reward"}, True),
        ({"preset": "reinforce_pp"}, True),  # whitened over all tokens of the step
        ({"advantage": "reinforce_pp"}, True),
        ({"advantage": "batch_std"}, True),
        ({"advantage": "reward"}, True),
    ],
    ids=str,
)
def test_groups_of_equal_rewards_are_needed_where_they_count_for_the_gradient(
    choices: dict[str, object], needs_all: bool
) -> None:
    assert resolve_objective(LearnerSettings(**choices)).needs_all_groups == needs_all  # type: ignore[arg-type]
