"""What may stand on a command line beside overrides, and what is said about the rest."""

import subprocess
import sys

import pytest

from parallm.config.command_line import asks_version, check_words, help_topics
from parallm.errors import ConfigError

KNOWN = {"trainer": {"steps": 100}, "learner": {"learning_rate": 5e-5}, "seed": 0}


def complaint_about(*words: str, recipes: tuple[str, ...] | None = ("gsm8k_grpo",)) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        check_words(words, KNOWN, recipes)
    return str(raised.value).splitlines()


@pytest.mark.parametrize("words", [("--help",), ("-h",), ("help",), ("trainer.steps=3", "--help")])
def test_help_is_asked_for_in_any_of_the_usual_ways(words: tuple[str, ...]) -> None:
    assert help_topics(words) == []


@pytest.mark.parametrize("words", [("--help", "trainer"), ("help", "trainer"), ("trainer", "-h"), ("--help=trainer",)])
def test_help_is_about_the_word_beside_it(words: tuple[str, ...]) -> None:
    assert help_topics(words) == ["trainer"]


def test_a_run_asks_for_neither_help_nor_version() -> None:
    assert help_topics(["+recipe=gsm8k_grpo", "name=help", "-m"]) is None
    assert not asks_version(["name=version"])
    assert asks_version(["--version"])


def test_overrides_and_options_of_hydra_pass() -> None:
    words = ["-m", "+recipe=gsm8k_grpo", "seed=0,1", "--cfg", "job", "--cfg=hydra", "~trainer", "-cn", "x", "--info"]
    check_words(words, KNOWN, ["gsm8k_grpo"])


def test_a_recipe_given_as_an_option_or_a_word_is_told_how_to_be_chosen() -> None:
    expected = "a recipe is chosen by +recipe=gsm8k_grpo"
    assert complaint_about("--recipe", "gsm8k_grpo") == [f"--recipe: {expected}"]
    assert complaint_about("--recipe=gsm8k_grpo") == [f"--recipe=gsm8k_grpo: {expected}"]
    assert complaint_about("gsm8k_grpo") == [f"gsm8k_grpo: {expected}"]


def test_a_recipe_for_a_command_that_takes_none_is_refused() -> None:
    (line,) = complaint_about("+recipe=gsm8k_grpo", recipes=None)
    assert line == "+recipe=gsm8k_grpo: belongs to parallm.train; this command takes no recipe"


def test_keys_with_dashes_and_without_values_are_explained() -> None:
    lines = complaint_about("--learner.learning_rate=1", "--seed", "trainer.steps", "--fast", "quick")
    assert lines == [
        "--learner.learning_rate=1: a key stands without dashes: learner.learning_rate=1",
        "--seed: a key stands without dashes: seed=VALUE",
        "trainer.steps: a key needs a value: trainer.steps=VALUE; --help trainer.steps says which",
        "--fast: unknown option; --help shows what there is",
        "quick: neither key=value nor group=choice; --help shows what there is",
    ]


@pytest.mark.parametrize("command", ["parallm.train", "parallm.serve", "parallm.evaluate", "parallm.export"])
def test_a_python_without_what_parallm_needs_is_told_to_activate_the_one_that_has_it(command: str) -> None:
    program = f"import runpy, sys; sys.modules['hydra'] = None; runpy.run_module({command!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "source .venv/bin/activate" in done.stderr
    assert len(done.stderr.splitlines()) == 1
