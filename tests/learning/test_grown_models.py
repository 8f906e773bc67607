"""A hybrid and a mixture of experts, about 10M parameters each, learn arithmetic by GRPO as nano does.

Scripts make both of nano, from a seed. What nano's recipe trains in 16 steps, they have 60 for at most.
"""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from bench.processes import ROOT, clean_environment

from tests.learning.test_presets import learning_run

TARGETS = {"hybrid": "[all-linear,experts]", "mixture": "experts"}
"""LoRA targets by the model's name, which its script's has, too; routers are never among them."""
FIGURES = {"hybrid": "hybrid", "mixture": "experts"}


@pytest.fixture(scope="module", params=TARGETS)
def grown(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A model's name and its folder."""
    name: str = request.param
    folder = tmp_path_factory.mktemp(name) / "model"
    command = [sys.executable, str(ROOT / "scripts" / f"build_{name}.py"), "--out", str(folder)]
    subprocess.run(command, cwd=ROOT, env=clean_environment(), check=True)
    return name, folder


@pytest.mark.learning
def test_a_grown_model_reaches_the_target_of_nano(
    grown: tuple[str, Path], tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    name, _ = grown
    run = learning_run(tmp_path / "run", *overrides(*grown))
    record_property(f"{FIGURES[name]}.learning_accuracy", run.accuracies[-1])
    assert run.accuracies[0] < 0.6
    assert run.steps_to_target is not None


@pytest.mark.learning
def test_a_grown_model_learns_nothing_with_a_learning_rate_of_zero(
    grown: tuple[str, Path], tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    name, _ = grown
    run = learning_run(tmp_path / "control", *overrides(*grown), "learner.learning_rate=0", "trainer.steps=8")
    record_property(f"{FIGURES[name]}.learning_control_gain", run.accuracies[-1] - run.accuracies[0])
    assert abs(run.accuracies[-1] - run.accuracies[0]) <= 0.02


def overrides(name: str, folder: Path) -> tuple[str, ...]:
    return ("learner=grpo", f"model.path={folder}", f"model.lora.targets={TARGETS[name]}")
