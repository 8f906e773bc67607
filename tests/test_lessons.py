"""What evaluations of a run ask, from its configuration."""

from typing import Any

import pytest
from pydantic import TypeAdapter

from parallm.config import RunConfig, policy_configs
from parallm.errors import ConfigError
from parallm.lessons import plays_environment

SFT = {"preset": "sft", "data": "x"}


def config(**parts: Any) -> RunConfig:
    found: RunConfig = TypeAdapter(RunConfig).validate_python(parts)
    return found


@pytest.mark.parametrize(
    ("parts", "plays"),
    [
        ({}, True),
        ({"learner": SFT}, False),
        ({"learner": SFT, "environment": {"name": "arithmetic", "num_test": 64}}, True),
        ({"learner": SFT, "environment": {"name": "calculator"}}, True),
        ({"learner": SFT, "trainer": {"evaluate_on": "environment"}}, True),
        ({"learner": SFT, "environment": {"name": "calculator"}, "trainer": {"evaluate_on": "data"}}, False),
        ({"learner": {"trains": "reward_model", "data": "x"}, "environment": {"name": "calculator"}}, False),
    ],
)
def test_policies_play_their_environment_and_supervised_runs_one_that_was_asked_for(
    parts: dict[str, Any], plays: bool
) -> None:
    assert plays_environment(config(**parts)) is plays


def test_one_of_several_policies_that_names_an_environment_has_asked_for_it() -> None:
    policies = {"one": {"learner": SFT}, "other": {"learner": SFT, "environment": {"name": "arithmetic"}}}
    configs = policy_configs(config(policies=policies))
    assert {name: plays_environment(own) for name, own in configs.items()} == {"one": False, "other": True}


def test_a_policy_that_samples_has_no_data_to_evaluate_on() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.evaluate_on=data is for learner=sft"):
        policy_configs(config(trainer={"evaluate_on": "data"}))
