"""From YAML and a command line to settings, and what is said about mistakes."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf

from parallm.config.errors import explain_composition, explain_values
from parallm.config.run_folder import run_folder
from parallm.config.schema import COMMANDS, RunConfig, known_keys, register_defaults, shipped, to_config
from parallm.environment.settings import (
    ArithmeticSettings,
    CalculatorSettings,
    CustomSettings,
    Gsm8kSettings,
    MixedPart,
    MixedSettings,
)
from parallm.errors import ConfigError


def config_of(*overrides: str) -> RunConfig:
    config = config_of_command("train", *overrides)
    assert isinstance(config, RunConfig)
    return config


def config_of_command(name: str, *overrides: str) -> object:
    register_defaults(COMMANDS[name])
    with initialize_config_dir(str(shipped("conf")), version_base="1.3"):
        return to_config(compose(name, list(overrides)), COMMANDS[name])


def complaint_about(*overrides: str, command: str = "train") -> list[str]:
    with pytest.raises(ConfigError) as raised:
        config_of_command(command, *overrides)
    return str(raised.value).splitlines()


def test_the_network_choice_brings_a_key_of_the_environment() -> None:
    (key,) = config_of("server=network").server.api_keys
    assert (key.name, key.role, key.env) == ("operator", "admin", "PARALLM_API_KEY")
    (line,) = complaint_about("server.api_keys=[{name: a, role: root}]")
    assert line == "server.api_keys: 'root' must be 'inference', 'training' or 'admin'"


def test_an_allowed_host_that_no_request_can_name_is_refused() -> None:
    (line,) = complaint_about("server.allowed_hosts=['http://llm.example.org:8000']")
    assert line == (
        "server.allowed_hosts: 'http://llm.example.org:8000' must be a name without scheme and port, such as "
        "llm.example.org, or *"
    )


def test_the_name_of_a_key_that_reads_as_a_number_stands_in_quotes() -> None:
    (line,) = complaint_about("server.api_keys=[{name: inf, role: admin, env: KEY}]")
    assert line == "server.api_keys: inf must stand in quotes, since it reads as a number"
    (key,) = config_of("server.api_keys=[{name: 'inf', role: admin, env: KEY}]").server.api_keys
    assert key.name == "inf"


def test_without_overrides_every_value_is_the_default_of_its_settings_class() -> None:
    assert config_of() == RunConfig(name="run")


@pytest.mark.parametrize("name", ["serve", "evaluate", "export"])
def test_every_command_begins_with_the_defaults_of_its_settings_classes(name: str) -> None:
    assert config_of_command(name) == COMMANDS[name]()


def test_a_key_that_only_training_uses_is_refused_by_other_commands() -> None:
    (line,) = complaint_about("+rollout.group_size=4", command="evaluate")
    assert line == "rollout.group_size: belongs to parallm.train; this command does not use it"
    (line,) = complaint_about("+metrics.wandb=online", command="serve")
    assert line == "metrics.wandb: belongs to parallm.train; this command does not use it"
    (line,) = complaint_about("+model.lora.rank=4", command="export")
    assert line == "model.lora: belongs to parallm.train and parallm.serve; this command does not use it"


def test_shares_of_the_device_are_refused_by_their_former_names() -> None:
    assert complaint_about("engine.serving_share=0.5", "learner.engine_share=0.2") == [
        "engine.serving_share: renamed, set device.serving_share",
        "learner.engine_share: renamed, set device.engine_share",
    ]
    (line,) = complaint_about("policies={poet: {learner: {engine_share: 0.2}}}")
    assert line == "policies.poet.learner.engine_share: renamed, set device.engine_share"
    (line,) = complaint_about("+device.engine_share=0.2", command="serve")
    assert line == "device.engine_share: belongs to parallm.train; this command does not use it"


def test_a_misspelt_key_is_no_key_of_another_command() -> None:
    (line,) = complaint_about("+rollout.group_siz=4", command="evaluate")
    assert line == "rollout.group_siz: unknown key; choices: max_tokens, max_turns, score_seconds, reward_model"


def test_a_key_that_no_yaml_names_is_set_without_a_plus() -> None:
    assert config_of("learner.learning_rate=1e-4").learner.learning_rate == 1e-4


def test_a_choice_changes_only_what_it_names() -> None:
    config = config_of("learner=dr_grpo", "server=off")
    assert (config.learner.preset, config.server.enabled, config.server.port) == ("dr_grpo", False, 8000)


def test_nested_keys_and_lists_are_read() -> None:
    lora = config_of("model.lora.rank=8", "model.lora.targets=[q_proj,v_proj]").model.lora
    assert (lora.rank, lora.targets) == (8, ("q_proj", "v_proj"))


def test_ranks_by_name_and_layers_are_read() -> None:
    lora = config_of("model.lora.ranks.q_proj=8", "+model.lora.ranks.v_proj=2", "model.lora.layers=8-15").model.lora
    assert (lora.ranks, lora.layers) == ({"q_proj": 8, "v_proj": 2}, "8-15")
    lora = config_of("model.lora.ranks={q_proj: 4}", "model.lora.layers=[0,3]").model.lora
    assert (lora.ranks, lora.layers) == ({"q_proj": 4}, (0, 3))


def test_each_environment_has_its_own_keys() -> None:
    assert config_of("environment.levels=[1]").environment == ArithmeticSettings(levels=(1,))
    assert config_of("environment=gsm8k", "environment.limit=16").environment == Gsm8kSettings(limit=16)


def test_an_own_environment_takes_any_options() -> None:
    config = config_of("environment=custom", "environment.target=mine:Maze", "environment.options.width=3")
    assert config.environment == CustomSettings(target="mine:Maze", options={"width": 3})


def test_mixed_environments_have_names_weights_and_settings_of_their_own() -> None:
    easy = "easy:{weight:3,environment:{name:arithmetic,levels:[1]}}"
    config = config_of("environment=mixed", f"environment.parts={{{easy},tool:{{environment:{{name:calculator}}}}}}")
    assert config.environment == MixedSettings(
        parts={
            "easy": MixedPart(weight=3, environment=ArithmeticSettings(levels=(1,))),
            "tool": MixedPart(weight=1, environment=CalculatorSettings()),
        }
    )


def test_a_mistake_inside_a_part_of_a_mixture_is_named_with_its_place() -> None:
    (line,) = complaint_about("environment=mixed", "environment.parts={a:{environment:{name:arithmetic,level:[1]}}}")
    assert line == "environment.parts: a.environment.arithmetic.level: unknown key"
    (line,) = complaint_about("environment=mixed", "environment.parts={a:{weight:1}}")
    assert line == "environment.parts: a.environment must be given"


def test_limits_that_exclude_each_other_are_named_alone() -> None:
    assert complaint_about("rollout.curriculum.low=0.95") == ["rollout.curriculum: low=0.95 must be below high=0.9"]
    (line,) = complaint_about("rollout.overlong_buffer=300")
    assert line == "rollout: overlong_buffer=300 must be at most max_tokens=256"


def test_an_unknown_key_is_named_with_the_nearest_and_all_choices() -> None:
    (line,) = complaint_about("server.prt=1")
    assert line.startswith("server.prt: unknown key, did you mean port? choices: enabled, host, port, ")


def test_all_mistakes_are_named_at_once() -> None:
    lines = complaint_about("learner.learning_rat=1", "trainer.steps=many", "environment.limit=3", "seed=-1")
    assert {line.split(":")[0] for line in lines} == {
        "learner.learning_rat",
        "trainer.steps",
        "environment.limit",
        "seed",
    }


def test_a_wrong_type_is_named_with_its_value() -> None:
    assert complaint_about("rollout.max_tokens=abc")[0].startswith("rollout.max_tokens: 'abc' must be a valid integer")


def test_a_wrong_choice_is_named_with_the_choices() -> None:
    assert complaint_about("learner.kl_estimator=k4") == ["learner.kl_estimator: 'k4' must be 'k1', 'k2' or 'k3'"]


def test_choices_of_a_loss_that_contradict_each_other_are_named() -> None:
    (line,) = complaint_about("learner=gspo", "learner.dual_clip_ratio_max=1.0001")
    assert line == "learner.dual_clip_ratio_max=1.0001 must be above 1 + learner.clip_high = 1.0004"


@pytest.mark.parametrize(
    "overrides",
    [
        ("distributed.workers=2",),
        ("distributed=mlx", "policies={poet: {}}"),
        ("distributed=mlx", "rollout=live"),
        ("distributed=mlx", "distributed.min_workers=1"),
        ("distributed=ray", "distributed.min_workers=1"),
        ("distributed=ray", "distributed.workers=2", "distributed.min_workers=3"),
        ("distributed=mlx", "learner=reward_model", "learner.data=pairs.jsonl"),
        ("distributed=mlx", "rollout.curriculum.by=level", "trainer.max_off_policy_steps=1"),
    ],
)
def test_what_several_workers_cannot_do_is_refused(overrides: tuple[str, ...]) -> None:
    (line,) = complaint_about(*overrides)
    assert line.startswith("distributed")
    assert config_of("distributed=mlx", "distributed.workers=2", "learner.preset=gspo").distributed.workers == 2


@pytest.mark.parametrize("key", ["tasks.pooling=mean", "tasks.score_template=qwen3_reranker", "tasks.matryoshka=true"])
def test_keys_of_requests_are_refused_without_a_server(key: str) -> None:
    (line,) = complaint_about("server=off", key)
    assert line == "tasks.*: keys for requests over HTTP; set server.enabled=true, or leave them out"
    assert config_of(key).server.enabled


def test_training_of_vectors_reads_the_end_of_texts_without_a_server() -> None:
    (line,) = complaint_about("server=off", "tasks.end_token=append")
    assert line.startswith("tasks.*")
    trained = ("server=off", "learner=embedding", "learner.data=pairs.jsonl")
    assert config_of(*trained, "tasks.end_token=append").tasks.end_token == "append"
    (line,) = complaint_about(*trained, "tasks.pooling=mean")
    assert line.startswith("tasks.*")


def test_more_k_than_samples_are_refused() -> None:
    (line,) = complaint_about("trainer.evaluate_samples=4", "trainer.evaluate_k=[1,8]")
    assert line.startswith("trainer: evaluate_k=[1, 8] needs as many samples as its largest number; raise evaluate_")


def test_a_value_that_allows_several_types_is_named_once() -> None:
    (line,) = complaint_about("model.lora.targets=3")
    assert line.startswith("model.lora.targets: 3 must be a valid string or ")


def test_an_unknown_environment_is_named_with_the_choices() -> None:
    (line,) = complaint_about("environment.name=gsm")
    assert line.startswith("environment: name 'gsm' is unknown, did you mean gsm8k? choices: arithmetic, gsm8k,")


@pytest.mark.parametrize("overrides", [("environment.name=gsm8k",), ("environment=gsm8k", "environment.name=custom")])
def test_an_environment_chosen_by_its_name_alone_is_told_how_to_choose(overrides: tuple[str, ...]) -> None:
    name = overrides[-1].partition("=")[2]
    (line,) = complaint_about(*overrides)
    assert line.startswith(f"environment.name={name}: an environment is chosen as a whole, by environment={name} on ")
    assert f"`defaults: [{{override /environment: {name}}}]` in a recipe" in line


def test_the_name_of_the_chosen_environment_may_be_said_again() -> None:
    assert config_of("environment=gsm8k", "environment.name=gsm8k").environment == Gsm8kSettings()


def test_a_value_that_must_be_given_is_named() -> None:
    assert complaint_about("environment=custom") == ["environment.target: must be given"]


def test_a_broken_interpolation_is_a_config_error() -> None:
    assert complaint_about("name=${nothing}") == ["Interpolation key 'nothing' not found"]


def test_a_name_cannot_leave_the_folder_of_runs() -> None:
    assert complaint_about("name=../x")[0].startswith("name: '../x' must match pattern")


def test_an_unknown_key_at_the_top_of_a_recipe_is_named() -> None:
    with pytest.raises(ConfigError, match=r"lerner: unknown key, did you mean learner\?"):
        to_config(OmegaConf.create({"lerner": {"preset": "dapo"}}), RunConfig)


def test_known_keys_hold_every_environment_by_name() -> None:
    assert set(known_keys()["environment"]) == {"arithmetic", "gsm8k", "custom", "calculator", "verifiers", "mixed"}


def test_a_choice_that_another_command_has_is_explained() -> None:
    error = ConfigCompositionException("Could not override 'rollout'. No match in the defaults list.")
    line = explain_composition(error, ["rollout=live"], known_keys(COMMANDS["evaluate"]), {})
    assert line == "rollout: this command has no choices of it; set its keys, which --help rollout shows"


def test_nothing_wrong_needs_no_explanation() -> None:
    assert explain_values([], known_keys()) == ""


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three runs named `a`, of which the first two hold a checkpoint."""
    monkeypatch.chdir(tmp_path)
    runs = tmp_path / "checkpoints" / "a"
    (runs / "2025-01-01" / "step_000010").mkdir(parents=True)
    (runs / "2025-01-02" / "step_000010").mkdir(parents=True)
    (runs / "2025-01-03").mkdir()
    (runs / "sweep_2025-01-04").mkdir()
    return runs


