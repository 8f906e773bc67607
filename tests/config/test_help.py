"""`--help`: every key with its meaning, groups and recipes by name, fast and without MLX."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from parallm.config.help import USED_MOST, Key, help_page, keys_of, meaning_of
from parallm.config.schema import COMMANDS, PACKAGE_FOLDER, fields_of
from parallm.errors import ConfigError

ROOT = Path(__file__).parents[2]
LOOPS = 65
"""What a command may take, in the processor time of a million rounds of an empty loop before or after it: a core that
others share is half as fast for both."""
FRAGMENT = ("Of ", "That ", "Where ", "By ", "With ", "Whose ", "Who ")
NO_MLX = """
import sys, time
def looped():
    began = time.process_time()
    for _ in range(1_000_000):
        pass
    return time.process_time() - began
loop = looped()
began = time.process_time()
from parallm.{0} import main
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
assert not {{"mlx", "mlx.core", "mlx_lm"}} & set(sys.modules)
used = time.process_time() - began
loops = used / max(loop, looped())
sys.exit(f"{{loops}} loops" if loops > {1} else 0)
"""


def keys(command: str) -> dict[str, Key]:
    return {key.name: key for key in keys_of(COMMANDS[command])}


def page(command: str, *topics: str, width: int = 80) -> str:
    os.environ["COLUMNS"] = str(width)
    try:
        return help_page(command, topics)
    finally:
        del os.environ["COLUMNS"]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_key_has_a_meaning_that_can_be_read_by_itself(command: str) -> None:
    assert [key.name for key in keys_of(COMMANDS[command]) if not key.meaning or key.meaning.startswith(FRAGMENT)] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_every_group_has_a_meaning(command: str) -> None:
    groups = [name for name in fields_of(COMMANDS[command]) if (PACKAGE_FOLDER / name).is_dir()]
    assert [group for group in groups if not meaning_of(COMMANDS[command], group)] == []


@pytest.mark.parametrize(
    ("name", "kind", "default"),
    [
        ("trainer.steps", "integer, 1 or more", "100"),
        ("trainer.evaluate_k", "list of integer, above 0", "[]"),
        ("learner.clip_low", "number, 0 to 1 | null", "null"),
        ("learner.betas", "[number, number]", "[0.9, 0.95]"),
        ("learner.micro_batch_tokens", "integer, 16 or more | auto", "auto"),
        ("model.lora.ranks", "mapping of names to integer, 1 to 512", "{}"),
        ("checkpoint.resume", "text", "never"),
        ("server.enabled", "true | false", "true"),
        ("server.api_keys[].role", "inference | training | admin", None),
        ("environment.parts.NAME.weight", "number, above 0", "1.0"),
        ("policies", "mapping", "{}"),
    ],
)
def test_a_key_has_its_type_and_default_in_words(name: str, kind: str, default: str | None) -> None:
    key = keys("train")[name]
    assert (key.kind, key.default) == (kind, default)


def test_an_inherited_key_has_its_meaning() -> None:
    assert keys("evaluate")["rollout.max_tokens"].meaning.startswith("Tokens of a whole episode")
    assert keys("train")["rollout.max_tokens"].meaning == keys("evaluate")["rollout.max_tokens"].meaning


def test_the_overview_of_a_command_has_groups_recipes_and_the_keys_used_most() -> None:
    text = page("train")
    assert "  server=local|network|off\n      HTTP: address, keys, limits.\n" in text
    assert "  +recipe=gsm8k_grpo\n      GRPO on grade-school word problems.\n" in text
    assert "  trainer.steps=100  (integer, 1 or more)\n      Updates of the adapter until training ends.\n" in text
    assert "max_gradient_norm" not in text


@pytest.mark.parametrize("command", COMMANDS)
def test_the_keys_used_most_are_keys(command: str) -> None:
    assert set(USED_MOST[command]) <= keys(command).keys()


def test_other_commands_list_only_what_they_use() -> None:
    serve, evaluate, export = (page(command) for command in ("serve", "evaluate", "export"))
    assert "recipe" not in serve + evaluate + export
    assert not any(f"  {part}" in serve for part in ("learner", "trainer", "environment", "rollout", "checkpoint"))
    assert "metrics=" not in serve, "wandb is for training"
    assert "rollout=" not in evaluate, "so is learning from clients"
    assert "  learner" not in evaluate
    assert "  server" not in evaluate + export


def test_help_about_a_group_explains_its_keys_and_choices() -> None:
    text = page("train", "learner")
    assert text.startswith("learner: The loss, the optimizer, and data for supervised training.\n")
    assert "  learner=cispo: CISPO: the ratio is a bounded weight" in text
    assert "  learner.learning_rate=5e-05  (number, 0 or more)\n      Step size of AdamW after the warm-up.\n" in text


def test_help_about_environments_has_the_keys_of_each() -> None:
    text = page("train", "environment")
    assert text.index("environment=gsm8k:") < text.index("environment.path=openai/gsm8k") < text.index("=mixed:")
    assert "environment.name" not in text, "it is chosen as a whole"
    assert page("train", "gsm8k").lstrip().startswith("environment.path=openai/gsm8k")


def test_help_about_a_key_or_keys_below_one() -> None:
    assert page("train", "learner.kl_coefficient").count("\n  learner.") == 0
    assert page("train", "learner.kl_coefficient").startswith("  learner.kl_coefficient=null")
    assert page("train", "trainer.guard").count("  trainer.guard.") == 5


def test_help_about_a_recipe_shows_its_file() -> None:
    assert "override /environment: gsm8k" in page("train", "gsm8k_grpo")


def test_help_about_something_unknown_names_the_nearest() -> None:
    for topic, nearest in (("trainr", "trainer"), ("gsm8k_gro", "gsm8k_grpo"), ("trainer.step", "trainer.steps")):
        with pytest.raises(ConfigError, match=rf"--help {topic}: nothing has this name, did you mean {nearest}\?"):
            page("train", topic)
    with pytest.raises(ConfigError, match="--help learner: nothing has this name"):
        page("serve", "learner")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_into_80_columns_but_for_names_that_cannot_be_broken(command: str) -> None:
    wide = [line for line in page(command).splitlines() if len(line) > 80]
    assert all(line.count(" ") - line.index(line.strip()) < 2 for line in wide)


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["--help", "trainer"]])
def test_help_and_version_are_fast_and_load_no_mlx(arguments: list[str], tmp_path: Path) -> None:
    script = NO_MLX.format("train", LOOPS)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", script, *arguments]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout
    assert list(tmp_path.iterdir()) == []


def test_the_version_names_what_a_report_needs(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "parallm.train", "--version"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    (line,) = done.stdout.splitlines()
    assert line.startswith("ParaLLM ")
    assert all(word in line for word in (", mlx ", ", mlx-lm ", ", Python "))
