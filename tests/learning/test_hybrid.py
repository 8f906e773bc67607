"""A hybrid of Mamba-2 and attention layers, made of nano by a script, learns arithmetic by GRPO as nano does."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from bench.processes import ROOT, clean_environment

from tests.learning.test_presets import learning_run


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hybrid") / "model"
    command = [sys.executable, str(ROOT / "scripts" / "build_hybrid.py"), "--out", str(folder)]
    subprocess.run(command, cwd=ROOT, env=clean_environment(), check=True)
    return folder


@pytest.mark.learning
def test_a_hybrid_reaches_the_target_of_nano(
    hybrid: Path, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    run = learning_run(tmp_path / "run", "learner=grpo", f"model.path={hybrid}")
    record_property("hybrid.learning_accuracy", run.accuracies[-1])
    assert run.accuracies[0] < 0.6
    assert run.steps_to_target is not None


@pytest.mark.learning
def test_a_hybrid_learns_nothing_with_a_learning_rate_of_zero(
    hybrid: Path, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    overrides = ("learner=grpo", "learner.learning_rate=0", "trainer.steps=16", f"model.path={hybrid}")
    run = learning_run(tmp_path / "control", *overrides)
    record_property("hybrid.learning_control_gain", run.accuracies[-1] - run.accuracies[0])
    assert abs(run.accuracies[-1] - run.accuracies[0]) <= 0.02
