"""Recipes and the two commands as a user calls them: in a process of their own, from any folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from parallm.config import RunConfig, recipe_files, register_defaults, register_recipes, shipped, to_config
from parallm.errors import ConfigError

ROOT = Path(__file__).parent.parent
RECIPES = recipe_files(shipped("recipes"))

# The real command, with a run that only says what it was given.
PROBE = """
import sys
from parallm.command import run_command
from parallm.config import RunConfig
from parallm.errors import ModelError

def run(config, folder, blas):
    if config.seed == 13:
        raise ModelError("no such model")
    print(config.name, config.seed, config.learner.learning_rate, config.model.path, folder)
    return config.seed

sys.exit(run_command("train", RunConfig, run))
"""


def call(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", PROBE, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def recipe(name: str) -> RunConfig:
    register_defaults()
    register_recipes(shipped("recipes"))
    with initialize_config_dir(str(shipped("conf")), version_base="1.3"):
        return to_config(compose("train", [f"+recipe={name}"]), RunConfig)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_a_run_of_its_own_name(name: str) -> None:
    assert recipe(name).name == name


@pytest.mark.parametrize("path", RECIPES.values(), ids=RECIPES)
def test_a_recipe_is_short_and_says_first_what_it_shows(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert lines[0].startswith("# ")
    assert len(lines) < 20


def test_dr_grpo_differs_from_grpo_in_the_objective_only() -> None:
    plain, doctor = recipe("gsm8k_grpo"), recipe("gsm8k_dr_grpo")
    assert (plain.learner.preset, doctor.learner.preset) == ("dapo", "dr_grpo")
    assert (plain.rollout, plain.environment, plain.trainer) == (doctor.rollout, doctor.environment, doctor.trainer)


def test_a_recipe_that_is_not_yaml_is_refused_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("learner: {preset: dapo\n")
    with pytest.raises(ConfigError, match=r"(?s)mine\.yaml cannot be read:.*line 2"):
        register_recipes(tmp_path)


def test_a_recipe_that_is_no_mapping_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("- learner\n")
    with pytest.raises(ConfigError, match=r"mine\.yaml must be a mapping"):
        register_recipes(tmp_path)


def test_the_command_line_wins_over_the_recipe_and_the_recipe_over_the_groups(tmp_path: Path) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "mine.yaml").write_text("name: mine\nmodel: {path: ours}\nlearner: {learning_rate: 0.5}\n")
    result = call(tmp_path, "+recipe=mine", "learner.learning_rate=0.25")
    assert result.stdout.startswith("mine 0 0.25 ours "), result.stderr


def test_a_recipe_of_the_current_folder_wins_over_a_shipped_one(tmp_path: Path) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "gsm8k_grpo.yaml").write_text("name: own\n")
    assert call(tmp_path, "+recipe=gsm8k_grpo").stdout.startswith("own 0 ")


def test_a_run_leaves_its_configuration_in_its_folder(tmp_path: Path) -> None:
    result = call(tmp_path, "+recipe=arithmetic_grpo", "seed=0")
    folder = Path(result.stdout.split()[-1])
    assert folder.parent == tmp_path / "checkpoints" / "arithmetic_grpo"
    assert "name: arithmetic_grpo" in (folder / "config.yaml").read_text()


def test_the_exit_code_is_that_of_the_run(tmp_path: Path) -> None:
    assert call(tmp_path, "seed=5").returncode == 5


def test_an_unknown_recipe_is_named_with_the_choices_and_leaves_nothing(tmp_path: Path) -> None:
    result = call(tmp_path, "+recipe=gsm8k_gpo")
    assert result.returncode == 2
    assert result.stderr.startswith("parallm: recipe: 'gsm8k_gpo' is unknown, did you mean gsm8k_grpo? choices: ")
    assert list(tmp_path.iterdir()) == []


def test_a_misspelt_key_stops_the_command_and_leaves_no_run_folder(tmp_path: Path) -> None:
    result = call(tmp_path, "learner.learning_rat=1", "trainer.step=3")
    assert result.returncode == 2
    assert [line.split()[1] for line in result.stderr.splitlines()] == ["learner.learning_rat:", "trainer.step:"]
    assert not any((tmp_path / "checkpoints").glob("*"))


def test_misspelt_parts_and_choices_stop_the_command(tmp_path: Path) -> None:
    parts = call(tmp_path, "lerner.preset=dapo", "sed=3")
    assert [line.split()[1] for line in parts.stderr.splitlines()] == ["lerner:", "sed:"]
    choice = call(tmp_path, "server=locale")
    assert (parts.returncode, choice.returncode) == (2, 2)
    assert "server: 'locale' is unknown, did you mean local? choices: local, network, off" in choice.stderr


def test_a_recipe_without_its_plus_is_explained(tmp_path: Path) -> None:
    assert "write +recipe=NAME with the plus" in call(tmp_path, "recipe=gsm8k_grpo").stderr


def test_an_error_of_the_run_is_one_line_and_code_1(tmp_path: Path) -> None:
    result = call(tmp_path, "seed=13")
    assert (result.returncode, result.stderr) == (1, "parallm: no such model\n")


def test_a_file_where_the_runs_should_go_is_named(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("")
    result = call(tmp_path, "name=mine")
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("parallm: the run folder checkpoints/mine/")
    assert "cannot be written: checkpoints is a file; make room for it, start in another folder" in line


def test_a_disk_that_takes_no_file_stops_the_run_before_it_starts(tmp_path: Path) -> None:
    limited = ["bash", "-c", 'ulimit -f 0; exec "$@"', "bash", sys.executable, "-c", PROBE, "name=mine"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(limited, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (1, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"parallm: the run folder {tmp_path}/checkpoints/mine/")
    assert not any((tmp_path / "checkpoints").iterdir())


def test_a_sweep_runs_every_combination_in_a_folder_of_its_own(tmp_path: Path) -> None:
    result = call(tmp_path, "-m", "learner.learning_rate=0.1,0.2", "name=mine")
    lines = [line.split() for line in result.stdout.splitlines() if line.startswith("mine ")]
    assert [line[2] for line in lines] == ["0.1", "0.2"], result.stderr
    assert [Path(line[-1]).name for line in lines] == ["0", "1"]
    assert Path(lines[0][-1]).parent.name.startswith("sweep_")


def test_help_lists_recipes_with_their_first_line_and_every_key(tmp_path: Path) -> None:
    text = call(tmp_path, "--help").stdout
    assert "+recipe=gsm8k_grpo           GRPO on grade-school word problems." in text
    assert "server=local|network|off" in text
    assert "max_gradient_norm: 1.0" in text
