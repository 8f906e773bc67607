"""What each of several policies takes from the run, and which mistakes are named. Nothing is trained here."""

from collections.abc import Mapping
from typing import Any

import pytest
from omegaconf import OmegaConf

from parallm.config.command_line import repeated_keys
from parallm.config.schema import RunConfig, policy_configs, to_config
from parallm.environment.settings import ArithmeticSettings
from parallm.errors import ConfigError
from parallm.reports import TrainingStatus
from parallm.run.policy_runs import combined_status


def run_config(**values: Any) -> RunConfig:
    return to_config(OmegaConf.create(values), RunConfig)


def test_without_policies_a_run_trains_the_one_called_policy() -> None:
    config = run_config(seed=3)
    assert policy_configs(config) == {"policy": config}


def test_a_policy_differs_from_the_run_in_what_it_names_only() -> None:
    own = {"learner": {"learning_rate": 0.5}, "trainer": {"guard": {"max_skips": 7}}}
    config = run_config(learner={"warmup_steps": 2}, trainer={"guard": {"max_rollbacks": 9}}, policies={"poet": own})
    poet = policy_configs(config)["poet"]
    assert (poet.learner.learning_rate, poet.learner.warmup_steps) == (0.5, 2)
    assert (poet.trainer.guard.max_skips, poet.trainer.guard.max_rollbacks) == (7, 9)
    assert (poet.rollout, poet.policies) == (config.rollout, {})


def test_another_environment_does_not_inherit_the_keys_of_the_usual_one() -> None:
    configs = policy_configs(
        run_config(
            environment={"name": "arithmetic", "levels": [1]},
            policies={"a": {"environment": {"name": "gsm8k", "limit": 16}}, "b": {"environment": {"num_test": 7}}},
        )
    )
    assert configs["a"].environment.name == "gsm8k"
    assert configs["b"].environment == ArithmeticSettings(levels=(1,), num_test=7)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"policies": {"base": {}}}, r"policies\.base: the name means something else in requests or folders"),
        ({"policies": {"best": {}}}, r"policies\.best: the name means something else"),
        ({"policies": {"step_12": {}}}, r"policies\.step_12: the name means something else"),
        ({"policies": {"Poet": {}, "poet": {}}}, r"policies\.poet: differs from Poet in case only"),
        ({"policies": {"a@1": {}}}, r"policies: a@1: 'a@1' must match pattern"),
        ({"policies": {"a": {"server": {}}}}, r"policies: a\.server: 'server' must be 'environment', 'learner'"),
        ({"policies": {"a": {"environment": "gsm8k"}}}, r"policies: a\.environment: 'gsm8k' must be a valid dict"),
        ({"policies": {"a": {"environment": {"name": "gsm"}}}}, r"policies\.a\.environment: name 'gsm' is unknown"),
        ({"policies": {"a": {"environment": {"name": "custom"}}}}, r"policies\.a\.environment\.target: must be given"),
        (
            {"policies": {"a": {"trainer": {"keep_serving": True}}}},
            r"a\.trainer\.keep_serving: holds for the whole run",
        ),
        ({"policies": {"a": {}}, "metrics": {"wandb": "offline"}}, "metrics.wandb=offline logs one policy"),
        ({"policies": {"a": {}}, "metrics": {"trackio": True}}, "metrics.trackio=true logs one policy"),
        ({"policies": {"a": {}}, "metrics": {"display": "live"}}, "metrics.display=live shows one policy"),
        ({"policies": {"a": {}}, "checkpoint": {"resume": "runs/1"}}, "resume=runs/1 is one checkpoint and cannot be"),
    ],
)
def test_what_policies_cannot_be_is_named(values: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run_config(**values)


def test_the_mistakes_of_all_policies_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        run_config(policies={"a": {"learner": {"rate": 1}}, "b": {"rollout": {"group_size": 0}}})
    lines = str(error.value).splitlines()
    assert lines[0].startswith("policies.a.learner.rate: unknown key, did you mean ratio?")
    assert lines[1] == "policies.b.rollout.group_size: 0 must be greater than or equal to 2"


def test_two_policies_of_one_name_on_the_command_line_are_refused() -> None:
    assert repeated_keys(["+policies={a: {}, a: {}}"]) == ["policies: found duplicate key a"]
    assert repeated_keys(["policies={a: {}, b: {}}", "learner=gspo", "name={", "seed=0,1"]) == []


def test_the_status_is_that_of_the_policy_with_the_most_to_do() -> None:
    statuses = {
        "a": TrainingStatus(state="failed", step=1, total_steps=2, message="no disk"),
        "b": TrainingStatus(state="updating", step=1, total_steps=9, version=1, metrics={"loss": 2.0}),
    }
    status = combined_status(statuses)
    assert (status.state, status.step, status.total_steps, status.version) == ("updating", 1, 9, 1)
    assert (status.policies, status.message) == (statuses, "a: no disk")
    assert combined_status({"b": statuses["b"]}) == statuses["b"]