def test_a_new_run_gets_a_folder_of_its_own(runs: Path) -> None:
    assert run_folder("a", "never", "2025-01-05") == "checkpoints/a/2025-01-05"


def test_resume_auto_goes_on_in_the_newest_run_with_a_checkpoint(runs: Path) -> None:
    assert run_folder("a", "auto", "2025-01-05") == "checkpoints/a/2025-01-02"


def test_resume_auto_goes_on_with_what_clients_were_asked_to_reward(runs: Path) -> None:
    (runs / "2025-01-04").mkdir(exist_ok=True)
    (runs / "2025-01-04" / "trajectories.jsonl").touch()
    assert run_folder("a", "auto", "2025-01-05") == "checkpoints/a/2025-01-04"
    (runs / "2025-01-04a" / "serving-0123456789ab").mkdir(parents=True)
    assert run_folder("a", "auto", "2025-01-05") == "checkpoints/a/2025-01-04"
    (runs / "2025-01-04a" / "serving-0123456789ab" / "serving.json").touch()
    assert run_folder("a", "auto", "2025-01-05") == "checkpoints/a/2025-01-04a"


def test_resume_auto_without_any_checkpoint_starts_a_run(runs: Path) -> None:
    assert run_folder("b", "auto", "2025-01-05") == "checkpoints/b/2025-01-05"


