"""curves.png is a picture, whatever the run has left."""

from pathlib import Path
from typing import Any

import pytest

from parallm.metrics.curves import draw_curves, points, running_mean

STEP = {"step": 1, "reward/mean": 0.5, "update/kl_to_behaviour": None, "completion/length_mean": 60.0}
EVALUATION = {"step": 0, "heldout/accuracy": 0.3, "heldout/low": 0.26, "heldout/high": 0.34}


@pytest.mark.parametrize(
    ("steps", "evaluations"),
    [
        ([], []),
        ([STEP], []),
        ([STEP], [EVALUATION]),
        ([{**STEP, "step": step} for step in range(100)], [EVALUATION]),
        ([{**STEP, "reward/mean": -3.0}], [EVALUATION]),
        ([{**STEP, "reward/mean": None}], [{"step": 0, "heldout/accuracy": None}]),
    ],
)
def test_a_picture_is_written(tmp_path: Path, steps: list[dict[str, Any]], evaluations: list[dict[str, Any]]) -> None:
    draw_curves(steps, evaluations, file=tmp_path / "curves.png", title="run")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert [file.name for file in tmp_path.iterdir()] == ["curves.png"]


def test_a_name_without_numbers_has_no_points() -> None:
    assert points([STEP], "update/kl_to_behaviour") == ([], [])


def test_the_running_mean_looks_back_only_and_skips_gaps() -> None:
    assert running_mean([1.0, 3.0, float("nan"), 5.0], 2) == [1.0, 2.0, 3.0, 5.0]
