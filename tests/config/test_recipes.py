"""Recipes and the two commands as a user calls them: in a process of their own, from any folder."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from parallm.config.help import help_page
from parallm.config.recipes import Recipe, check_asked, read_recipes, register_recipes
from parallm.config.schema import RunConfig, register_defaults, shipped, to_config
from parallm.environment.settings import MixedSettings
from parallm.errors import ConfigError

ROOT = Path(__file__).parents[2]
RECIPES = read_recipes(shipped("recipes"))

# The real command, with a run that only says what it was given.
PROBE = """
import asyncio
import json
import os
import signal
import sys
from parallm.run.command import run_command
from parallm.errors import ModelError
from parallm.interrupts import until_signal

async def interrupted():
    asyncio.get_running_loop().call_later(0.05, os.kill, os.getpid(), signal.SIGINT)
    await until_signal()

def run(config, folder, blas):
    if config.seed == 13:
        raise ModelError("no such model")
    (folder / "metrics.jsonl").touch()
    (folder / "summary.json").write_text(json.dumps({"figures": {"run.reward_last": config.seed / 4}}))
    if config.seed == 17:
        asyncio.run(interrupted())
        return 0
    print(config.name, config.seed, config.learner.learning_rate, config.model.path, folder)
    return config.seed

sys.exit(run_command("train", run))
"""


def call(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", PROBE, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def config_of(name: str) -> RunConfig:
    register_defaults()
    register_recipes(RECIPES.values())
    with initialize_config_dir(str(shipped("conf")), version_base="1.3"):
        return to_config(compose("train", [f"+recipe={name}"]), RunConfig)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_a_run_of_its_own_name(name: str) -> None:
    assert config_of(name).name == name


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_a_recipe_is_short_and_says_first_what_it_shows(recipe: Recipe) -> None:
    lines = recipe.path.read_text().splitlines()
    assert lines[0].startswith("# ")
    assert len(lines) < 20


def test_dr_grpo_differs_from_grpo_in_the_objective_only() -> None:
    plain, doctor = config_of("gsm8k_grpo"), config_of("gsm8k_dr_grpo")
    assert (plain.learner.preset, doctor.learner.preset) == ("dapo", "dr_grpo")
    assert (plain.rollout, plain.environment, plain.trainer) == (doctor.rollout, doctor.environment, doctor.trainer)


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
    assert result.returncode == 78
    assert result.stderr.startswith("parallm: recipe: 'gsm8k_gpo' is unknown, did you mean gsm8k_grpo? choices: ")
    assert list(tmp_path.iterdir()) == []


def test_a_misspelt_key_stops_the_command_and_leaves_no_run_folder(tmp_path: Path) -> None:
    result = call(tmp_path, "learner.learning_rat=1", "trainer.step=3")
    assert result.returncode == 78
    assert [line.split()[1] for line in result.stderr.splitlines()] == ["learner.learning_rat:", "trainer.step:"]
    assert list(tmp_path.iterdir()) == []


def test_misspelt_parts_and_choices_stop_the_command(tmp_path: Path) -> None:
    parts = call(tmp_path, "lerner.preset=dapo", "sed=3")
    assert [line.split()[1] for line in parts.stderr.splitlines()] == ["lerner:", "sed:"]
    choice = call(tmp_path, "server=locale")
    assert (parts.returncode, choice.returncode) == (78, 78)
    assert "server: 'locale' is unknown, did you mean local? choices: local, network, off" in choice.stderr


def test_a_recipe_without_its_plus_is_explained(tmp_path: Path) -> None:
    assert "write +recipe=NAME with the plus" in call(tmp_path, "recipe=gsm8k_grpo").stderr


def test_an_error_of_the_run_is_one_line_and_code_1_and_leaves_nothing(tmp_path: Path) -> None:
    result = call(tmp_path, "seed=13")
    assert (result.returncode, result.stderr) == (1, "parallm: no such model\n")
    assert list(tmp_path.iterdir()) == []


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
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_runs_every_combination_in_a_folder_of_its_own(tmp_path: Path) -> None:
    result = call(tmp_path, "-m", "learner.learning_rate=0.1,0.2", "name=mine")
    lines = [line.split() for line in result.stdout.splitlines() if line.startswith("mine ")]
    assert [line[2] for line in lines] == ["0.1", "0.2"], result.stderr
    assert [Path(line[-1]).name for line in lines] == ["0", "1"]
    assert Path(lines[0][-1]).parent.name.startswith("sweep_")


def test_a_sweep_ends_with_a_table_of_its_jobs(tmp_path: Path) -> None:
    result = call(tmp_path, "-m", "seed=0,13,2", "name=mine", "trainer.steps=4")
    assert result.returncode == 2, "the worst code"
    (folder,) = (tmp_path / "checkpoints" / "mine").glob("sweep_*")
    assert [path.name for path in sorted(folder.glob("*/"))] == ["0", "2"], "a start that failed leaves no folder"
    table = [line.split() for line in result.stdout.splitlines()[-6:]]
    assert table[0] == ["job", "seed", "reward", "last", "ended"]
    assert table[2:5] == [["0", "0", "0", "well"], ["1", "13", "-", "with", "1"], ["2", "2", "0.500", "with", "2"]]
    assert table[5] == [str((folder / "sweep.csv").relative_to(tmp_path))]
    assert (folder / "sweep.csv").read_text().splitlines() == [
        "job,policy,seed,exit_code,reward_last",
        "0,,0,0,0.0",
        "1,,13,1,",
        "2,,2,2,0.5",
    ]


def test_a_sweep_that_a_signal_has_stopped_begins_no_further_job(tmp_path: Path) -> None:
    result = call(tmp_path, "-m", "seed=17,0", "name=mine")
    assert result.returncode == 0
    assert "parallm: job 1" not in result.stderr
    assert result.stdout.splitlines()[-2].split() == ["0", "17", "mine", "4.25", "well"]


def test_a_sweep_whose_jobs_all_fail_to_start_leaves_no_folder(tmp_path: Path) -> None:
    assert call(tmp_path, "-m", "seed=13", "name=mine").returncode == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("learner: {preset: dapo\n", "cannot be read: line 2, column 1: expected ',' or '}'"),
        ("- learner\n", "must be a mapping of keys to values"),
        ("a: \udcff", "cannot be read: "),
    ],
)
def test_a_recipe_that_cannot_be_read_is_marked_and_costs_only_those_who_ask(
    text: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "bad.yaml").write_text(text, errors="surrogateescape")
    recipes = read_recipes()
    register_recipes(recipes.values())
    check_asked(["+recipe=gsm8k_grpo", "name=bad"], recipes)
    with pytest.raises(ConfigError) as raised:
        check_asked(["+recipe=gsm8k_grpo,bad"], recipes)
    assert str(raised.value).startswith("recipe recipes/bad.yaml ")
    assert fault in str(raised.value)
    assert f"  +recipe=bad\n      BROKEN: recipe recipes/bad.yaml {fault[:14]}" in help_page("train", [])
    with pytest.raises(ConfigError, match=r"recipe recipes/bad\.yaml"):
        help_page("train", ["bad"])


def test_a_broken_recipe_hides_the_shipped_one_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "gsm8k_grpo.yaml").write_text("- x\n")
    with pytest.raises(ConfigError, match=r"recipes/gsm8k_grpo\.yaml must be a mapping"):
        check_asked(["+recipe=gsm8k_grpo"], read_recipes())


def test_a_folder_called_like_a_recipe_is_marked_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes" / "odd.yaml").mkdir(parents=True)
    assert "BROKEN: recipe recipes/odd.yaml cannot be read: Is a directory" in help_page("train", [])


def test_commands_run_beside_a_broken_recipe(tmp_path: Path) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "bad.yaml").write_text("learner: {preset: dapo\n")
    assert call(tmp_path).returncode == 0
    asked = call(tmp_path, "+recipe=bad")
    assert (asked.returncode, len(asked.stderr.splitlines())) == (78, 1)
    assert asked.stderr.startswith("parallm: recipe recipes/bad.yaml cannot be read: line 2, column 1: ")


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_the_first_sentence_of_a_recipe_stands_in_the_help(recipe: Recipe) -> None:
    assert re.fullmatch(r"[A-Z][^\n]{20,250}\.", recipe.summary)
    assert not re.search(r"\b(Dr|e\.g|i\.e|vs)\.$", recipe.summary), "the sentence goes on"


def test_the_mixture_of_the_guide_is_a_recipe_that_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guide = (ROOT / "parallm" / "environment" / "README.md").read_text()
    (text,) = re.findall(r"```yaml\n(.*?)```", guide, re.DOTALL)
    (tmp_path / "mix.yaml").write_text(text)
    recipes = read_recipes(shipped("recipes"), tmp_path)
    register_recipes([recipes["mix"]])
    register_defaults()
    with initialize_config_dir(str(shipped("conf")), version_base="1.3"):
        environment = to_config(compose("train", ["+recipe=mix"]), RunConfig).environment
    assert isinstance(environment, MixedSettings)
    assert {name: part.weight for name, part in environment.parts.items()} == {"easy": 3, "tool": 1}