def test_a_name_that_will_be_refused_gets_no_folder_outside_of_the_runs() -> None:
    assert run_folder("../x", "never", "2025-01-05") == "checkpoints/run/2025-01-05"


def test_a_checkpoint_named_by_its_folder_starts_a_run(runs: Path) -> None:
    assert run_folder("a", str(runs / "2025-01-01"), "2025-01-05") == "checkpoints/a/2025-01-05"


def test_learning_from_clients_needs_clients_and_no_file() -> None:
    lines = complaint_about("rollout=live", "server=off", "learner=sft", "learner.data=demos.jsonl")
    assert [line.partition(":")[0] for line in lines] == ["rollout.source=live learns from requests"] * 2
    assert "server.enabled=true" in lines[0]
    assert "learner.data" in lines[1]


def test_learning_from_atropos_needs_requests_and_no_kl_in_rewards() -> None:
    kl = ("learner.kl_placement=reward", "learner.kl_coefficient=0.1")
    lines = complaint_about("rollout=atropos", "server=off", *kl)
    assert [line.partition(" ")[0] for line in lines] == ["rollout.source=atropos", "rollout.source=atropos:"]
    assert "server.enabled=true" in lines[0]
    assert "learner.kl_placement=loss" in lines[1]
    assert config_of("rollout=atropos", kl[1]).rollout.source == "atropos"


def test_completions_without_groups_need_a_baseline_of_the_step() -> None:
    (line,) = complaint_about("rollout=live", "rollout.live.group_by=none")
    assert "learner.advantage=group_std compares the completions of a group" in line
    chosen = config_of("rollout=live", "rollout.live.group_by=none", "learner.advantage=reinforce_pp")
    assert chosen.rollout.live.group_by == "none"


def test_of_several_policies_each_chooses_where_it_learns_from() -> None:
    policies = "policies={poet: {rollout: {source: live, live: {group_by: none}}}, coder: {}}"
    (line,) = complaint_about(policies)
    assert line.startswith("policies.poet.rollout.live.group_by=none")


def test_scoring_functions_have_names_of_their_own() -> None:
    functions = config_of("rollout=live", "+rollout.live.scoring_functions.length=own:length").rollout.live
    assert functions.scoring_functions == {"length": "own:length"}
