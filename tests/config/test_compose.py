"""Who has asked for an environment."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from parallm.config.compose import names_environment

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("overrides", "recipe", "is_asked"),
    [
        (["learner=sft", "learner.data=environment.jsonl", "name=environment"], {}, False),
        (["environment=gsm8k"], {}, True),
        (["environment.levels=[1]"], {}, True),
        (["+environment.levels=[1]"], {}, True),
        ([], {"learner": {"preset": "sft"}, "trainer": {"steps": 3}}, False),
        ([], {"environment": {"levels": [1]}}, True),
        ([], {"defaults": [{"override /environment": "arithmetic"}, "_self_"]}, True),
        ([], {"defaults": [{"override /learner": "sft"}, "_self_"]}, False),
    ],
)
def test_the_command_line_and_recipes_ask(overrides: list[str], recipe: dict[str, Any], is_asked: bool) -> None:
    assert names_environment(overrides, recipe) is is_asked


# The real command, with a run that only says what it was given.
PROBE = """
import sys
from parallm.run.command import run_command

def run(config, folder, blas):
    print(config.trainer.evaluate_on, config.environment.name)
    return 0

sys.exit(run_command("train", run))
"""


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["learner=sft"], "auto arithmetic"),
        (["learner=sft", "environment=arithmetic"], "environment arithmetic"),
        (["learner=reward_model", "environment=arithmetic"], "auto arithmetic"),
        (["learner=sft", "environment=gsm8k", "trainer.evaluate_on=data"], "data gsm8k"),
        (["+recipe=mine"], "environment arithmetic"),
    ],
)
def test_what_was_asked_for_reaches_the_run(tmp_path: Path, arguments: list[str], expected: str) -> None:
    (tmp_path / "recipes").mkdir()
    text = "# Mine.\ndefaults: [{override /environment: arithmetic}, {override /learner: sft}, _self_]\nname: mine\n"
    (tmp_path / "recipes" / "mine.yaml").write_text(text)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", PROBE, *arguments]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == expected, done.stderr
