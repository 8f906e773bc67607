"""Which kind of training a configuration asks for, and which of its keys change nothing in it."""

from dataclasses import asdict
from typing import Any

import pytest
from pydantic import TypeAdapter

from parallm.config.run_kinds import (
    SWITCHES,
    UNUSED,
    RunKind,
    flat_keys,
    keys_of_what_is_off,
    keys_without_effect,
    kind_of,
    plays_environment,
)
from parallm.config.schema import RunConfig, policy_configs
from parallm.errors import ConfigError
from parallm.learner.settings import LearnerSettings
from parallm.rollout.settings import RolloutSettings
from parallm.trainer.settings import TrainerSettings

SFT = {"preset": "sft", "data": "x"}


def config(**parts: Any) -> RunConfig:
    found: RunConfig = TypeAdapter(RunConfig).validate_python(parts)
    return found


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ({}, "rollouts"),
        ({"learner": {"preset": "gspo"}}, "rollouts"),
        ({"rollout": {"source": "live"}}, "live"),
        ({"rollout": {"source": "atropos"}}, "atropos"),
        ({"learner": {"preset": "sft", "data": "x.jsonl"}}, "sft"),
        ({"learner": {"trains": "reward_model", "data": "x.jsonl"}}, "reward_model"),
    ],
)
def test_learner_and_rollout_make_the_kind_of_a_run(values: dict[str, Any], kind: RunKind) -> None:
    assert kind_of(config(**values)) == kind


@pytest.mark.parametrize(
    ("values", "line"),
    [
        (
            {"learner": {"preset": "sft", "data": "x"}, "rollout": {"temperature": 0.7}},
            "rollout.temperature=0.7 has no effect with learner=sft",
        ),
        (
            {"learner": {"preset": "sft", "data": "x"}, "trainer": {"guard": {"max_kl": 1.0}}},
            "trainer.guard.max_kl=1.0 has no effect with learner=sft",
        ),
        (
            {"rollout": {"source": "live", "curriculum": {"by": "level"}}},
            "rollout.curriculum.by=level has no effect with rollout.source=live",
        ),
        (
            {"rollout": {"live": {"wait_seconds": 5}}},
            "rollout.live.wait_seconds=5.0 has no effect with rollout.source=environment",
        ),
        (
            {"rollout": {"reward_model": {"weight": 2.0}}},
            "rollout.reward_model.weight=2.0 has no effect without rollout.reward_model.adapter",
        ),
        (
            {"environment": {"name": "gsm8k"}, "rollout": {"max_turns": 3}},
            "rollout.max_turns=3 has no effect without an environment of several turns",
        ),
        (
            {"trainer": {"publish_margin": 0.1}},
            "trainer.publish_margin=0.1 has no effect without trainer.publish_if=evaluation",
        ),
        (
            {"trainer": {"evaluate_problems": 0, "evaluate_every": 5}},
            "trainer.evaluate_every=5 has no effect without trainer.evaluate_problems",
        ),
        (
            {"rollout": {"curriculum": {"window": 8}}},
            "rollout.curriculum.window=8 has no effect without rollout.curriculum.by",
        ),
        (
            {"rollout": {"refill_rounds": 0, "refill_below": 0.9}},
            "rollout.refill_below=0.9 has no effect without rollout.refill_rounds",
        ),
        (
            {"learner": {"data_reward_min": 0.5}},
            "learner.data_reward_min=0.5 has no effect without learner=sft",
        ),
        (
            {"learner": {"preset": "sft", "data": "x"}, "trainer": {"evaluate_samples": 8}},
            "trainer.evaluate_samples=8 has no effect without trainer.evaluate_on=environment",
        ),
        (
            {"learner": {"preset": "sft", "data": "x"}, "rollout": {"reward_model": {"adapter": "rm"}}},
            "rollout.reward_model.adapter=rm has no effect without trainer.evaluate_on=environment",
        ),
        (
            {"learner": {"trains": "reward_model", "data": "x"}, "rollout": {"reward_model": {"adapter": "rm"}}},
            "rollout.reward_model.adapter=rm has no effect with learner=reward_model",
        ),
    ],
)
def test_a_key_that_changes_nothing_is_named(values: dict[str, Any], line: str) -> None:
    assert [*keys_without_effect(config(**values))] == [line]


@pytest.mark.parametrize(
    ("values", "line"),
    [
        (
            {"server": {"enabled": False, "port": 9000}},
            "server.port=9000 has no effect without server.enabled=true",
        ),
        ({"registry": {"keep_alive": 5}}, "registry.keep_alive=5.0 has no effect without registry.enabled=true"),
        (
            {"metrics": {"project": "mine"}},
            "metrics.project=mine has no effect without metrics.wandb or metrics.trackio",
        ),
    ],
)
def test_a_key_of_what_is_off_is_named(values: dict[str, Any], line: str) -> None:
    given = config(**values)
    assert [*keys_of_what_is_off(given.server, given.registry, given.metrics)] == [line]


def test_keys_of_what_is_on_are_not_named() -> None:
    on = {"server": {"port": 9000}, "registry": {"enabled": True, "keep_alive": 5}}
    given = config(**on, metrics={"project": "mine", "wandb": "offline"})
    assert [*keys_of_what_is_off(given.server, given.registry, given.metrics)] == []


CALCULATOR = {"name": "calculator"}


def test_what_has_an_effect_is_not_named() -> None:
    rollout = {"temperature": 0.7, "overlong_buffer": 8, "overlong_weight": 2.0, "switch_in_flight": True}
    trainer = {"max_off_policy_steps": 2, "publish_if": "evaluation", "publish_margin": 0.1}
    assert [*keys_without_effect(config(rollout=rollout, trainer=trainer))] == []
    live = {"source": "live", "group_size": 4, "max_tokens": 9, "live": {"wait_seconds": 1, "weights": {"thumbs": 2.0}}}
    assert [*keys_without_effect(config(rollout=live, trainer={"max_off_policy_steps": 2}))] == []
    for environment in (
        CALCULATOR,
        {"name": "custom", "target": "a:B"},
        {"name": "mixed", "parts": {"a": {"environment": {"name": "gsm8k"}}, "b": {"environment": CALCULATOR}}},
    ):
        assert [*keys_without_effect(config(environment=environment, rollout={"max_turns": 3}))] == []
    played = {"evaluate_on": "environment", "evaluate_samples": 8}
    assert [*keys_without_effect(config(learner={"preset": "sft", "data": "x"}, trainer=played))] == []


def test_the_table_names_keys_that_exist() -> None:
    parts = {"learner": LearnerSettings(), "rollout": RolloutSettings(), "trainer": TrainerSettings()}
    keys = [key for part, settings in parts.items() for key in flat_keys(asdict(settings), f"{part}.")]  # type: ignore[call-overload]
    for named in {*SWITCHES, *(key for keys_of_kind in UNUSED.values() for key in keys_of_kind)}:
        assert any(key == named or key.startswith(f"{named}.") for key in keys), named


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


def test_a_reward_model_plays_no_environment() -> None:
    parts = {"learner": {"trains": "reward_model", "data": "x"}, "environment": {"name": "calculator"}}
    policy_configs(config(**parts, trainer={"evaluate_on": "data"}))
    with pytest.raises(ConfigError, match=r"trainer\.evaluate_on=environment is for policies"):
        policy_configs(config(**parts, trainer={"evaluate_on": "environment"}))
